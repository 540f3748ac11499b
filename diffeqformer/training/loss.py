"""The loss of a batch and its gradient, on many devices.

The path of a batch of tokens [B, S] (L steps of depth; T times, the product of L and the solver's number of nodes):

    grid                  -> layers {name: [T, inputs, outputs], ...}    generated once; each device makes its part
    layers                -> the same, gathered over `generator`         each device holds a larger part
    each device, for each microbatch of its examples:
      tokens [b, S]       -> x(0) [b, S, D]                              embedding, gathered
      x(0), layers        -> x(1) [b, S, D]                              one scan over L; a step gathers W(t_n) alone
      x(1)                -> loss, a scalar                              head, without ever holding all logits
    d loss / d layers and d loss / d other parameters                    summed over microbatches in fp32, then once
                                                                         over the devices that hold the same part
    d loss / d layers     -> d loss / d generator                        pulled back once
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from diffeqformer.cross_entropy import cross_entropy
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import StackedWeights, in_type
from diffeqformer.fields.attention import plain
from diffeqformer.fields.layers import Context, at_its_precision, multiplying
from diffeqformer.parallel.mesh import AXES
from diffeqformer.parallel.sharding import (
    BATCH,
    EVERYWHERE,
    GENERATOR_ROWS,
    ROWS,
    gather,
    identity,
    on_each_device,
    scatter,
    sum_copies,
)
from diffeqformer.training.projections import Projections
from diffeqformer.transformer import Transformer, layer_specs, merge_trees, partition_specs, select

BY_EXAMPLE = PartitionSpec(BATCH)


class ShardedLoss:
    """The loss of one model on one mesh. Each device computes with its own examples and its own part of the weights.

    Args:
        params: the parameters of the model, or their shapes.
        attend: causal attention (`diffeqformer.fields.attention`).
        kernels: None, or what computes the products with a generator's P (`depth.projection.KERNELS`). Then the
            gradient has `Factors` in the place of each P.
        teacher: a model whose distributions this one learns as well (`diffeqformer.training.teacher`), or None.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: dict,
        mesh: Mesh,
        attend: Callable = plain,
        kernels: str | None = None,
        teacher: Any = None,
    ):
        abstract = jax.eval_shape(lambda: params)
        model = nnx.merge(graph, abstract)
        self.graph, self.abstract, self.mesh, self.attend = graph, abstract, mesh, attend
        self.trains, self.precision, self.teacher = model.trains, model.precision, teacher
        self.param_specs = partition_specs(model)
        self.other_specs = without_depth(self.param_specs)
        self.generator_specs = layer_specs(model, GENERATOR_ROWS if model.depth.continuous else ROWS)
        self.layer_specs = self.step_specs = layer_specs(model, ROWS)
        if not model.depth.constant:  # a step has no axis of time
            self.step_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), self.layer_specs)
        self.projections = None
        if kernels and model.depth.generates_kernels:
            specs = self.param_specs["depth"]["layers"]
            self.projections = Projections(model, specs, self.generator_specs, mesh, kernels)

    def trained_and_frozen(self, tree: dict) -> tuple[dict, dict]:
        """The trained and the frozen part of a tree that is shaped like the parameters."""
        return select(tree, self.trains), select(tree, lambda path: not self.trains(path))

    @at_its_precision
    def value_and_grad(
        self,
        params: dict,
        tokens: Int[Array, "B S"],
        keys: Key[Array, "B"] | None,
        microbatches: int = 1,
        grid: Grid | None = None,
        teacher_state: PyTree = None,
    ) -> tuple[Float[Array, ""], dict]:
        """The mean loss of the next token in nats, and its gradient: a tree like `params`, without the frozen part.

        Args:
            keys: one dropout key for each example, or None.
            microbatches: number of equal parts of each device's examples, processed one after the other.
            grid: the steps of depth; by default the model's own grid.
            teacher_state: the teacher's, if there is one. Then its weight times the divergence from it is added.
        """
        model = nnx.merge(self.graph, params)
        grid = grid or model.grid()
        trained, frozen = self.trained_and_frozen(params)
        depth, factors = trained["depth"], {}
        made_type, summed_type = self.types_of_weights(model, microbatches)
        if self.projections:
            depth = select(depth, lambda path: path[-1] != "projection")
            factors = self.projections.factors(len(grid.times), summed_type)

        def generate(depth, factors):
            """The layers in the type of their gradient: the part that trains, and the frozen part."""
            model = nnx.merge(self.graph, merge_trees(params, {"depth": depth}))
            made = model.depth(grid, self.projections.projects(factors, made_type)) if factors else model.depth(grid)
            return self.trained_and_frozen({"depth": {"layers": in_type(made, summed_type)}})

        layers, pull_back, frozen_layers = jax.vjp(generate, depth, factors, has_aux=True)
        layers["depth"]["layers"] = in_type(layers["depth"]["layers"], made_type)
        specs, frozen_specs = self.trained_and_frozen(self.other_specs | {"depth": {"layers": self.generator_specs}})
        count = tokens.shape[0] * (tokens.shape[1] - 1)

        def on_device(trained, frozen, step_sizes, teacher_state, tokens, keys):
            trained = gather(trained, specs, ("generator",))
            loss_of = functools.partial(
                self.microbatch_loss, model.stack, frozen, step_sizes, teacher_state, microbatches / count
            )
            loss, gradient = accumulate_gradients(jax.value_and_grad(loss_of), trained, (tokens, keys), microbatches)
            gradient["depth"]["layers"] = in_type(gradient["depth"]["layers"], summed_type)
            return jax.lax.psum(loss, AXES), sum_copies(scatter(gradient, specs, ("generator",)), specs)

        of_keys = None if keys is None else BY_EXAMPLE
        in_specs = (specs, frozen_specs, EVERYWHERE, self.teacher and self.teacher.specs, BY_EXAMPLE, of_keys)
        on_devices = on_each_device(self.mesh, on_device, in_specs, (EVERYWHERE, specs))
        loss, gradient = on_devices(
            trained | layers, frozen | frozen_layers, grid.step_sizes, teacher_state, tokens, keys
        )
        with multiplying(model.depth.precision):
            d_depth, d_factors = pull_back({"depth": gradient["depth"]})
        d_projections = {"layers": {name: {"projection": d_factor} for name, d_factor in d_factors.items()}}
        return loss, gradient | {"depth": merge_trees(d_depth, d_projections) if d_factors else d_depth}

    def types_of_weights(self, model: Transformer, microbatches: int) -> tuple[jnp.dtype, jnp.dtype]:
        """The type in which weights are made, and that of their gradients as they are summed and pulled back.

        The depth loop would round weights to the compute type, and its gradients have it. Over `fsdp` they are summed
        in it, within the loop; over microbatches and copies in fp32. On one device and with one microbatch nothing is
        summed, and a longer type would hold the same numbers. Weights that all steps share have a gradient that is
        summed over steps, so the loop takes them, and gathers them, in fp32.
        """
        float32 = jnp.dtype(jnp.float32)
        if model.depth.constant:
            return float32, float32
        return model.dtype, float32 if microbatches * self.mesh.size > 1 else model.dtype

    def microbatch_loss(
        self, stack: Callable, frozen: dict, step_sizes, teacher_state, scale, trained: dict, tokens, keys
    ) -> Float[Array, ""]:
        """One device's part of a microbatch's mean loss. `scale` is 1 / its scored positions on all devices."""
        others = merge_trees(trained, frozen)
        layers = others.pop("depth")["layers"]
        scored = jnp.zeros(tokens.shape, jnp.float32).at[:, :-1].set(scale)
        return self.local_loss(others, stack(layers, step_sizes), tokens, keys, scored, teacher_state)

    def local_loss(
        self, others: dict, weights: StackedWeights, tokens, keys, scored, teacher_state=None
    ) -> Float[Array, ""]:
        """The sum over one device's positions of `scored` [B, S] times the loss of the next token in nats.

        Devices that share the work of every token (`tensor`) each compute all states, and divide up the positions of
        the loss.
        """
        model = self.model_on_device(others)
        context = self.context_on_device(model, keys)
        x = model.last_state(tokens, self.gathering(weights), context)
        return self.loss_of_states(model, x, tokens, scored, teacher_state)

    def model_on_device(self, others: dict) -> Transformer:
        """The whole model without depth weights, from this device's parts of its parameters."""
        others = gather(others, self.other_specs, ("fsdp", "tensor"))
        return nnx.merge(self.graph, {**others, "depth": self.abstract["depth"]})  # which nothing reads

    def context_on_device(self, model: Transformer, keys: Key[Array, "B"] | None) -> Context:
        """What the vector field needs on a device, which may share the work of every token with others."""
        total = functools.partial(jax.lax.psum, axis_name="tensor") if self.mesh.shape["tensor"] > 1 else identity
        return Context.attending(self.attend, keys=keys, dropout=model.dropout, total=total)

    def gathering(self, weights: StackedWeights) -> StackedWeights:
        """Weights of which a device has a part, and gathers those of each step."""
        if self.mesh.shape["fsdp"] == 1:
            return weights
        return dataclasses.replace(weights, gather=lambda layers: gather(layers, self.step_specs, ("fsdp",)))

    def loss_of_states(
        self, model: Transformer, x, tokens, scored, teacher_state=None, microbatches: int = 1
    ) -> Float[Array, ""]:
        """The part of `local_loss` after the last states `x` [B, S, D]. A teacher reads one microbatch at a time."""
        matrix, targets = model.head_matrix(), jnp.roll(tokens, -1, axis=1)
        soft = teacher_state and self.teacher.soft_targets(teacher_state, tokens, len(matrix), microbatches)
        of_positions = x, targets, scored, soft and soft.states
        if (shared := self.mesh.shape["tensor"]) > 1:
            length, start = tokens.shape[1] // shared, jax.lax.axis_index("tensor") * (tokens.shape[1] // shared)
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1)
            of_positions = jax.tree.map(cut, of_positions)
        x, *others = of_positions
        x, targets, scored, states = jax.tree.map(
            lambda array: array.reshape(-1, *array.shape[2:]), (model.normalize(x), *others)
        )
        soft = soft and soft._replace(states=states)
        return cross_entropy(x, matrix, targets, scored, model.vocab_size, soft)

    @at_its_precision
    def sum_and_count(
        self,
        params: dict,
        weights: StackedWeights,
        tokens: Int[Array, "B S"],
        valid: Shaped[Array, "B 1"],
        microbatches: int = 1,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The summed loss in nats, and the number of tokens in it: all but the first of each valid window."""

        def on_device(others, layers, step_sizes, tokens, valid):
            here = dataclasses.replace(weights, layers=layers, step_sizes=step_sizes)
            batch = tokens, scored_positions(tokens, valid)

            def sum_of(tokens, scored):
                return self.local_loss(others, here, tokens, None, scored)

            return sum_over_devices(accumulate(sum_of, jnp.float32(0.0), batch, microbatches), batch[1])

        specs = (self.other_specs, self.layer_specs, EVERYWHERE, BY_EXAMPLE, BY_EXAMPLE)
        on_devices = on_each_device(self.mesh, on_device, specs, EVERYWHERE)
        return on_devices(without_depth(params), weights.layers, weights.step_sizes, tokens, valid)


def without_depth(params: dict) -> dict:
    """The parameters that aren't depth weights."""
    return {name: value for name, value in params.items() if name != "depth"}


def scored_positions(tokens: Int[Array, "B S"], valid: Shaped[Array, "B 1"]) -> Float[Array, "B S"]:
    """1 at each position of a valid window that has a next token, 0 elsewhere."""
    return (valid * (jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1)).astype(jnp.float32)


def sum_over_devices(total: Float[Array, ""], scored: Float[Array, "B S"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A device's part of a sum over `scored` positions, and their number, added up over all devices."""
    return jax.lax.psum(total, AXES), jax.lax.psum(jnp.sum(scored), BATCH)


def split_batch(array: Shaped[Array, "B ..."], parts: int) -> Shaped[Array, "parts rows ..."]:
    """The microbatches of a batch. The m-th has rows m, m + parts, ..., so every device has a share of each."""
    return array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)


def accumulate_gradients(
    differentiate: Callable, at: dict, batch: tuple, microbatches: int
) -> tuple[Float[Array, ""], dict]:
    """The mean over microbatches of a value and its gradient `at` something. With several, it is fp32."""
    if microbatches == 1:
        return differentiate(at, *batch)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (jnp.float32(0.0), at))
    total = accumulate(functools.partial(differentiate, at), start, batch, microbatches)
    return jax.tree.map(lambda leaf: leaf / microbatches, total)


def accumulate(function: Callable, start: PyTree, batch: tuple, microbatches: int) -> PyTree:
    """The sum of what a function finds for each microbatch, one after the other, from zeros `start` on."""
    if microbatches == 1:
        return function(*batch)
    parts = jax.tree.map(lambda array: split_batch(array, microbatches), batch)

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(*part)), None

    return jax.lax.scan(add, start, parts)[0]
