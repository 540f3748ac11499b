"""Optimal offline checkpointing: a backward pass through depth that stores few states, and computes the rest again.

The paper trains with online checkpointing (section C.4), for a number of steps that isn't known beforehand. Here it is
known, so the optimal schedule is, too.

@article{griewank2000algorithm,
  title={Algorithm 799: Revolve: An Implementation of Checkpointing for the Reverse or Adjoint Mode of Computational
         Differentiation},
  author={Griewank, Andreas and Walther, Andrea},
  journal={ACM Transactions on Mathematical Software}, volume={26}, pages={19--45}, year={2000}}
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

NOWHERE = -1


def fewest_advances(steps: int, snapshots: int) -> int:
    """The least number of steps that are computed beside those that are differentiated.

    With c snapshots, the first state among them, and r the least integer for which binom(c + r, c) >= steps, it is
    r steps - binom(c + r, c + 1).
    """
    repeats = next((r for r in range(steps) if math.comb(snapshots + r, snapshots) >= steps), 0)
    return repeats * steps - math.comb(snapshots + repeats, snapshots + 1)


class Schedule(NamedTuple):
    """What to compute again, and what to store, to differentiate all steps from the last one to the first.

    State n is the one before step n. There is a slot for each snapshot, and another for the state before the last step.

    stored: [steps] the slot into which the forward pass puts each state, or `NOWHERE`.
    slots: [steps] the slot from which the backward pass begins again before it differentiates step n.
    offsets, counts: [steps] where the steps that it then computes, up to state n, are in the next two arrays.
    advanced: [advances] these steps, in order.
    kept: [advances] the slot into which the state after each of them is put, or `NOWHERE`.
    """

    stored: Int[np.ndarray, "steps"]
    slots: Int[np.ndarray, "steps"]
    offsets: Int[np.ndarray, "steps"]
    counts: Int[np.ndarray, "steps"]
    advanced: Int[np.ndarray, "advances"]
    kept: Int[np.ndarray, "advances"]


def _split(steps: int, snapshots: int) -> int:
    """After how many of some steps to store a state, with as many snapshots left, that of the first state included."""
    costs = [n + fewest_advances(steps - n, snapshots - 1) + fewest_advances(n, snapshots) for n in range(1, steps)]
    return 1 + int(np.argmin(costs))


@functools.cache
def schedule(steps: int, snapshots: int) -> Schedule:
    """The schedule with the fewest advances (`fewest_advances`)."""
    stored, slots, offsets, counts = (np.full(steps, NOWHERE) for _ in range(4))
    advanced, kept = [], []
    held = {0: 0}  # the slot of each state that is stored; the last one to be stored is the first to be freed
    for step in reversed(range(steps)):
        begin = state = max(held)
        while state < step and len(held) < snapshots:
            state += _split(step + 1 - state, snapshots - len(held) + 1)
            held[state] = len(held)
        if step == steps - 1:  # the forward pass leads there, and stores that state in any case
            stored[list(held)] = list(held.values())
            stored[step] = slots[step] = held.get(step, snapshots)
            offsets[step] = counts[step] = 0
        else:
            slots[step], offsets[step], counts[step] = held[begin], len(advanced), step - begin
            advanced += range(begin, step)
            kept += [held.get(after, NOWHERE) for after in range(begin + 1, step + 1)]
        held.pop(step, None)
    # never empty, so that they can be indexed
    return Schedule(stored, slots, offsets, counts, np.array(advanced or [0]), np.array(kept or [NOWHERE]))


def _put(kept: PyTree, slot: Int[Array, ""], state: PyTree) -> PyTree:
    """Put a state into a slot, unless that is `NOWHERE`. Nothing but the slot is written, so nothing is copied."""
    at = jnp.maximum(slot, 0)

    def put(slots, leaf):
        return slots.at[at].set(jnp.where(slot == NOWHERE, slots[at], leaf))

    return jax.tree.map(put, kept, state)


def _at(tree: PyTree, index: Int[Array, ""]) -> PyTree:
    """One entry of stacked arrays."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def last_state(
    advance: Callable[..., PyTree],
    snapshots: int,
    state: PyTree,
    stacked: PyTree,
    constant: PyTree,
    step_sizes: Float[Array, "L *chunk"],
    keys: Array | None,
) -> PyTree:
    """The state after all steps, or chunks of steps.

    For the backward pass, `snapshots` states are stored, and that before the last step.

    Args:
        advance: (state, layers, constant, step, dt, keys) -> the state after a step, counted from 0.
        stacked: the layers of all steps, with a leading axis L. Each step's gradient is written once.
        constant: what is the same in all steps.
    """

    def body(state, inputs):  # without a backward pass, nothing is stored
        step, dt, layers = inputs
        return advance(state, layers, constant, step, dt, keys), None

    return jax.lax.scan(body, state, (jnp.arange(len(step_sizes)), step_sizes, stacked))[0]


def _forward(advance, snapshots, state, stacked, constant, step_sizes, keys):
    steps = len(step_sizes)
    stored = jnp.asarray(schedule(steps, min(snapshots, steps)).stored)

    def body(carry, inputs):
        state, kept = carry
        step, slot, dt, layers = inputs
        kept = _put(kept, slot, state)
        return (advance(state, layers, constant, step, dt, keys), kept), None

    kept = jax.tree.map(lambda leaf: jnp.zeros((min(snapshots, steps) + 1, *leaf.shape), leaf.dtype), state)
    (state, kept), _ = jax.lax.scan(body, (state, kept), (jnp.arange(steps), stored, step_sizes, stacked))
    return state, (kept, stacked, constant, step_sizes, keys)


def _backward(advance, snapshots, residuals, d_state):
    kept, stacked, constant, step_sizes, keys = residuals
    steps = len(step_sizes)
    plan = schedule(steps, min(snapshots, steps))
    computes_again, plan = plan.counts.any(), jax.tree.map(jnp.asarray, plan)

    def again(index, carry):
        state, kept = carry
        step = plan.advanced[index]
        state = advance(state, _at(stacked, step), constant, step, step_sizes[step], keys)
        return state, _put(kept, plan.kept[index], state)

    def turn(carry, inputs):
        kept, d_state, d_constant = carry
        step, slot, offset, count, dt, layers = inputs
        state = _at(kept, slot)
        if computes_again:
            state, kept = jax.lax.fori_loop(offset, offset + count, again, (state, kept))
        _, pull = jax.vjp(lambda *parts: advance(*parts, step, dt, keys), state, layers, constant)
        d_state, d_layers, d_added = pull(d_state)
        return (kept, d_state, jax.tree.map(jnp.add, d_constant, d_added)), d_layers

    tables = jnp.arange(steps), plan.slots, plan.offsets, plan.counts, step_sizes, stacked
    start = kept, d_state, jax.tree.map(jnp.zeros_like, constant)
    (_, d_state, d_constant), d_stacked = jax.lax.scan(turn, start, tables, reverse=True)
    return d_state, d_stacked, d_constant, None, None


last_state.defvjp(_forward, _backward)
