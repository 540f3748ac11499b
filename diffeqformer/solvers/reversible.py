r"""Reversible solvers: from the state after a step, the one before it follows, so a backward pass stores no others.

Any one-step solver can be made reversible. With its increment I(x, h) = step(x, h) - x, a pair of states (x, y) moves
by

    x' = a x + (1 - a) y + I(y, h)        a = exp(-c h)
    y' = y - I(x', -h)

which is undone by

    y = y' + I(x', -h)
    x = (x' - (1 - a) y - I(y, h)) / a

Its order is the solver's. The way back takes weights at the mirrored times within the step: 1 - s for a node s. For a
solver of order 1 the step's own weights will do, so none are added. A step takes twice the solver's evaluations,
and stepping back as many again.

a is the coupling of x to y. McCallum and Foster have a constant. Here the rate c is: then the walk back multiplies
rounding errors by about exp(c), besides what the field does, in however many steps. Coupling is what makes the pair
stable. For Euler's increments and a field x' = m x with m < 0, it is stable if |m| <= (1 - a) / h. That is c for short
steps, and less for long ones: 2.1 if h = 1/4.

@article{mccallum2024efficient,
  title={Efficient, Accurate and Stable Gradients for Neural {ODE}s},
  author={McCallum, Sam and Foster, James},
  journal={arXiv:2410.11648}, year={2024}}
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

COUPLING = 3.0
"""c, per unit of depth."""


class Pair(NamedTuple):
    """The two states, of which x is the solution and y follows it."""

    x: Float[Array, "B S D"]
    y: Float[Array, "B S D"]


def begin(x: Float[Array, "B S D"], dt: Float[Array, ""]) -> Pair:
    """The pair before the first step."""
    return Pair(x, x)


def reversible_form(solver):
    """The reversible form of a one-step solver (`solver.Solver`)."""
    mirrored = solver.nodes if solver.order == 1 else [1 - node for node in solver.nodes]
    nodes = tuple(sorted({*solver.nodes, *mirrored}))

    def increment(taken, sign, field, context, dt, layers, x):
        """The increment over dt, or with the sign -1 over -dt, with the weights at the nodes `taken`."""
        return solver.step(field, [layers[nodes.index(node)] for node in taken], x, sign * dt, context) - x

    forth, back = functools.partial(increment, solver.nodes, 1), functools.partial(increment, mirrored, -1)

    def step(field, layers, pair, dt, context):
        a = jnp.exp(-COUPLING * dt)
        x = a * pair.x + (1 - a) * pair.y + forth(field, context, dt, layers, pair.y)
        return Pair(x, pair.y - back(field, context, dt, layers, x))

    read = operator.attrgetter("x")
    return dataclasses.replace(solver, step=step, nodes=nodes, begin=begin, read=read, increments=(forth, back))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def last_pair(
    steps, pair: Pair, stacked: PyTree, constant: PyTree, step_sizes: Float[Array, "L"], keys: Array | None
) -> Pair:
    """The pair after all steps, of which the backward pass stores nothing else.

    Args:
        steps: `solver.Steps`.
        stacked, constant: see `checkpointing.last_state`.
    """

    def body(pair, inputs):
        step, dt, layers = inputs
        return steps.advance(pair, layers, constant, step, dt, keys), None

    return jax.lax.scan(body, pair, (jnp.arange(len(step_sizes)), step_sizes, stacked))[0]


def _forward(steps, pair, stacked, constant, step_sizes, keys):
    last = last_pair(steps, pair, stacked, constant, step_sizes, keys)
    return last, (last, stacked, constant, step_sizes, keys)


def _backward(steps, residuals, d_last):
    _, d_pair, d_stacked, d_constant = undo(steps, d_last, *residuals)
    return d_pair, d_stacked, d_constant, None, None


last_pair.defvjp(_forward, _backward)


def undo(
    steps,
    d_last: Pair,
    last: Pair,
    stacked: PyTree,
    constant: PyTree,
    step_sizes: Float[Array, "L"],
    keys: Array | None,
) -> tuple[Pair, Pair, PyTree, PyTree]:
    """The pair before all steps, and the cotangents of that pair, of `stacked` and of `constant`.

    Args:
        d_last: the cotangent of the last pair; the other arguments are those of `last_pair`.
    """

    def back_one(carry, inputs):
        (x, y), (d_x, d_y), d_constant = carry
        step, dt, layers = inputs
        (forth, back), a = steps.increments(dt, step, keys), jnp.exp(-COUPLING * dt)
        layers, pull_layers = jax.vjp(steps.at_nodes, layers, constant)
        change, pull = jax.vjp(back, layers, x)
        y, (d_back, d_added) = y + change, pull(-d_y)
        d_x = d_x + d_added
        change, pull = jax.vjp(forth, layers, y)
        x, (d_forth, d_added) = (x - (1 - a) * y - change) / a, pull(d_x)
        d_pair = Pair(a * d_x, d_y + (1 - a) * d_x + d_added)
        d_layers, d_same = pull_layers(jax.tree.map(jnp.add, d_forth, d_back))
        return (Pair(x, y), d_pair, jax.tree.map(jnp.add, d_constant, d_same)), d_layers

    start = last, d_last, jax.tree.map(jnp.zeros_like, constant)
    inputs = jnp.arange(len(step_sizes)), step_sizes, stacked
    (first, d_first, d_constant), d_stacked = jax.lax.scan(back_one, start, inputs, reverse=True)
    return first, d_first, d_stacked, d_constant
