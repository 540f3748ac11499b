"""Solvers: how depth is walked. Each is a function

    solver(field, weights, x_0, context, remat=..., trajectory=...) -> x_1 or all states

of a vector field and its stacked weights, and names the times at which it wants those weights.
"""

from diffeqformer.solvers.euler import euler
from diffeqformer.solvers.lie_trotter import lie_trotter

__all__ = ["euler", "lie_trotter"]
