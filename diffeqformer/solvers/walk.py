"""The depth loop that fixed-step solvers share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.models.depth_weights import StackedWeights
from diffeqformer.models.layers import Context
from diffeqformer.solvers.cache import CachedAttention, KeyValueCache


def walk(
    step: Callable,
    weights: StackedWeights,
    x: Float[Array, "B S D"],
    context: Context,
    *,
    remat: bool = False,
    trajectory: bool = False,
    cache: KeyValueCache | None = None,
) -> Float[Array, "B S D"] | Float[Array, "T B S D"] | tuple[Float[Array, "B S D"], KeyValueCache]:
    """Apply `step(layers, x, dt, context) -> x` for each time, in one `jax.lax.scan` over the stacked weights.

    The state is carried in fp32. The compiled program does not grow with the number of steps.

    Args:
        remat: recompute each step in the backward pass instead of storing its activations.
        trajectory: return the state after every step, [T, B, S, D], instead of the last one.
        cache: keys and values of earlier tokens, which these attend to as well; return it, with theirs
            added from `context.position` on, beside the last state.

    Raises:
        UserError: if there is a cache, and a step evaluates the attention more than once.
    """

    def body(carry, inputs):
        x, cache = carry
        index, dt, layers = inputs
        here = context.at_step(index)
        if cache is not None:
            attention = CachedAttention(cache, index - 1, context.position)
            here = here._replace(attend=attention)
        x = step(weights.layers if weights.constant else layers, x, dt, here)
        return (x, None if cache is None else attention.updated()), x if trajectory else None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # inside a scan common subexpressions can't merge across steps
    indices = jnp.arange(1, len(weights.step_sizes) + 1)  # 0 is the embedding
    layers = None if weights.constant else weights.layers
    (last, cache), states = jax.lax.scan(body, (x.astype(jnp.float32), cache), (indices, weights.step_sizes, layers))
    if cache is not None:
        return last, cache
    return states if trajectory else last
