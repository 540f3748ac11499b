r"""The second-order Adams-Bashforth method, on steps of any lengths.

@book{hairer1993solving,
  title={Solving Ordinary Differential Equations {I}: Nonstiff Problems},
  author={Hairer, Ernst and N{\o}rsett, Syvert P. and Wanner, Gerhard},
  edition={2nd}, publisher={Springer}, year={1993}}
"""

import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver


class State(NamedTuple):
    """x, and the slope and the length of the step before; the length is 0 before the first step."""

    x: Float[Array, "B S D"]
    slope: Float[Array, "B S D"]
    length: Float[Array, ""]


def begin(x: Float[Array, "B S D"], dt: Float[Array, ""]) -> State:
    """The state before the first step."""
    return State(x, jnp.zeros_like(x), jnp.zeros_like(dt))


def step(field: VectorField, layers: list[dict], state: State, dt: Float[Array, ""], context: Context) -> State:
    """x + dt (k + r/2 (k - k_before)), k = f(x; t), where r is the ratio of this step's length to that before.

    The first step is Euler's. Its error is of the order of dt^2, like that of the whole.
    """
    [start] = layers
    slope = field(start, state.x, context)
    ratio = jnp.where(state.length > 0, dt / jnp.where(state.length > 0, state.length, 1), 0)
    return State(state.x + dt * (slope + ratio / 2 * (slope - state.slope)), slope, dt)


ADAMS_BASHFORTH = Solver(step, nodes=(0.0,), order=2, begin=begin, read=operator.attrgetter("x"))
