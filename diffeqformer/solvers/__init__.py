"""Solvers, by name: numerical methods that move a state through depth. Each file defines one `solver.Solver`."""

from diffeqformer.solvers.adams_bashforth import ADAMS_BASHFORTH
from diffeqformer.solvers.cache import KeyValueCache
from diffeqformer.solvers.euler import EULER
from diffeqformer.solvers.heun import HEUN
from diffeqformer.solvers.lie_trotter import LIE_TROTTER
from diffeqformer.solvers.midpoint import MIDPOINT
from diffeqformer.solvers.reversible import reversible_form
from diffeqformer.solvers.rk4 import RK4
from diffeqformer.solvers.solver import Solver, walk
from diffeqformer.solvers.strang import STRANG

ONE_STEP = {
    "euler": EULER,
    "midpoint": MIDPOINT,
    "heun": HEUN,
    "rk4": RK4,
    "lie_trotter": LIE_TROTTER,
    "strang": STRANG,
}
SOLVERS = {
    **ONE_STEP,
    "adams_bashforth": ADAMS_BASHFORTH,
    **{f"reversible_{name}": reversible_form(solver) for name, solver in ONE_STEP.items()},
}

__all__ = ["SOLVERS", "KeyValueCache", "Solver", "walk"]
