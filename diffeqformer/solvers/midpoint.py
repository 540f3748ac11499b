r"""The explicit midpoint method.

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
    """x + dt f(x + dt/2 f(x; t); t + dt/2)."""
    start, middle = layers
    return x + dt * field(middle, x + dt / 2 * field(start, x, context), context)


MIDPOINT = Solver(step, nodes=(0.0, 0.5), order=2)
