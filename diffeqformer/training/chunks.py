"""The loss where weights exist for a part of the steps at a time (`model.generate_chunk`).

A chunk of k steps is generated, walked and forgotten; its part of the backward pass generates it again. So only states
need more memory in more steps L. With the remat step, the state before every step is stored. With binomial, it is
`model.snapshots` of those before chunks, and that before the last one, so that a chunk is walked once more, at least,
before its way back. With reversible it is the last state.

P is read three times for each chunk, and once more when it is walked again, instead of twice for all steps. dP is
added to once for each chunk, instead of keeping the gradients of all weights.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from diffeqformer.depth.depths import chunk_length
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import StackedWeights, in_type
from diffeqformer.fields.layers import at_its_precision
from diffeqformer.parallel.mesh import AXES
from diffeqformer.parallel.sharding import BATCH, EVERYWHERE, on_each_device
from diffeqformer.solvers.checkpointing import entry, last_state
from diffeqformer.solvers.reversible import undo
from diffeqformer.solvers.solver import Steps, by_node, last_of_steps
from diffeqformer.training.loss import BY_EXAMPLE, ShardedLoss, over_devices, scored_positions, without_depth
from diffeqformer.training.parts import Part, by_microbatch, computed, shares, summed_states
from diffeqformer.transformer import Transformer

OF_STORED = PartitionSpec(None, None, BATCH)
"""The place of stored states (`room_for_states`)."""


class Chunks:
    """The walk of one model through depth, a chunk of steps at a time.

    Args:
        loss: that of the model, on a mesh.
        model: the model; its parameters aren't used.
        microbatches: number of parts of each device's examples, processed one after the other.
    """

    def __init__(self, loss: ShardedLoss, model: Transformer, microbatches: int):
        self.loss, self.model = loss, model
        self.made_type, self.summed_type = loss.types_of_weights(model, microbatches)
        typed = functools.partial(in_type, dtype=self.made_type)
        self.part = Part(
            loss.mesh, self.walked, loss.generator_specs, microbatches=microbatches, typed=typed, over=("generator",)
        )

    def layers(self, depth: dict, features: Float[Array, "T features"]) -> dict:
        """The weights of a chunk, in the type of their gradient."""
        made = nnx.merge(self.loss.graph, {**self.loss.abstract, "depth": depth}).depth.from_features(features)
        return in_type(made, self.summed_type)

    def advance(self, state: PyTree, features, depth: dict, number, step_sizes, keys) -> PyTree:
        """The solver's state after a chunk. `number` is that of the chunk, counted from 0."""
        fixed = step_sizes, number * len(step_sizes)
        return computed(self.part, self.layers(depth, features), state, fixed, keys)

    def walked(self, layers: dict, state: PyTree, fixed: tuple, keys) -> PyTree:
        """The same on a device."""
        steps, weights = self.steps(layers, fixed, keys)
        return last_of_steps(steps, weights, state, "step", 0)

    def steps(self, layers: dict, fixed: tuple, keys) -> tuple[Steps, StackedWeights]:
        """The steps of a chunk, and their weights, on a device."""
        step_sizes, first = fixed
        weights = self.loss.gathering(self.model.stack(layers, step_sizes))
        context = self.loss.context_on_device(self.model, keys)
        return Steps(self.model.solver, self.model.field, weights, context, first), weights

    def advance_storing(self, state: PyTree, stored: PyTree, features, depth: dict, number, step_sizes, keys) -> tuple:
        """The solver's state after a chunk, and those before its steps in their places in `stored`."""

        def on_device(layers, stored, state, fixed, keys):
            walk = functools.partial(self.walked_storing, self.part.gathered(layers), fixed)
            stored, state, _ = by_microbatch(walk, self.part.microbatches, (state, keys), stored)
            return state, stored

        places = self.loss.generator_specs, OF_STORED, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
        walk_chunk = on_each_device(self.loss.mesh, on_device, places, (BY_EXAMPLE, OF_STORED))
        return walk_chunk(self.layers(depth, features), stored, state, (step_sizes, number * len(step_sizes)), keys)

    def walked_storing(self, layers: dict, fixed: tuple, microbatch, stored: PyTree, examples: tuple) -> tuple:
        """The same for a microbatch, on a device, as `by_microbatch` takes it."""
        state, keys = examples
        (steps, weights), (step_sizes, first) = self.steps(layers, fixed, keys), fixed

        def one_step(carry, inputs):
            (state, stored), (step, dt, layers) = carry, inputs
            stored = put_state(stored, first + step, microbatch, state)
            return (steps.advance(state, layers, None, step, dt, keys), stored), None

        inputs = jnp.arange(len(step_sizes)), step_sizes, by_node(steps, weights)[0]
        (state, stored), _ = jax.lax.scan(one_step, (state, stored), inputs)
        return stored, state, ()

    def back(
        self, layers: dict, found: PyTree, d_last: PyTree, number, step_sizes, keys
    ) -> tuple[PyTree, PyTree, dict]:
        """Back through a chunk.

        Args:
            found: a reversible solver's state after the chunk; otherwise the states before all steps.
            d_last: the cotangent of the state after the chunk.

        Returns:
            what the chunk before will find; the cotangents of the state before the chunk, and of its layers.
        """
        reversible = self.model.remat == "reversible"

        def on_device(layers, found, d_last, fixed, keys):
            back = functools.partial(self.undone if reversible else self.pulled, self.part.gathered(layers), fixed)
            if reversible:
                _, (found, d_first), d_layers = by_microbatch(back, self.part.microbatches, (found, d_last, keys))
            else:
                found, d_first, d_layers = by_microbatch(back, self.part.microbatches, (d_last, keys), found)
            return found, summed_states(d_first), self.part.summed(d_layers, layers)

        spec, place = self.loss.generator_specs, BY_EXAMPLE if reversible else OF_STORED
        places = spec, place, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
        walk_back = on_each_device(self.loss.mesh, on_device, places, (place, BY_EXAMPLE, spec))
        return walk_back(layers, found, d_last, (step_sizes, number * len(step_sizes)), keys)

    def pulled(self, layers: dict, fixed: tuple, microbatch, stored: PyTree, examples: tuple) -> tuple:
        """The cotangents from stored states, for a microbatch, on a device, as `by_microbatch` takes it."""
        d_last, keys = examples
        (steps, _), (step_sizes, first) = self.steps(layers, fixed, keys), fixed
        nodes, pull = jax.vjp(lambda layers: self.nodes(layers, fixed, keys), layers)

        def one_back(d_after, inputs):
            step, dt, layers = inputs
            before = entry(entry(stored, first + step), microbatch)
            _, pull = jax.vjp(lambda *both: steps.advance(*both, None, step, dt, keys), before, layers)
            return pull(d_after)

        inputs = jnp.arange(len(step_sizes)), step_sizes, nodes
        d_first, d_nodes = jax.lax.scan(one_back, shares(d_last, self.loss.mesh, BY_EXAMPLE), inputs, reverse=True)
        return stored, d_first, pull(d_nodes)[0]

    def undone(self, layers: dict, fixed: tuple, microbatch, kept: tuple, examples: tuple) -> tuple:
        """A reversible solver's state before a chunk, and the cotangents, in the same way."""
        last, d_last, keys = examples
        steps, _ = self.steps(layers, fixed, keys)
        nodes, pull = jax.vjp(lambda layers: self.nodes(layers, fixed, keys), layers)
        d_last = shares(d_last, self.loss.mesh, BY_EXAMPLE)
        first, d_first, d_nodes, _ = undo(steps.increments, steps.at_nodes, d_last, last, nodes, None, fixed[0], keys)
        return kept, (first, d_first), pull(d_nodes)[0]

    def nodes(self, layers: dict, fixed: tuple, keys) -> list[dict]:
        """The layers at each node of the solver, of all steps of a chunk."""
        return by_node(*self.steps(layers, fixed, keys))[0]


def room_for_states(state: PyTree, num_steps: int, microbatches: int) -> PyTree:
    """Room for the states before all steps, [L, microbatches, rows, ...], which lie as devices walk them."""
    return jax.tree.map(
        lambda leaf: jnp.zeros((num_steps, microbatches, len(leaf) // microbatches, *leaf.shape[1:]), leaf.dtype), state
    )


def put_state(stored: PyTree, step: Int[Array, ""], microbatch: int | Int[Array, ""], state: PyTree) -> PyTree:
    """Put a microbatch's state before a step into its place."""
    return jax.tree.map(
        lambda states, leaf: jax.lax.dynamic_update_slice(
            states, leaf[None, None], (step, microbatch, *(0 for _ in leaf.shape))
        ),
        stored,
        state,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def last_of_chunks(chunks: Chunks, state: PyTree, features, depth: dict, step_sizes, keys) -> PyTree:
    """The solver's state after all chunks, with the remat step or reversible.

    For the backward pass, the state before every step is stored, or that of a reversible solver after the last one.
    """

    def body(state, inputs):
        number, step_sizes, features = inputs
        return chunks.advance(state, features, depth, number, step_sizes, keys), None

    return jax.lax.scan(body, state, (jnp.arange(len(step_sizes)), step_sizes, features))[0]


def _forward(chunks, state, features, depth, step_sizes, keys):
    if chunks.model.remat == "reversible":
        last = last_of_chunks(chunks, state, features, depth, step_sizes, keys)
        return last, (last, features, depth, step_sizes, keys)

    def body(carry, inputs):
        number, step_sizes, features = inputs
        return chunks.advance_storing(*carry, features, depth, number, step_sizes, keys), None

    stored = room_for_states(state, step_sizes.size, chunks.part.microbatches)
    inputs = jnp.arange(len(step_sizes)), step_sizes, features
    (last, stored), _ = jax.lax.scan(body, (state, stored), inputs)
    return last, (stored, features, depth, step_sizes, keys)


def _backward(chunks, residuals, d_last):
    found, features, depth, step_sizes, keys = residuals

    def body(carry, inputs):
        found, d_last, d_depth = carry
        number, step_sizes, features = inputs
        layers, pull = jax.vjp(lambda depth: chunks.layers(depth, features), depth)
        found, d_first, d_layers = chunks.back(layers, found, d_last, number, step_sizes, keys)
        return (found, d_first, jax.tree.map(jnp.add, d_depth, pull(d_layers)[0])), None

    start = found, d_last, jax.tree.map(jnp.zeros_like, depth)
    inputs = jnp.arange(len(step_sizes)), step_sizes, features
    (_, d_first, d_depth), _ = jax.lax.scan(body, start, inputs, reverse=True)
    return d_first, None, d_depth, None, None


last_of_chunks.defvjp(_forward, _backward)


class ChunkedSteps(NamedTuple):
    """The steps of depth in chunks, from which their weights are generated."""

    features: Float[Array, "chunks times features"]
    step_sizes: Float[Array, "chunks steps"]


class ChunkedLoss(ShardedLoss):
    """The same loss, where weights exist for a chunk of the steps at a time.

    Args:
        chunk: the highest number of steps in a chunk; the number is the largest that divides the steps.
    """

    def __init__(self, graph: nnx.GraphDef, params: dict, mesh: Mesh, attend: Callable, chunk: int):
        super().__init__(graph, params, mesh, attend)
        self.chunk = chunk

    @at_its_precision
    def mean_and_gradient(
        self,
        params: dict,
        tokens: Int[Array, "B S"],
        keys: Key[Array, "B"] | None,
        microbatches: int = 1,
        grid: Grid | None = None,
    ) -> tuple[Float[Array, ""], dict]:
        """As in `ShardedLoss`. All parameters train, and each P has a gradient of its own shape."""
        return jax.value_and_grad(self.mean)(params, tokens, keys, microbatches, grid)

    def mean(self, params: dict, tokens, keys, microbatches: int, grid: Grid | None) -> Float[Array, ""]:
        """The mean loss of the next token in nats."""
        model = nnx.merge(self.graph, params)
        x = self.last_states(model, params, self.chunked(model, grid or model.grid()), tokens, keys, microbatches)
        scored = Part(self.mesh, self.scored, self.other_specs, EVERYWHERE)
        return computed(scored, without_depth(params), x, (), tokens)

    def chunked(self, model: Transformer, grid: Grid) -> ChunkedSteps:
        """The steps of a grid in chunks of equal length."""
        length, features = chunk_length(len(grid.ends), self.chunk), jnp.asarray(model.depth.features(grid.times))
        features = features.reshape(-1, length * len(model.solver.nodes), features.shape[1])
        return ChunkedSteps(features, jnp.asarray(grid.step_sizes, jnp.float32).reshape(-1, length))

    def last_states(
        self, model: Transformer, params: dict, steps: ChunkedSteps, tokens, keys, microbatches: int
    ) -> Float[Array, "B S D"]:
        """x(1)."""
        embedding = Part(self.mesh, self.embedded, self.other_specs, microbatches=microbatches)
        x = computed(embedding, without_depth(params), (), (), (tokens, keys))
        state, chunks = model.solver.begin(x, steps.step_sizes[0, 0]), Chunks(self, model, microbatches)
        inputs = state, steps.features, params["depth"], steps.step_sizes, keys
        if model.remat == "binomial":
            return model.solver.read(last_state(chunks.advance, model.snapshots, *inputs))
        return model.solver.read(last_of_chunks(chunks, *inputs))

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

        def on_device(others, x, tokens, valid):
            scored = scored_positions(tokens, valid)
            return over_devices(self.sum_of_states(self.model_on_device(others), x, tokens, scored), scored)

        x = self.last_states(nnx.merge(self.graph, params), params, weights, tokens, None, microbatches)
        specs = (self.other_specs, BY_EXAMPLE, BY_EXAMPLE, BY_EXAMPLE)
        return on_each_device(self.mesh, on_device, specs, EVERYWHERE)(without_depth(params), x, tokens, valid)

    def embedded(self, others: dict, states: tuple, fixed: tuple, inputs: tuple) -> Float[Array, "B S D"]:
        """x(0), on a device."""
        (tokens, keys), model = inputs, self.model_on_device(others)
        return model.embed(tokens, self.context_on_device(model, keys))

    def scored(self, others: dict, x: Float[Array, "B S D"], fixed: tuple, tokens) -> Float[Array, ""]:
        """The mean loss of all devices' tokens, from the last states on a device."""
        examples = len(tokens) * math.prod(self.mesh.shape[axis] for axis in BATCH)
        count = examples * (tokens.shape[1] - 1)
        scored = jnp.zeros(tokens.shape, jnp.float32).at[:, :-1].set(1 / count)
        return jax.lax.psum(self.sum_of_states(self.model_on_device(others), x, tokens, scored), AXES)
