"""What a solver is, and the depth loop that all of them share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.depth.low_rank import merge
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context, as_it_is
from diffeqformer.solvers.cache import CachedAttention, KeyValueCache


def _of_examples(_, *operands, **__) -> bool:
    """Whether a value comes from examples, whose states have three axes, and not from weights alone.

    Gathered or merged weights, kept step by step, would end up as all weights.
    """
    return any(operand.ndim > 2 for operand in operands)


def _attention_of_cudnn(primitive, *_, **__) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


def _products_of_examples(primitive, *operands, **parameters) -> bool:
    return _of_examples(primitive, *operands) and POLICIES.dots_with_no_batch_dims_saveable(
        primitive, *operands, **parameters
    )


POLICIES = jax.checkpoint_policies
REMAT = {
    "none": _of_examples,
    "step": None,
    "products": POLICIES.save_from_both_policies(
        _products_of_examples,
        POLICIES.save_from_both_policies(POLICIES.save_only_these_names("attention"), _attention_of_cudnn),
    ),
}
"""What is stored for the backward pass: everything; the state between steps; that, products with weights and attention.
Gathered and merged weights never are.
"""


@dataclasses.dataclass(frozen=True)
class Solver:
    """A method with fixed steps.

    step: (field, layers, x, dt, context) -> x after a step of length dt; `layers` has the weights at each node.
    nodes: where in a step the weights are taken, from 0 (its start) to 1.
    order: of convergence, where the weights are smooth in time.
    """

    step: Callable[[VectorField, list, Array, Array, Context], Array]
    nodes: tuple[float, ...]
    order: int

    @functools.cached_property
    def evaluations(self) -> int:
        """Evaluations of the attention in a step, counted by tracing it. A cache keeps keys and values of each."""
        field = _CountedField()
        jax.eval_shape(lambda x: self.step(field, [{}] * len(self.nodes), x, x.sum(), Context()), jnp.zeros((1, 1, 1)))
        return field.evaluations


class _CountedField(VectorField):
    """A field that counts how often a solver asks for the attention."""

    def __init__(self):
        self.evaluations = 0

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        self.evaluations += 1
        return x

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        return x


def walk(
    solver: Solver,
    field: VectorField,
    weights: StackedWeights,
    x: Float[Array, "B S D"],
    context: Context,
    *,
    remat: str = "none",
    trajectory: bool = False,
    cache: KeyValueCache | None = None,
) -> Float[Array, "B S D"] | Float[Array, "T B S D"] | tuple[Float[Array, "B S D"], KeyValueCache]:
    """Move the state x(0) along a vector field to x(1), in one `jax.lax.scan` over the stacked weights.

    The state is carried in the type in which it comes. The compiled program does not grow with the number of steps.

    Args:
        weights: at the solver's nodes of every step, and the steps' sizes.
        remat: a key of `REMAT`: what the backward pass computes again instead of storing it.
        trajectory: return the state after every step, [T, B, S, D], instead of the last one.
        cache: keys and values of earlier tokens, which these attend to as well; return it, with theirs
            added from `context.position` on, beside the last state.
    """
    steps, nodes = len(weights.step_sizes), len(solver.nodes)

    def body(carry, inputs):
        x, cache = carry
        index, dt, layers = inputs
        here = context.at_step(index)
        if cache is not None:
            attention = CachedAttention(cache, (index - 1) * solver.evaluations, context.position)
            here = here._replace(attend=attention)
        at_nodes = whole or [merge(layers_at_node, weights.gather) for layers_at_node in layers]
        x = solver.step(field, at_nodes, x, dt, here).astype(x.dtype)
        return (x, None if cache is None else attention.cache), x if trajectory else None

    adapted = any("a" in layer for layer in weights.layers.values())
    if remat != "none" or adapted or weights.gather is not as_it_is:
        body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)  # in a scan, steps' expressions can't merge
    if weights.constant:
        whole, layers = nodes * [merge(weights.layers, weights.gather)], None
    else:
        whole, layers = None, [jax.tree.map(lambda leaf: leaf[node::nodes], weights.layers) for node in range(nodes)]
    indices = jnp.arange(1, steps + 1)  # 0 is the embedding
    (last, cache), states = jax.lax.scan(body, (x, cache), (indices, weights.step_sizes, layers))
    if cache is not None:
        return last, cache
    return states if trajectory else last
