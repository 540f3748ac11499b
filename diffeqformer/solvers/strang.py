"""Strang's symmetric splitting: a half step of attention, a full step of feed-forward, a half step of attention.

@article{strang1968construction,
  title={On the Construction and Comparison of Difference Schemes},
  author={Strang, Gilbert},
  journal={SIAM Journal on Numerical Analysis},
  volume={5}, number={3}, pages={506--517}, year={1968}}
"""

from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


def step(
    field: VectorField, layers: list[dict], x: Float[Array, "B S D"], dt: Float[Array, ""], context: Context
) -> Float[Array, "B S D"]:
    """exp(dt/2 A) exp(dt F) exp(dt/2 A) x with weights at the step's middle.

    Each exponential is the flow of one branch. It is computed by the midpoint method, so the whole step is of order 2.
    """
    [middle] = layers

    def flow(branch, x, dt):
        return x + dt * branch(middle, x + dt / 2 * branch(middle, x, context), context)

    x = flow(field.attention, x, dt / 2)
    x = flow(field.feed_forward, x, dt)
    return flow(field.attention, x, dt / 2)


STRANG = Solver(step, nodes=(0.5,), order=2)
