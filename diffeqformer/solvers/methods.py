r"""The methods: each is a function of a step of length dt from time t, the points at which it takes weights (its nodes,
from 0 at the step's start to 1 at its end), and its order of convergence.

Midpoint, Heun and Adams-Bashforth are from Hairer et al., the classical Runge-Kutta method (rk4) from Kutta, a
transformer as Lie-Trotter splitting from Lu et al., and symmetric splitting from Strang.

@book{hairer1993solving,
  title={Solving Ordinary Differential Equations {I}: Nonstiff Problems},
  author={Hairer, Ernst and N{\o}rsett, Syvert P. and Wanner, Gerhard},
  edition={2nd}, publisher={Springer}, year={1993}}

@article{kutta1901beitrag,
  title={Beitrag zur n{\"a}herungsweisen {I}ntegration totaler {D}ifferentialgleichungen},
  author={Kutta, Wilhelm},
  journal={Zeitschrift f{\"u}r Mathematik und Physik}, volume={46}, pages={435--453}, year={1901}}

@article{lu2019understanding,
  title={Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View},
  author={Lu, Yiping and Li, Zhuohan and He, Di and Sun, Zhiqing and Dong, Bin and Qin, Tao
          and Wang, Liwei and Liu, Tie-Yan},
  journal={arXiv:1906.02762}, year={2019}}

@article{strang1968construction,
  title={On the Construction and Comparison of Difference Schemes},
  author={Strang, Gilbert},
  journal={SIAM Journal on Numerical Analysis}, volume={5}, number={3}, pages={506--517}, year={1968}}
"""

import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers.solver import Solver

State, Length = Float[Array, "B S D"], Float[Array, ""]


def euler(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """x + dt f(x; t + dt): the paper's solver (section 4). As published, weights are taken at the step's end."""
    [end] = layers
    return x + dt * field(end, x, context)


def midpoint(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """x + dt f(x + dt/2 f(x; t); t + dt/2)."""
    start, middle = layers
    return x + dt * field(middle, x + dt / 2 * field(start, x, context), context)


def heun(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """x + dt/2 (k_1 + k_2), k_1 = f(x; t), k_2 = f(x + dt k_1; t + dt)."""
    start, end = layers
    k_1 = field(start, x, context)
    return x + dt / 2 * (k_1 + field(end, x + dt * k_1, context))


def rk4(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """x + dt/6 (k_1 + 2 k_2 + 2 k_3 + k_4): slopes at the start, twice in the middle, and at the end."""
    start, middle, end = layers
    k_1 = field(start, x, context)
    k_2 = field(middle, x + dt / 2 * k_1, context)
    k_3 = field(middle, x + dt / 2 * k_2, context)
    k_4 = field(end, x + dt * k_3, context)
    return x + dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)


def lie_trotter(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """Attention over the whole step, then feed-forward over the whole step, each by Euler's method.

    With dt = 1 and weights per layer this is the pre-norm transformer.
    """
    [end] = layers
    x = x + dt * field.attention(end, x, context)
    return x + dt * field.feed_forward(end, x, context)


def strang(field: VectorField, layers: list[dict], x: State, dt: Length, context: Context) -> State:
    """exp(dt/2 A) exp(dt F) exp(dt/2 A) x with weights at the step's middle.

    Each exponential is the flow of one branch. It is computed by the midpoint method, so the whole step is of order 2.
    """
    [middle] = layers

    def flow(branch, x, dt):
        return x + dt * branch(middle, x + dt / 2 * branch(middle, x, context), context)

    x = flow(field.attention, x, dt / 2)
    x = flow(field.feed_forward, x, dt)
    return flow(field.attention, x, dt / 2)


ONE_STEP = {
    "euler": Solver(euler, nodes=(1.0,), order=1),
    "midpoint": Solver(midpoint, nodes=(0.0, 0.5), order=2),
    "heun": Solver(heun, nodes=(0.0, 1.0), order=2),
    "rk4": Solver(rk4, nodes=(0.0, 0.5, 1.0), order=4),
    "lie_trotter": Solver(lie_trotter, nodes=(1.0,), order=1),
    "strang": Solver(strang, nodes=(0.5,), order=2),
}


class Carried(NamedTuple):
    """x, and the slope and the length of the step before; the length is 0 before the first step."""

    x: State
    slope: State
    length: Length


def begin(x: State, dt: Length) -> Carried:
    """What Adams-Bashforth carries before the first step."""
    return Carried(x, jnp.zeros_like(x), jnp.zeros_like(dt))


def adams_bashforth(field: VectorField, layers: list[dict], state: Carried, dt: Length, context: Context) -> Carried:
    """x + dt (k + r/2 (k - k_before)), k = f(x; t), where r is the ratio of this step's length to that before.

    The second-order method on steps of any lengths. The first step is Euler's. Its error is of the order of dt^2, like
    that of the whole.
    """
    [start] = layers
    slope = field(start, state.x, context)
    ratio = jnp.where(state.length > 0, dt / jnp.where(state.length > 0, state.length, 1), 0)
    return Carried(state.x + dt * (slope + ratio / 2 * (slope - state.slope)), slope, dt)


ADAMS_BASHFORTH = Solver(adams_bashforth, nodes=(0.0,), order=2, begin=begin, read=operator.attrgetter("x"))
