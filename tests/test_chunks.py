"""Weights in chunks of depth: the training of a run that holds all of them, in memory that doesn't grow with depth."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.depth.depths import chunk_length, chunk_lengths
from diffeqformer.fields.attention import plain
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.step import Program
from helpers import ONE_DEVICE, first_state, run_steps, tokens_of, toy_config


@pytest.mark.fast
def test_chunks_divide_the_steps():
    assert [chunk_length(12, most) for most in (1, 3, 5, 7, 12, 100)] == [1, 3, 4, 6, 12, 12]
    assert chunk_length(13, 6) == 1
    model = toy_config(model__training_depths="2,3,8", model__training_times="shifted", model__generate_chunk=4).model
    assert chunk_lengths(model) == {2: 3, 3: 4, 8: 3}


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, remat, changes",
    [
        ((1, 1, 1), "step", {"solver": "heun", "training_times": "shifted", "num_steps": 7, "dropout": 0.3}),
        ((1, 1, 1), "binomial", {"snapshots": 1, "field": "llama"}),
        ((1, 1, 1), "reversible", {"solver": "reversible_euler", "dropout": 0.3, "microbatches": 2}),
        ((2, 2, 2), "step", {"dropout": 0.3, "kind": "looped"}),
        pytest.param((2, 2, 2), "reversible", {"solver": "reversible_heun", "dropout": 0.3}, marks=pytest.mark.slow),
        ((4, 2, 1), "step", {"microbatches": 2, "batch_size": 16, "dtype": "bfloat16"}),
    ],
)
def test_training_is_that_with_all_weights_at_once(mesh, remat, changes):
    places = {"microbatches": "", "batch_size": "", "kind": "", "field": ""}
    changes = {places.get(name, "model__") + name: value for name, value in changes.items()}
    devices, changes = make_mesh(mesh, jax.devices()[: math.prod(mesh)]), {"model__vocab_multiple": 16, **changes}
    whole = run_steps(toy_config(**changes, kernels="xla"), devices, 3)[2]
    chunked = run_steps(toy_config(**changes, model__remat=remat, model__generate_chunk=4), devices, 3)[2]
    # Gradients of weights are added up in another order; bf16 shows it.
    np.testing.assert_allclose(chunked, whole, rtol=2e-4 if changes.get("model__dtype") else 2e-6)


@pytest.mark.long
@pytest.mark.parametrize("remat, solver", [("step", "heun"), ("reversible", "reversible_euler")])
def test_evaluation_is_that_with_all_weights_at_once(remat, solver):
    changes = {"model__solver": solver, "model__num_steps": 6, "model__vocab_multiple": 16, "mesh__fsdp": 2}
    mesh, found = make_mesh((2, 2, 2)), []
    for chunk in (0, 4):
        config = toy_config(**changes, model__remat=remat if chunk else "step", model__generate_chunk=chunk)
        program = Program(config, mesh)
        params = first_state(program)["params"]
        valid = np.arange(config.batch_size)[:, None] < config.batch_size - 1
        for depth in (None, 3):
            weights = program.weights(params, depth)
            found.append(program.evaluate(params, weights, tokens_of(0, config), valid))
    for chunked, whole in zip(found[2:], found[:2], strict=True):
        np.testing.assert_allclose(chunked.total, whole.total, rtol=1e-6)
        assert chunked.count == whole.count == (config.batch_size - 1) * (config.sequence_length - 1)
    assert abs(found[0].total - found[1].total) > 1e-4 * found[0].total  # depth matters


def temporaries(num_steps: int, evaluating: bool = False, mesh=ONE_DEVICE, **model) -> int:
    """The bytes of temporaries of a compiled train step, or of an evaluation, on a device."""
    config = toy_config(**{f"model__{name}": value for name, value in model.items()}, model__num_steps=num_steps)
    program = Program(config, mesh)
    state, tokens = program.state_shapes, tokens_of(0, config)
    if evaluating:
        steps, valid = program.weights(state["params"], None), np.ones((config.batch_size, 1), bool)
        lowered = program.evaluate.lower(state["params"], steps, tokens, valid)
    else:
        lowered = program.train_step.lower(state, tokens)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def evaluations(**model) -> int:
    """How often a train step evaluates attention."""
    calls = []

    def counted(q, k, v):
        zero = jax.pure_callback(
            lambda _: calls.append(0) or np.float32(0), jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(q)
        )
        return plain(q, k, v) + zero

    config = toy_config(**{f"model__{name}": value for name, value in model.items()}, model__num_steps=8)
    program = Program(config, ONE_DEVICE, (counted, "counted"))
    jax.block_until_ready(program.train_step(first_state(program), tokens_of(0, config)))
    return len(calls)


@pytest.mark.long
def test_chunks_cost_no_walk_unless_states_are_left_out():
    assert evaluations(remat="step") == evaluations(remat="step", generate_chunk=4) == 2 * 8
    assert evaluations(remat="binomial", snapshots=2, generate_chunk=4) == 3 * 8
    reversible = {"remat": "reversible", "solver": "reversible_euler"}
    assert evaluations(**reversible) == evaluations(**reversible, generate_chunk=4) == 4 * 8


@pytest.mark.long
def test_states_alone_need_more_memory_in_more_steps():
    mesh, config = make_mesh((2, 2, 2)), toy_config()
    few, many = (
        temporaries(steps, mesh=mesh, vocab_multiple=16, remat="step", generate_chunk=4) for steps in (256, 512)
    )
    state = config.batch_size * config.sequence_length * config.model.width * 4
    np.testing.assert_allclose((many - few) / 256, state / 4, rtol=0.05)  # on devices that share the work


@pytest.mark.long
def test_memory_does_not_grow_with_depth():
    reversible = {"solver": "reversible_euler", "remat": "reversible"}
    binomial = {"remat": "binomial", "snapshots": 4}
    for how, evaluating, most in ((reversible, False, 1.2), (reversible, True, 1.2), (binomial, False, 1.3)):
        few, many = (temporaries(steps, evaluating, **how, generate_chunk=4) for steps in (12, 1024))
        assert many < most * few
