"""The loss where weights exist for a part of the steps at a time (`model.generate_chunk`).

A chunk of k steps is generated, walked and forgotten; its part of the backward pass generates it again. So only states
need more memory in more steps L. With the remat step, the state before every step is stored. With binomial, it is
`model.snapshots` of those before chunks, and that before the last one, so that a chunk is walked once more, at least,
before its way back. With reversible it is the last state.

P is read three times for each chunk, and once more when it is walked again, instead of twice for all steps. Each device
adds to its dP once for each chunk, instead of keeping the gradients of all weights; dP is summed over devices once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from diffeqformer.depth.depths import chunk_length
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import StackedWeights, in_type
from diffeqformer.fields.layers import at_its_precision
from diffeqformer.parallel.mesh import AXES
from diffeqformer.parallel.sharding import EVERYWHERE, gather, on_each_device, scatter
from diffeqformer.solvers.checkpointing import last_state
from diffeqformer.solvers.reversible import undo
from diffeqformer.solvers.solver import Steps, by_node
from diffeqformer.training.loss import (
    BY_EXAMPLE,
    ShardedLoss,
    scored_positions,
    split_batch,
    sum_over_devices,
    without_depth,
)
from diffeqformer.transformer import Transformer

STATES = jax.checkpoint_policies.save_only_these_names("state")


class Chunks:
    """The walk of one device's examples through depth, a chunk of steps at a time.

    States, keys and their cotangents have a leading axis of microbatches, which are processed one after the other. The
    model's own depth weights aren't used.
    """

    def __init__(self, loss: ShardedLoss, model: Transformer, microbatches: int):
        self.loss, self.model = loss, model
        self.made_type, self.summed_type = loss.types_of_weights(model, microbatches)

    def layers(self, features: Float[Array, "T features"], depth: dict) -> dict:
        """The weights of a chunk, in the type of their gradient, from the device's part of the depth weights."""
        made = nnx.merge(self.loss.graph, {**self.loss.abstract, "depth": depth}).depth.from_features(features)
        return gathered(in_type(made, self.summed_type), self.loss.generator_specs, self.made_type)

    def steps(self, layers: dict, number: Int[Array, ""], step_sizes, keys) -> tuple[Steps, StackedWeights]:
        """The steps of a chunk, counted from 0, and their weights."""
        weights = self.loss.gathering(self.model.stack(layers, step_sizes))
        context = self.loss.context_on_device(self.model, keys)
        return Steps(self.model.solver, self.model.field, weights, context, number * len(step_sizes)), weights

    def advance(self, state: PyTree, features, depth: dict, number, step_sizes, keys) -> PyTree:
        """The solver's state after a chunk. Its backward pass needs the states before steps, or computes them again."""
        layers = self.layers(features, depth)

        def one_microbatch(_, examples):
            state, keys = examples
            steps, weights = self.steps(layers, number, step_sizes, keys)
            advance = jax.checkpoint(steps.advance, prevent_cse=False)

            def one_step(state, inputs):
                step, dt, layers = inputs
                return advance(checkpoint_name(state, "state"), layers, None, step, dt, keys), None

            inputs = jnp.arange(len(step_sizes)), step_sizes, by_node(steps, weights)[0]
            return None, jax.lax.scan(one_step, state, inputs)[0]

        return jax.lax.scan(jax.checkpoint(one_microbatch, prevent_cse=False), None, (state, keys))[1]

    def step_back(self, layers: dict, last: PyTree, d_last: PyTree, number, step_sizes, keys) -> tuple:
        """Back through a chunk: a reversible solver's state before it, and the cotangents of that and of the layers."""

        def one_microbatch(total, examples):
            last, d_last, keys = examples
            steps, _ = self.steps(layers, number, step_sizes, keys)
            nodes, pull = jax.vjp(lambda layers: by_node(*self.steps(layers, number, step_sizes, keys))[0], layers)
            first, d_first, d_nodes, _ = undo(steps, d_last, last, nodes, None, step_sizes, keys)
            return jax.tree.map(jnp.add, total, pull(d_nodes)[0]), (first, d_first)

        d_layers, found = jax.lax.scan(one_microbatch, jax.tree.map(jnp.zeros_like, layers), (last, d_last, keys))
        return *found, d_layers

    def last(self, state: PyTree, features, depth: dict, step_sizes, keys) -> PyTree:
        """The solver's state after all chunks, for which the backward pass stores what `model.remat` says."""
        inputs = state, features, depth, step_sizes, keys
        if self.model.remat == "binomial":
            return last_state(self.advance, self.model.snapshots, *inputs)
        return last_of_reversible(self, *inputs) if self.model.remat == "reversible" else self.walk(*inputs)

    def walk(self, state: PyTree, features, depth: dict, step_sizes, keys) -> PyTree:
        """The same. A backward pass through it stores the states before all steps."""

        def one_chunk(state, inputs):
            number, step_sizes, features = inputs
            return self.advance(state, features, depth, number, step_sizes, keys), None

        inputs = jnp.arange(len(step_sizes)), step_sizes, features
        return jax.lax.scan(jax.checkpoint(one_chunk, policy=STATES, prevent_cse=False), state, inputs)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(layers: dict, specs: dict, dtype) -> dict:
    """Layers rounded to a type and gathered over `generator`. Their gradients are summed in the type that they have."""
    whole = gather(in_type(layers, dtype), specs, ("generator",))
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), whole, layers)


gathered.defvjp(
    lambda layers, specs, dtype: (gathered(layers, specs, dtype), None),
    lambda specs, dtype, _, d_layers: (scatter(d_layers, specs, ("generator",)),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def last_of_reversible(chunks: Chunks, state: PyTree, features, depth: dict, step_sizes, keys) -> PyTree:
    """A reversible solver's state after all chunks, of which the backward pass stores nothing else."""
    return chunks.walk(state, features, depth, step_sizes, keys)


def _forward(chunks, *inputs):
    last = last_of_reversible(chunks, *inputs)
    return last, (last, *inputs[1:])


def _backward(chunks, residuals, d_last):
    last, features, depth, step_sizes, keys = residuals

    def body(carry, inputs):
        last, d_last, d_depth = carry
        number, step_sizes, features = inputs
        layers, pull = jax.vjp(functools.partial(chunks.layers, features), depth)
        first, d_first, d_layers = chunks.step_back(layers, last, d_last, number, step_sizes, keys)
        return (first, d_first, jax.tree.map(jnp.add, d_depth, pull(d_layers)[0])), None

    start = last, d_last, jax.tree.map(jnp.zeros_like, depth)
    inputs = jnp.arange(len(step_sizes)), step_sizes, features
    (_, d_first, d_depth), _ = jax.lax.scan(body, start, inputs, reverse=True)
    return d_first, None, d_depth, None, None


last_of_reversible.defvjp(_forward, _backward)


class ChunkedSteps(NamedTuple):
    """The steps of depth in chunks, from which their weights are generated."""

    features: Float[Array, "chunks times features"]
    step_sizes: Float[Array, "chunks steps"]


class ChunkedLoss(ShardedLoss):
    """The same loss, where weights exist for a chunk of at most `model.generate_chunk` steps at a time."""

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
        """As in `ShardedLoss`. All parameters train, and each P has a gradient of its own shape."""
        model = nnx.merge(self.graph, params)
        steps = self.chunked(model, grid or model.grid())
        scale = 1 / (tokens.shape[0] * (tokens.shape[1] - 1))

        def on_device(params, steps, teacher_state, tokens, keys):
            scored = jnp.zeros(tokens.shape, jnp.float32).at[:, :-1].set(scale)
            return jax.lax.psum(
                self.chunked_loss(params, steps, tokens, keys, scored, microbatches, teacher_state), AXES
            )

        of_keys = None if keys is None else BY_EXAMPLE
        specs = self.param_specs, EVERYWHERE, self.teacher and self.teacher.specs, BY_EXAMPLE, of_keys
        mean = on_each_device(self.mesh, on_device, specs, EVERYWHERE)
        return jax.value_and_grad(mean)(params, steps, teacher_state, tokens, keys)

    def chunked(self, model: Transformer, grid: Grid) -> ChunkedSteps:
        """The steps of a grid in chunks of equal length."""
        length = chunk_length(len(grid.ends), model.generate_chunk)
        features = jnp.asarray(model.depth.features(grid.times))
        features = features.reshape(-1, length * len(model.solver.nodes), features.shape[1])
        return ChunkedSteps(features, jnp.asarray(grid.step_sizes, jnp.float32).reshape(-1, length))

    def chunked_loss(
        self, params: dict, steps: ChunkedSteps, tokens, keys, scored, microbatches: int, teacher_state=None
    ) -> Float[Array, ""]:
        """The sum over one device's positions of `scored` times the loss. Parameters are the device's parts."""
        model = self.model_on_device(without_depth(params))
        x = model.embed(tokens, self.context_on_device(model, keys))
        state = model.solver.begin(x, steps.step_sizes[0, 0])
        state, keys = jax.tree.map(functools.partial(split_batch, parts=microbatches), (state, keys))
        last = Chunks(self, model, microbatches).last(state, steps.features, params["depth"], steps.step_sizes, keys)
        x = model.solver.read(last).swapaxes(0, 1).reshape(x.shape)
        return self.loss_of_states(model, x, tokens, scored, teacher_state, microbatches)

    @at_its_precision
    def sum_and_count(
        self,
        params: dict,
        weights: ChunkedSteps,
        tokens: Int[Array, "B S"],
        valid: Shaped[Array, "B 1"],
        microbatches: int = 1,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """As in `ShardedLoss`, but every batch generates the weights again, chunk by chunk."""

        def on_device(params, steps, tokens, valid):
            scored = scored_positions(tokens, valid)
            return sum_over_devices(self.chunked_loss(params, steps, tokens, None, scored, microbatches), scored)

        specs = (self.param_specs, EVERYWHERE, BY_EXAMPLE, BY_EXAMPLE)
        return on_each_device(self.mesh, on_device, specs, EVERYWHERE)(params, weights, tokens, valid)
