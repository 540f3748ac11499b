"""The depth loop that fixed-step solvers share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.models.depth_weights import StackedWeights
from diffeqformer.models.layers import Context


def walk(
    step: Callable,
    weights: StackedWeights,
    x: Float[Array, "B S D"],
    context: Context,
    *,
    remat: bool,
    trajectory: bool,
) -> Float[Array, "B S D"] | Float[Array, "T B S D"]:
    """Apply `step(layers, x, dt, context) -> x` for each time, in one `jax.lax.scan` over the stacked weights.

    The state is carried in fp32. The compiled program does not grow with the number of steps.

    Args:
        remat: recompute each step in the backward pass instead of storing its activations.
        trajectory: return the state after every step, [T, B, S, D], instead of the last one.
    """

    def body(x, inputs):
        index, dt, layers = inputs
        x = step(weights.layers if weights.constant else layers, x, dt, context.at_step(index))
        return x, x if trajectory else None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # inside a scan common subexpressions can't merge across steps
    indices = jnp.arange(1, len(weights.step_sizes) + 1)  # 0 is the embedding
    layers = None if weights.constant else weights.layers
    last, states = jax.lax.scan(body, x.astype(jnp.float32), (indices, weights.step_sizes, layers))
    return states if trajectory else last
