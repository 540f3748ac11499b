"""Explicit Euler, the paper's solver: section 4."""

from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


def step(
    field: VectorField, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""], context: Context
) -> Float[Array, "B S D"]:
    """x_{n+1} = x_n + dt f(x_n; t_{n+1}): as published, weights are taken at the interval's right end."""
    [end] = layers
    return x + dt * field(end, x, context)


EULER = Solver(step, nodes=(1.0,), order=1)
