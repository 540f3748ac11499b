r"""The classical Runge-Kutta method.

@article{kutta1901beitrag,
  title={Beitrag zur n{\"a}herungsweisen {I}ntegration totaler {D}ifferentialgleichungen},
  author={Kutta, Wilhelm},
  journal={Zeitschrift f{\"u}r Mathematik und Physik},
  volume={46}, pages={435--453}, year={1901}}
"""

from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


def step(
    field: VectorField, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""], context: Context
) -> Float[Array, "B S D"]:
    """x + dt/6 (k_1 + 2 k_2 + 2 k_3 + k_4): slopes at the start, twice in the middle, and at the end."""
    start, middle, end = layers
    k_1 = field(start, x, context)
    k_2 = field(middle, x + dt / 2 * k_1, context)
    k_3 = field(middle, x + dt / 2 * k_2, context)
    k_4 = field(end, x + dt * k_3, context)
    return x + dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)


RK4 = Solver(step, nodes=(0.0, 0.5, 1.0), order=4)
