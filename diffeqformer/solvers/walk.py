"""What a solver is, and the depth loop that all of them share."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.models.depth_weights import StackedWeights
from diffeqformer.models.layers import Context, as_it_is
from diffeqformer.solvers.cache import CachedAttention, KeyValueCache


def _all_but_gathered(primitive, *_, **__) -> bool:
    return not primitive.name.startswith("all_gather")


def _attention_of_cudnn(primitive, *_, **__) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


POLICIES = jax.checkpoint_policies
REMAT = {
    "none": _all_but_gathered,
    "step": None,
    "products": POLICIES.save_from_both_policies(
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_from_both_policies(POLICIES.save_only_these_names("attention"), _attention_of_cudnn),
    ),
}
"""What is stored for the backward pass: everything; the state between steps; that, products with weights and attention.
Gathered weights never are.
"""


@dataclasses.dataclass(frozen=True)
class Solver:
    """A method with fixed steps.

    step: (field, layers, x, dt, context) -> x after a step of length dt; `layers` has the weights at each node.
    nodes: where in a step the weights are taken, from 0 (its start) to 1.
    evaluations: of the attention in a step; each has keys and values of its own.
    order: of convergence, where the weights are smooth in time.
    """

    step: Callable
    nodes: tuple[float, ...]
    order: int
    evaluations: int = 1


def walk(
    solver: Solver,
    field,
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
        at_nodes = whole or [weights.gather(jax.tree.map(lambda leaf: leaf[j], layers)) for j in range(nodes)]
        x = solver.step(field, at_nodes, x, dt, here).astype(x.dtype)
        return (x, None if cache is None else attention.cache), x if trajectory else None

    if remat != "none" or weights.gather is not as_it_is:
        body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)  # in a scan, steps' expressions can't merge
    if weights.constant:
        whole, layers = nodes * [weights.gather(weights.layers)], None
    else:
        whole, layers = None, jax.tree.map(lambda leaf: leaf.reshape(steps, nodes, *leaf.shape[1:]), weights.layers)
    indices = jnp.arange(1, steps + 1)  # 0 is the embedding
    (last, cache), states = jax.lax.scan(body, (x, cache), (indices, weights.step_sizes, layers))
    if cache is not None:
        return last, cache
    return states if trajectory else last
