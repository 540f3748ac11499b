"""The definition of a solver, and the depth loop that all solvers share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from diffeqformer.depth.low_rank import of_adapters_type
from diffeqformer.depth.weights import StackedWeights, in_type
from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.parallel.sharding import identity
from diffeqformer.solvers.cache import CachedAttention, KeyValueCache
from diffeqformer.solvers.checkpointing import last_state
from diffeqformer.solvers.reversible import last_pair


def _of_examples(_, *operands, **__) -> bool:
    """Whether a value is computed from examples, whose states have three axes, and not from weights alone.

    If gathered weights were stored in every step, all weights would end up in memory.
    """
    return any(operand.ndim > 2 for operand in operands)


def _attention_of_cudnn(primitive, *_, **__) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


def _products_of_examples(primitive, *operands, **parameters) -> bool:
    """Whether a value is the product of a state with a kernel, in this order.

    In the other order are the products of `layers.heads_by_position`, which a TPU computes again in less time than it
    takes to store and read them.
    """
    return POLICIES.dots_with_no_batch_dims_saveable(primitive, *operands, **parameters) and operands[0].ndim > 2


POLICIES = jax.checkpoint_policies
REMAT = {
    "none": _of_examples,
    "step": POLICIES.save_only_these_names("norm"),
    "products": POLICIES.save_from_both_policies(
        _products_of_examples,
        POLICIES.save_from_both_policies(POLICIES.save_only_these_names("attention", "norm"), _attention_of_cudnn),
    ),
    "binomial": None,
    "reversible": None,
}
"""What is stored for the backward pass: everything; the state between steps; the state between steps, products with
weights, and attention by splash or cuDNN; some of the states between steps, by an optimal schedule (`checkpointing`);
or the last one alone (`reversible`). `step` and `products` also store the statistics of norms, two numbers a position.
Gathered weights, and kernels in another type, are never stored.
"""


def x_alone(x: Array, dt: Array) -> Array:
    """The state of a solver that remembers nothing of earlier steps."""
    return x


@dataclasses.dataclass(frozen=True)
class Solver:
    """A method with fixed steps.

    step: (field, layers, state, dt, context) -> the state after a step of length dt; `layers` has the weights at each
        node.
    nodes: the points in a step at which weights are taken, from 0 (its start) to 1 (its end).
    order: order of convergence if the weights are smooth in time.
    begin: (x, dt) -> the state before the first step, which has the length dt. A multistep method's holds more than x.
        Whatever has the shape of x belongs to the same tokens.
    read: (state) -> x.
    increments: of a reversible solver, the increments of which its steps are made, forth and back (`reversible`).
    """

    step: Callable[[VectorField, list[dict], PyTree, Array, Context], PyTree]
    nodes: tuple[float, ...]
    order: int
    begin: Callable[[Array, Array], PyTree] = x_alone
    read: Callable[[PyTree], Array] = lambda state: state
    increments: tuple[Callable, Callable] | None = None

    @property
    def reversible(self) -> bool:
        """Whether the state before a step follows from the one after it."""
        return self.increments is not None

    @property
    def evaluations(self) -> int:
        """Evaluations of the attention in a step. A cache holds keys and values for each."""
        return self.counted[0]

    @functools.cached_property
    def counted(self) -> tuple[int, int]:
        """Evaluations of the attention and of the feed-forward in a step, counted by tracing it."""
        field = _CountedField()

        def one_step(x):
            return self.step(field, [{}] * len(self.nodes), self.begin(x, x.sum()), x.sum(), Context())

        jax.eval_shape(one_step, jnp.zeros((1, 1, 1)))
        return field.attentions, field.feed_forwards


class _CountedField(VectorField):
    """A field that counts how often a solver evaluates its branches."""

    def __init__(self):
        self.attentions = self.feed_forwards = 0

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        self.attentions += 1
        return x

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        self.feed_forwards += 1
        return x


class Steps:
    """The steps of a walk, for a loop over the stacked weights.

    Args:
        weights: how the layers of a step become those at the solver's nodes; the layers themselves aren't used.
        first: the number of the first step, counted from 0. Dropout depends on it.
    """

    def __init__(
        self, solver: Solver, field: VectorField, weights: StackedWeights, context: Context, first: int | Array = 0
    ):
        self.solver, self.field, self.context, self.first = solver, field, context, first
        self.gather, self.dtype = weights.gather, weights.dtype

    def at_nodes(self, layers: list[dict] | None, whole: list[dict] | None) -> list[dict]:
        """The layers at the solver's nodes in a step, from those of the step or those of all steps."""
        if whole:
            return [in_type(layers_at_node, self.dtype) for layers_at_node in whole]
        return [self.gather(of_adapters_type(layers_at_node)) for layers_at_node in layers]

    def advance(self, state: PyTree, layers, whole, step, dt, keys, attend: Callable | None = None) -> PyTree:
        """The state after a step."""
        after = self.solver.step(self.field, self.at_nodes(layers, whole), state, dt, self._here(step, keys, attend))
        return jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)

    def increments(self, dt, step, keys) -> list[Callable]:
        """A reversible solver's increments in a step, forth and back: (layers, x) -> increment."""
        here = self._here(step, keys)
        return [functools.partial(increment, self.field, here, dt) for increment in self.solver.increments]

    def _here(self, step, keys, attend=None) -> Context:
        context = self.context._replace(keys=keys, attend=attend or self.context.attend)
        return context.at_step(self.first + step + 1)  # 0 is the embedding


def walk(
    solver: Solver,
    field: VectorField,
    weights: StackedWeights,
    x: Float[Array, "B S D"],
    context: Context,
    *,
    remat: str = "none",
    snapshots: int = 8,
    trajectory: bool = False,
    cache: KeyValueCache | None = None,
) -> Float[Array, "*L B S D"] | tuple[Float[Array, "B S D"], KeyValueCache]:
    """Move the state x(0) along a vector field to x(1), in loops over the stacked weights.

    The state keeps its type. The compiled program does not grow with the number of steps.

    Args:
        weights: the weights at the solver's nodes in every step, and the steps' sizes.
        remat: a key of `REMAT`: what is stored for the backward pass. The rest is recomputed. It has no effect
            with a trajectory or a cache.
        snapshots: number of states that are stored, with the `remat` binomial.
        trajectory: return x after every step, [L, B, S, D], instead of the last x.
        cache: keys and values of earlier tokens, which the new tokens also attend to. It is returned beside the last
            state, with the new tokens' keys and values from `context.position` on.
    """
    steps, state = Steps(solver, field, weights, context), solver.begin(x, weights.step_sizes[0])
    (layers, whole), keys, sizes = by_node(steps, weights), context.keys, weights.step_sizes
    alone = cache is None and not trajectory
    if alone and remat == "binomial":
        return solver.read(last_state(steps.advance, snapshots, state, layers, whole, sizes, keys))
    if alone and remat == "reversible" and solver.reversible:
        return solver.read(last_pair(steps, state, layers, whole, sizes, keys))

    def body(carry, inputs):
        state, cache = carry
        step, dt, layers = inputs
        attend = cache and CachedAttention(cache, step * solver.evaluations, context.position)
        state = steps.advance(state, layers, whole, step, dt, keys, attend)
        return (state, attend and attend.cache), solver.read(state) if trajectory else None

    adapted = any("a" in layer for layer in weights.layers.values())
    if alone and (remat != "none" or adapted or weights.gather is not identity):
        # In a scan, common expressions of different steps can't be merged anyway.
        body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)
    (last, cache), states = jax.lax.scan(body, (state, cache), (jnp.arange(len(sizes)), sizes, layers))
    if trajectory:
        return states
    return solver.read(last) if cache is None else (solver.read(last), cache)


def by_node(steps: Steps, weights: StackedWeights) -> tuple[list[dict] | None, list[dict] | None]:
    """The layers of all steps at each node of the solver, stacked, or those that are the same in all steps."""
    nodes = len(steps.solver.nodes)
    if weights.constant:
        return None, nodes * [weights.gather(weights.layers)]
    return [jax.tree.map(lambda leaf: leaf[node::nodes], weights.layers) for node in range(nodes)], None
