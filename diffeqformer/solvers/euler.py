"""Explicit Euler, the paper's solver."""

from jaxtyping import Array, Float

from diffeqformer.models.depth_weights import StackedWeights
from diffeqformer.models.layers import Context
from diffeqformer.solvers.walk import walk


def euler(field, weights: StackedWeights, x: Float[Array, "B S D"], context: Context, **options):
    """x_{n+1} = x_n + dt_n f(x_n; t_{n+1}): as published, weights are taken at each interval's right end.

    Section 4 of the paper; the grid is the authors' `t_n = (n + 1) / L`. Order 1. Options and result as
    those of `walk`.
    """

    def step(layers, x, dt, context):
        return x + dt * field(layers, x, context)

    return walk(step, weights, x, context, **options)
