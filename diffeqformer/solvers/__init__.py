"""Solvers: how depth is walked. Each is a function

    solver(field, weights, x_0, context, **options) -> x_1, all states, or x_1 and a key-value cache

of a vector field and the stacked weights of the grid's steps, which also hold the steps' sizes; the
options are those of `walk`.
"""

from diffeqformer.solvers.cache import KeyValueCache
from diffeqformer.solvers.euler import euler
from diffeqformer.solvers.lie_trotter import lie_trotter

__all__ = ["KeyValueCache", "euler", "lie_trotter"]
