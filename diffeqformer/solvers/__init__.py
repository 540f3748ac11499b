"""Solvers, by name: numerical methods that move a state through depth."""

from diffeqformer.solvers.cache import KeyValueCache
from diffeqformer.solvers.methods import ADAMS_BASHFORTH, ONE_STEP
from diffeqformer.solvers.reversible import reversible_form
from diffeqformer.solvers.solver import Solver, walk

SOLVERS = {
    **ONE_STEP,
    "adams_bashforth": ADAMS_BASHFORTH,
    **{f"reversible_{name}": reversible_form(solver) for name, solver in ONE_STEP.items()},
}

__all__ = ["ONE_STEP", "SOLVERS", "KeyValueCache", "Solver", "walk"]
