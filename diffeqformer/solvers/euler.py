"""Explicit Euler, the paper's solver: section 4."""

from diffeqformer.solvers.walk import Solver


def step(field, layers, x, dt, context):
    """x_{n+1} = x_n + dt f(x_n; t_{n+1}): as published, weights are taken at the interval's right end."""
    [end] = layers
    return x + dt * field(end, x, context)


EULER = Solver(step, nodes=(1.0,), order=1)
