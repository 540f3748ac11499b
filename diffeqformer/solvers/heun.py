r"""Heun's second-order method, the explicit trapezoidal rule.

@book{hairer1993solving,
  title={Solving Ordinary Differential Equations {I}: Nonstiff Problems},
  author={Hairer, Ernst and N{\o}rsett, Syvert P. and Wanner, Gerhard},
  edition={2nd}, publisher={Springer}, year={1993}}
"""

from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


def step(
    field: VectorField, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""], context: Context
) -> Float[Array, "B S D"]:
    """x + dt/2 (k_1 + k_2), k_1 = f(x; t), k_2 = f(x + dt k_1; t + dt)."""
    start, end = layers
    k_1 = field(start, x, context)
    return x + dt / 2 * (k_1 + field(end, x + dt * k_1, context))


HEUN = Solver(step, nodes=(0.0, 1.0), order=2)
