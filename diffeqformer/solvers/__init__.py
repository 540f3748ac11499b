"""Solvers: how depth is walked. Each is a function

    solver(field, weights, x_0, context, remat=..., trajectory=...) -> x_1 or all states

of a vector field and the stacked weights of the grid's steps, which also hold the steps' sizes.
"""

from diffeqformer.solvers.euler import euler
from diffeqformer.solvers.lie_trotter import lie_trotter

__all__ = ["euler", "lie_trotter"]
