"""Optimal checkpointing: the counts of the theory, and the gradients of a backward pass that stores everything."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.solvers import ONE_STEP
from diffeqformer.solvers.checkpointing import NOWHERE, fewest_advances, schedule
from diffeqformer.transformer import split_model, weights_at
from helpers import lively_model, long_to_compile, run_steps, some_slow, toy_config


@functools.cache
def by_dynamic_programming(steps: int, snapshots: int) -> int:
    """The fewest advances: with one snapshot, each step begins anew; otherwise the best place of the next snapshot."""
    if steps == 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    best = math.inf
    for first in range(1, steps):
        left, right = by_dynamic_programming(first, snapshots), by_dynamic_programming(steps - first, snapshots - 1)
        best = min(best, first + left + right)
    return best


@pytest.mark.fast
def test_the_tables_lead_every_turn_to_its_state_with_the_fewest_advances():
    for snapshots in range(1, 13):
        for steps in range(1, 65):
            stored, slots, offsets, counts, advanced, kept = (table.tolist() for table in schedule(steps, snapshots))
            held, advances = {}, steps - 1  # the forward pass makes one more, for x(1)
            for state, slot in enumerate(stored):
                held |= {slot: state} if slot != NOWHERE else {}
            for step in reversed(range(steps)):
                state = held[slots[step]]
                for index in range(offsets[step], offsets[step] + counts[step]):
                    assert advanced[index] == state
                    state, advances = state + 1, advances + 1
                    if kept[index] != NOWHERE:
                        held[kept[index]] = state
                assert state == step
            assert advances == fewest_advances(steps, snapshots) == by_dynamic_programming(steps, snapshots)
            assert len(advanced) == max(sum(counts), 1) and max(*kept, *stored) <= snapshots


def loss_and_gradient(kind, field, solver, remat, snapshots=1, steps=7):
    sizes = dict(width=16, heads=2, mlp=16, num_steps=steps, solver=solver, remat=remat, snapshots=snapshots)
    adapters = {"lora_rank": 2} if kind == "discretized" else {}
    graph, params = split_model(lively_model(kind, field, **sizes, **adapters))
    tokens = jnp.arange(24).reshape(2, 12)

    def loss(params):
        model = nnx.merge(graph, params)
        return jnp.sin(model(tokens, weights_at(model))).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


CASES = [("diffeqformer", "gpt", name) for name in (*ONE_STEP, "adams_bashforth", "reversible_euler")]
CASES += [("shared", "llama", "heun"), ("gpt", "gpt", "lie_trotter"), ("discretized", "gpt", "euler")]


@pytest.mark.parametrize("kind, field, solver", some_slow(CASES, long_to_compile))
def test_gradients_are_those_of_a_backward_pass_that_stores_everything(kind, field, solver):
    expected, gradient = loss_and_gradient(kind, field, solver, "none")
    for snapshots in (1, 20) if (kind, solver) == ("diffeqformer", "euler") else (2,):
        loss, found = loss_and_gradient(kind, field, solver, "binomial", snapshots)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, changes",
    [
        ((1, 1, 1), {"model__dropout": 0.3, "microbatches": 2, "model__dtype": "bfloat16"}),
        ((2, 2, 2), {"field": "llama", "model__dropout": 0.3, "model__training_times": "shifted"}),
    ],
)
@pytest.mark.parametrize(
    "remat, solver",
    [("binomial", "euler"), pytest.param("reversible", "reversible_euler", marks=pytest.mark.slow)],
)
def test_training_is_the_same_on_meshes_with_dropout_and_accumulation(mesh, changes, remat, solver):
    """Masks and drawn times are those of the steps, however often a step is computed.

    After a step back, a state that is one rounding error off can be another number in bf16.
    """
    devices = make_mesh(mesh, jax.devices()[: math.prod(mesh)])
    changes = {"model__vocab_multiple": 16, "model__snapshots": 2, "model__solver": solver, **changes}
    ours, theirs = (run_steps(toy_config(**changes, model__remat=how), devices, 3)[2] for how in (remat, "step"))
    in_bf16 = remat == "reversible" and "model__dtype" in changes
    np.testing.assert_allclose(ours, theirs, rtol=2e-4 if in_bf16 else 2e-5)


def compiled_gradient(**changes) -> str:
    """The text of the compiled gradient of a model of 36 steps, for three sequences of 16 tokens."""
    graph, params = split_model(lively_model("diffeqformer", num_steps=36, **changes))
    tokens = jnp.ones((3, 16), jnp.int32)

    def loss(params):
        model = nnx.merge(graph, params)
        return model(tokens, weights_at(model)).sum()

    return jax.jit(jax.grad(loss)).lower(params).compile().as_text()


@pytest.mark.fast
def test_only_the_snapshots_are_stored():
    """Of the state's shape, with a leading axis, the compiled program has c snapshots and the last, and no T states."""
    text = compiled_gradient(remat="binomial", snapshots=5)
    assert "f32[6,3,16,32]" in text and "[36,3,16," not in text and "[35,3,16," not in text
