"""The pure functions that a run compiles: initial state, train step, evaluation.

The state is a plain tree, {"params": ..., "optimizer": ..., "step": int32}; a checkpoint that holds it
forgets nothing, since data and dropout are functions of the seed and the step.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, Shaped

from diffeqformer.depth.low_rank import FACTORS
from diffeqformer.depth.plain import StackedWeights, in_compute_type, stage_times, step_sizes
from diffeqformer.errors import UserError
from diffeqformer.fields.attention import fastest, plain
from diffeqformer.fields.layers import Context, as_it_is
from diffeqformer.parallel.sharding import AXES, BATCH, by_device, gather, sharding, sum_copies
from diffeqformer.training.cross_entropy import cross_entropy
from diffeqformer.training.optimizer import learning_rate_schedule, make_optimizer
from diffeqformer.transformer import (
    Transformer,
    abstract_model,
    merge_trees,
    new_model,
    random_key,
    select,
    split_model,
    split_specs,
)


def dropout_keys(seed: int, step: Int[Array, ""], batch_size: int) -> Key[Array, "B"]:
    """One key for each example of the global batch, from (seed, step, index of the example)."""
    key = jax.random.fold_in(random_key(seed, "dropout"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch_size))


def random_times(model: Transformer, how: str, seed: int, step: Int[Array, ""]) -> tuple[Array, Array]:
    """The times of one training step, jittered or shifted: the ends of its steps of depth, and when weights are taken."""
    key, times, nodes = jax.random.fold_in(random_key(seed, "times"), step), model.times(), model.solver.nodes
    if how == "shifted":
        size = float(times[0])
        ends = jnp.append(jnp.asarray(times, jnp.float32) - size * jax.random.uniform(key), jnp.float32(times[-1]))
        return ends, stage_times(ends, nodes)
    stages = stage_times(times, nodes)
    moved = np.repeat(np.diff(times, prepend=0.0), len(nodes)) * jax.random.uniform(key, stages.shape)
    return jnp.asarray(times, jnp.float32), jnp.maximum(stages - moved, 0.0).astype(jnp.float32)


class Program(NamedTuple):
    """The compiled functions of one run on one mesh.

    graph: the model's structure, to be merged with `state["params"]`
    attention: a word on which attention is used
    state_shardings, batch_sharding: where the state and a batch [B, S] live
    init(base) -> state; base: parameters that don't start at random (donated), or None
    trained(params), frozen(params) -> the part of a tree like the parameters that trains, and the rest
    train_step(state, tokens [B, S]) -> (state, metrics); the state that goes in is donated
    weights(params, num_steps) -> the stacked weights of the grid of so many steps; None: of the trained one
    evaluate(params, weights, tokens [B, S], valid [B, 1]) -> clu Average of the loss over the targets of valid rows
    """

    graph: nnx.GraphDef
    attention: str
    state_shardings: dict
    batch_sharding: NamedSharding
    init: Callable
    trained: Callable
    frozen: Callable
    train_step: Callable
    weights: Callable
    evaluate: Callable


def split_batch(array: Shaped[Array, "B ..."], parts: int) -> Shaped[Array, "parts rows ..."]:
    """The microbatches of a batch: the m-th has rows m, m + parts, ..., so that every device has its share of each.

    Raises:
        UserError: if they don't divide the batch.
    """
    if len(array) % parts:
        raise UserError(f"microbatches: must divide the batch ({len(array)} examples), but it is {parts}")
    return array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)


def without_time(specs: dict) -> dict:
    """The specs of one step's weights."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs)


class Losses:
    """The losses of one model on one mesh, each device working on its examples and its part of the weights.

    Args:
        graph: the structure of the model.
        params: its parameters, or their shapes.
        mesh: the devices.
        attend: causal attention (`diffeqformer.fields.attention`).
    """

    def __init__(self, graph: nnx.GraphDef, params: dict, mesh: Mesh, attend: Callable = plain):
        abstract = jax.eval_shape(lambda: params)
        model = nnx.merge(graph, abstract)
        self.graph, self.abstract, self.mesh, self.attend = graph, abstract, mesh, attend
        self.trains = model.trains
        self.param_specs, self.layer_specs = split_specs(model)
        self.other_specs = {name: specs for name, specs in self.param_specs.items() if name != "depth"}
        self.step_specs = self.layer_specs if model.depth.constant else without_time(self.layer_specs)
        self.merged_specs = select(self.layer_specs, lambda path: path[-1] not in FACTORS)

    def split(self, tree: dict) -> tuple[dict, dict]:
        """What trains of a tree like the parameters, and what is frozen."""
        return select(tree, self.trains), select(tree, lambda path: not self.trains(path))

    def device_losses(self, others, weights: StackedWeights, tokens, keys, scored) -> Float[Array, ""]:
        """The sum over this device's share of positions of `scored` [B, S] times the next token's loss in nats.

        Devices that share the work of every token (`tensor`) compute all states, and share the positions of the loss.
        """
        model = nnx.merge(
            self.graph, {**gather(others, self.other_specs, ("fsdp", "tensor")), "depth": self.abstract["depth"]}
        )
        if self.mesh.shape["fsdp"] > 1:
            specs = {
                layer: {name: self.step_specs[layer][name] for name in weights.layers[layer]}
                for layer in weights.layers
            }
            weights = dataclasses.replace(weights, gather=lambda layers: gather(layers, specs, ("fsdp",)))
        shared = self.mesh.shape["tensor"]
        total = (lambda y: jax.lax.psum(y, "tensor")) if shared > 1 else as_it_is
        context = Context(keys, model.dropout, attend=self.attend, total=total)
        x, targets = model.last_state(tokens, weights, context), jnp.roll(tokens, -1, axis=1)
        if shared > 1:
            length, start = tokens.shape[1] // shared, jax.lax.axis_index("tensor") * (tokens.shape[1] // shared)
            x, targets, scored = (jax.lax.dynamic_slice_in_dim(y, start, length, axis=1) for y in (x, targets, scored))
        x = model.normalize(x).reshape(-1, x.shape[-1])
        return cross_entropy(x, model.head_matrix(), targets.reshape(-1), scored.reshape(-1), model.vocab_size)

    def sums(self, others, weights: StackedWeights, tokens, valid) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The summed loss of every token but the first of the valid windows, and their number."""

        def on_device(others, layers, step_sizes, tokens, valid):
            here = dataclasses.replace(weights, layers=layers, step_sizes=step_sizes)
            scored = valid * (jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1)
            sums = self.device_losses(others, here, tokens, None, scored.astype(jnp.float32))
            return jax.lax.psum(sums, AXES), jax.lax.psum(jnp.sum(scored, dtype=jnp.float32), BATCH)

        everywhere, by_example = PartitionSpec(), PartitionSpec(BATCH)
        specs = (self.other_specs, self.merged_specs, everywhere, by_example, by_example)
        on_devices = by_device(self.mesh, on_device, specs, everywhere)
        return on_devices(others, weights.layers, weights.step_sizes, tokens, valid)

    def loss_and_gradient(
        self,
        params: dict,
        tokens: Int[Array, "B S"],
        keys: Key[Array, "B"] | None,
        microbatches: int = 1,
        times: tuple[Float[Array, "T"], Float[Array, "stages"]] | None = None,
    ) -> tuple[Float[Array, ""], dict]:
        """The mean next-token loss of a batch in nats, and its gradient: a tree like `params`, without what is frozen.

        The depth weights are generated once. Each microbatch is differentiated with respect to these weights
        and to the other parameters; their cotangents add up in fp32 on each device, are summed over the devices
        that have copies of the same part, and the generator is pulled back, all once.

        Args:
            keys: one dropout key per example, or None.
            microbatches: parts of each device's examples taken one after the other.
            times: the ends of the steps of depth, and when the solver takes weights; None: those of the grid.

        Raises:
            UserError: if the microbatches don't divide them.
        """
        model = nnx.merge(self.graph, params)
        dtype, stack = model.weights_dtype, model.stack
        ends, stages = times or (model.times(), stage_times(model.times(), model.solver.nodes))
        by_layer = lambda layers: {"depth": {"layers": layers}}  # noqa: E731

        def generate(depth):
            depth_weights = nnx.merge(self.graph, merge_trees(params, {"depth": depth})).depth
            return self.split(by_layer(in_compute_type(depth_weights(stages), dtype)))

        trained, frozen = self.split(params)
        layers, pull_back, frozen_layers = jax.vjp(generate, trained["depth"], has_aux=True)
        specs, frozen_specs = self.split(self.other_specs | by_layer(self.layer_specs))
        count = tokens.shape[0] * (tokens.shape[1] - 1)

        def on_device(trained, frozen, sizes, tokens, keys):
            def loss_of(trained, tokens, keys):
                others = merge_trees(trained, frozen)
                layers = others.pop("depth")["layers"]
                scored = jnp.zeros(tokens.shape).at[:, :-1].set(microbatches / count)
                return self.device_losses(others, stack(layers, sizes), tokens, keys, scored)

            loss, gradient = add_up(jax.value_and_grad(loss_of), trained, (tokens, keys), microbatches)
            return jax.lax.psum(loss, AXES), sum_copies(gradient, specs)

        everywhere, by_example = PartitionSpec(), PartitionSpec(BATCH)
        in_specs = (specs, frozen_specs, everywhere, by_example, None if keys is None else by_example)
        on_devices = by_device(self.mesh, on_device, in_specs, (everywhere, specs))
        loss, gradient = on_devices(trained | layers, frozen | frozen_layers, step_sizes(ends), tokens, keys)
        return loss, gradient | {"depth": pull_back({"depth": gradient["depth"]})[0]}


def add_up(differentiate: Callable, at: dict, batch: tuple, microbatches: int) -> tuple[Float[Array, ""], dict]:
    """The mean over microbatches of a value and its gradient `at` something; their sums are fp32."""
    if microbatches == 1:
        return differentiate(at, *batch)
    parts = jax.tree.map(lambda array: split_batch(array, microbatches), batch)

    def add(total, part):
        return jax.tree.map(jnp.add, total, differentiate(at, *part)), None

    like = (jnp.float32(0.0), at)
    total, _ = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like), parts)
    return jax.tree.map(lambda leaf, sum: (sum / microbatches).astype(leaf.dtype), like, total)


def make_program(config, mesh: Mesh, attention: tuple[Callable, str] | None = None) -> Program:
    """Prepare, without compiling yet, the functions of a run of `config` on `mesh`.

    Args:
        attention: causal attention, and a word on it for the log; by default the fastest for the mesh's devices.
    """
    graph, abstract = split_model(abstract_model(config))
    head_width = config.model.width // config.model.heads
    attend, word = attention or fastest(mesh.devices.flat[0], config.model.dtype, config.sequence_length, head_width)
    losses = Losses(graph, abstract, mesh, attend)
    place = lambda specs: jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)  # noqa: E731
    param_shardings, replicated = place(losses.param_specs), place(PartitionSpec())
    trained, frozen = (lambda tree, which=which: losses.split(tree)[which] for which in (0, 1))
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def init(base=None):
        params = merge_trees(nnx.to_pure_dict(nnx.state(new_model(config), nnx.Param)), base or {})
        return {"params": params, "optimizer": optimizer.init(trained(params)), "step": jnp.zeros((), jnp.int32)}

    optimizer_shardings = optax.tree_map_params(
        optimizer,
        lambda _, param_sharding: param_sharding,
        jax.eval_shape(init)["optimizer"],
        trained(param_shardings),
        transform_non_params=lambda _: replicated,
    )
    state_shardings = {"params": param_shardings, "optimizer": optimizer_shardings, "step": replicated}
    by_example = sharding(mesh, "batch", None)

    def train_step(state, tokens):
        keys = dropout_keys(config.seed, state["step"], len(tokens)) if config.model.dropout else None
        how, times = config.model.training_times, None
        if how != "fixed":
            times = random_times(nnx.merge(graph, state["params"]), how, config.seed, state["step"])
        loss, grads = losses.loss_and_gradient(state["params"], tokens, keys, config.microbatches, times)
        before = trained(state["params"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], before)
        params = merge_trees(state["params"], optax.apply_updates(before, updates))
        scalars = {"loss": loss, "gradient_norm": optax.global_norm(grads), "learning_rate": schedule(state["step"])}
        return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}, scalars

    def weights(params, num_steps):
        model = nnx.merge(graph, params)
        made = model.weights(model.times(num_steps))
        return dataclasses.replace(
            made, layers=jax.lax.with_sharding_constraint(made.layers, place(losses.merged_specs))
        )

    def evaluate(params, weights, tokens, valid):
        others = {name: value for name, value in params.items() if name != "depth"}
        total, count = losses.sums(others, weights, tokens, valid)
        return metrics.Average(total=total, count=count)

    return Program(
        graph,
        word,
        state_shardings,
        by_example,
        init=jax.jit(init, out_shardings=state_shardings, donate_argnums=0),
        trained=trained,
        frozen=frozen,
        train_step=jax.jit(
            train_step,
            in_shardings=(state_shardings, by_example),
            out_shardings=(state_shardings, None),
            donate_argnums=0,
        ),
        weights=jax.jit(weights, in_shardings=(param_shardings,), static_argnames="num_steps"),
        evaluate=jax.jit(evaluate, in_shardings=(param_shardings, None, by_example, by_example)),
    )
