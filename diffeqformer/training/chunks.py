"""The loss where weights exist for a part of the steps at a time (`model.generate_chunk`).

A chunk of k steps is generated, walked and forgotten; its part of the backward pass generates it again. So no memory
grows with the number of steps T but the states between chunks, of which `model.snapshots` are stored with the remat
binomial, and none with the remat reversible. `model.remat` also says what is stored within a chunk.

P is read once more for each chunk, and dP is added up chunk by chunk. That takes the memory of P, and so pays where T
exceeds E, the width of the generator's h(t).
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
from diffeqformer.parallel.sharding import (
    BATCH,
    EVERYWHERE,
    as_it_is,
    axes_of,
    by_device,
    gather,
    scatter,
    sum_copies,
)
from diffeqformer.solvers.checkpointing import last_state
from diffeqformer.solvers.reversible import undo
from diffeqformer.solvers.walk import Steps, by_node, last_of_steps
from diffeqformer.training.loss import (
    BY_EXAMPLE,
    ShardedLoss,
    beside_depth,
    over_devices,
    scored_positions,
    split_batch,
)
from diffeqformer.transformer import Transformer


class Part(NamedTuple):
    """A part of the loss that each device computes with its own examples.

    function: (shared, states, fixed, inputs) -> what it computes, on a device. The states and the inputs are those of
        its examples; the derivatives by `shared` and by the states are wanted.
    spec: those of `shared`.
    result: the partition spec of what it computes.
    microbatches: the number of parts in which the examples are processed, one after the other.
    typed: what is done to `shared` before it is gathered. Its gradient is summed in its type from before.
    over: the axes of the mesh over which `shared` is gathered, once for all microbatches.
    """

    mesh: Mesh
    function: Callable
    spec: PyTree
    result: PartitionSpec = BY_EXAMPLE
    microbatches: int = 1
    typed: Callable[[PyTree], PyTree] = as_it_is
    over: tuple[str, ...] = ()

    def gathered(self, shared: PyTree) -> PyTree:
        """What the function takes, on a device."""
        return gather(self.typed(shared), self.spec, self.over)

    def summed(self, gradient: PyTree, shared: PyTree) -> PyTree:
        """The device's part of the gradient of `shared`, from its own gradient of what the function takes."""
        typed = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), gradient, shared)
        return sum_copies(scatter(typed, self.spec, self.over), self.spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def computed(part: Part, shared: PyTree, states: PyTree, fixed: PyTree, inputs: PyTree) -> PyTree:
    """What a part computes. Its derivatives are computed by device, too, one microbatch after the other."""

    def on_device(shared, states, fixed, inputs):
        shared = part.gathered(shared)

        def one(examples):
            return part.function(shared, examples[0], fixed, examples[1]), ()

        return by_microbatch(one, part.microbatches, (states, inputs))[0]

    places = part.spec, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
    return by_device(part.mesh, on_device, places, part.result)(shared, states, fixed, inputs)


def _computed_forward(part, *arguments):
    return computed(part, *arguments), arguments


def _computed_backward(part, arguments, d_result):
    def on_device(d_result, shared, states, fixed, inputs):
        gathered = part.gathered(shared)

        def one(examples):
            d_result, states, inputs = examples
            _, pull = jax.vjp(lambda *both: part.function(*both, fixed, inputs), gathered, states)
            return pull(shares(d_result, part.mesh, part.result))[::-1]

        d_states, d_shared = by_microbatch(one, part.microbatches, (d_result, states, inputs))
        return part.summed(d_shared, shared), summed_states(d_states)

    places = part.result, part.spec, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
    return *by_device(part.mesh, on_device, places, (part.spec, BY_EXAMPLE))(d_result, *arguments), None, None


computed.defvjp(_computed_forward, _computed_backward)


def shares(cotangent: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    """A cotangent in equal shares, for the devices that hold copies of the same part and add up what follows."""
    copies = math.prod(mesh.shape[axis] for axis in AXES if axis not in axes_of(spec))
    return jax.tree.map(lambda leaf: leaf / copies, cotangent)


def summed_states(cotangent: PyTree) -> PyTree:
    """The sums of states' cotangents over the devices that share the work of the same examples."""
    return sum_copies(cotangent, jax.tree.map(lambda _: BY_EXAMPLE, cotangent))


def by_microbatch(function: Callable, microbatches: int, examples: PyTree) -> tuple[PyTree, PyTree]:
    """A function of examples -> (of each example, to be added up), for one microbatch after the other.

    Sums over several are in fp32.
    """
    if microbatches == 1:
        return function(examples)
    parts = jax.tree.map(lambda array: split_batch(array, microbatches), examples)
    _, terms = jax.eval_shape(function, jax.tree.map(lambda array: array[0], parts))

    def add(total, part):
        found, more = function(part)
        return jax.tree.map(jnp.add, total, more), found

    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), terms)
    total, found = jax.lax.scan(add, start, parts)
    return jax.tree.map(lambda array: array.swapaxes(0, 1).reshape(-1, *array.shape[2:]), found), total


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
            loss.mesh, self.walked, loss.made_specs, microbatches=microbatches, typed=typed, over=("generator",)
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
        return last_of_steps(steps, weights, state, self.remat, self.model.snapshots)

    @property
    def remat(self) -> str:
        """What is stored within a chunk."""
        return "step" if self.model.remat == "binomial" else self.model.remat

    def steps(self, layers: dict, fixed: tuple, keys) -> tuple[Steps, StackedWeights]:
        """The steps of a chunk, and their weights, on a device."""
        step_sizes, first = fixed
        weights = self.loss.gathering(self.model.stack(layers, step_sizes))
        context = self.loss.context_on_device(self.model, keys)
        return Steps(self.model.solver, self.model.field, weights, context, first), weights

    def undone(self, last: PyTree, d_last: PyTree, features, depth: dict, number, step_sizes, keys) -> tuple:
        """A reversible solver's state before a chunk, its cotangent, and the gradient of `depth`."""
        layers, pull = jax.vjp(lambda depth: self.layers(depth, features), depth)
        fixed, spec = (step_sizes, number * len(step_sizes)), self.loss.made_specs

        def on_device(layers, last, d_last, fixed, keys):
            gathered = self.part.gathered(layers)

            def one(examples):
                last, d_last, keys = examples
                first, d_first, d_layers = self.undone_on_device(gathered, last, d_last, fixed, keys)
                return (first, d_first), d_layers

            (first, d_first), d_layers = by_microbatch(one, self.part.microbatches, (last, d_last, keys))
            return first, summed_states(d_first), self.part.summed(d_layers, layers)

        places = spec, BY_EXAMPLE, BY_EXAMPLE, EVERYWHERE, BY_EXAMPLE
        undo_chunk = by_device(self.loss.mesh, on_device, places, (BY_EXAMPLE, BY_EXAMPLE, spec))
        first, d_first, d_layers = undo_chunk(layers, last, d_last, fixed, keys)
        return first, d_first, pull(d_layers)[0]

    def undone_on_device(self, layers: dict, last: PyTree, d_last: PyTree, fixed: tuple, keys) -> tuple:
        """The same for a microbatch, with the gradient of the layers."""

        def stacked(layers):
            steps, weights = self.steps(layers, fixed, keys)
            return by_node(steps, weights)[0]

        steps, _ = self.steps(layers, fixed, keys)
        nodes, pull = jax.vjp(stacked, layers)
        d_last = shares(d_last, self.loss.mesh, BY_EXAMPLE)
        first, d_first, d_nodes, _ = undo(steps.increments, steps.at_nodes, d_last, last, nodes, None, fixed[0], keys)
        return first, d_first, pull(d_nodes)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def last_reversible(chunks: Chunks, state: PyTree, features, depth: dict, step_sizes, keys) -> PyTree:
    """A reversible solver's state after all chunks, of which the backward pass stores nothing else."""

    def body(state, inputs):
        number, step_sizes, features = inputs
        return chunks.advance(state, features, depth, number, step_sizes, keys), None

    return jax.lax.scan(body, state, (jnp.arange(len(step_sizes)), step_sizes, features))[0]


def _reversible_forward(chunks, state, features, depth, step_sizes, keys):
    last = last_reversible(chunks, state, features, depth, step_sizes, keys)
    return last, (last, features, depth, step_sizes, keys)


def _reversible_backward(chunks, residuals, d_last):
    last, features, depth, step_sizes, keys = residuals

    def body(carry, inputs):
        last, d_last, d_depth = carry
        number, step_sizes, features = inputs
        first, d_first, d_more = chunks.undone(last, d_last, features, depth, number, step_sizes, keys)
        return (first, d_first, jax.tree.map(jnp.add, d_depth, d_more)), None

    start = last, d_last, jax.tree.map(jnp.zeros_like, depth)
    inputs = jnp.arange(len(step_sizes)), step_sizes, features
    (_, d_first, d_depth), _ = jax.lax.scan(body, start, inputs, reverse=True)
    return d_first, None, d_depth, None, None


last_reversible.defvjp(_reversible_forward, _reversible_backward)


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
        return computed(scored, beside_depth(params), x, (), tokens)

    def chunked(self, model: Transformer, grid: Grid) -> ChunkedSteps:
        """The steps of a grid in chunks of equal length."""
        length, features = chunk_length(len(grid.ends), self.chunk), jnp.asarray(model.depth.features(grid))
        features = features.reshape(-1, length * len(model.solver.nodes), features.shape[1])
        return ChunkedSteps(features, jnp.asarray(grid.step_sizes, jnp.float32).reshape(-1, length))

    def last_states(
        self, model: Transformer, params: dict, steps: ChunkedSteps, tokens, keys, microbatches: int
    ) -> Float[Array, "B S D"]:
        """x(1)."""
        embedding = Part(self.mesh, self.embedded, self.other_specs, microbatches=microbatches)
        x = computed(embedding, beside_depth(params), (), (), (tokens, keys))
        state, chunks = model.solver.begin(x, steps.step_sizes[0, 0]), Chunks(self, model, microbatches)
        inputs = state, steps.features, params["depth"], steps.step_sizes, keys
        if model.remat == "reversible":
            return model.solver.read(last_reversible(chunks, *inputs))
        stored = model.snapshots if model.remat == "binomial" else len(steps.features)
        return model.solver.read(last_state(chunks.advance, stored, *inputs))

    @at_its_precision
    def sum_and_count(
        self, params: dict, weights: ChunkedSteps, tokens: Int[Array, "B S"], valid: Shaped[Array, "B 1"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """As in `ShardedLoss`, but every batch generates the weights again, chunk by chunk."""

        def on_device(others, x, tokens, valid):
            scored = scored_positions(tokens, valid)
            return over_devices(self.sum_of_states(self.model_on_device(others), x, tokens, scored), scored)

        x = self.last_states(nnx.merge(self.graph, params), params, weights, tokens, None, 1)
        specs = (self.other_specs, BY_EXAMPLE, BY_EXAMPLE, BY_EXAMPLE)
        return by_device(self.mesh, on_device, specs, EVERYWHERE)(beside_depth(params), x, tokens, valid)

    def embedded(self, others: dict, states: tuple, fixed: tuple, inputs: tuple) -> Float[Array, "B S D"]:
        """x(0), on a device."""
        (tokens, keys), model = inputs, self.model_on_device(others)
        return model.embed(tokens, self.context_on_device(model, keys)).astype(model.state_dtype)

    def scored(self, others: dict, x: Float[Array, "B S D"], fixed: tuple, tokens) -> Float[Array, ""]:
        """The mean loss of all devices' tokens, from the last states on a device."""
        examples = len(tokens) * math.prod(self.mesh.shape[axis] for axis in BATCH)
        count = examples * (tokens.shape[1] - 1)
        scored = jnp.zeros(tokens.shape).at[:, :-1].set(1 / count)
        return jax.lax.psum(self.sum_of_states(self.model_on_device(others), x, tokens, scored), AXES)
