"""Weights in chunks of depth: the training of a run that holds all of them, in memory that doesn't grow with depth."""

import math

import jax
import numpy as np
import pytest

from diffeqformer.depth.depths import chunk_length, chunk_lengths
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.step import Program
from helpers import ONE_DEVICE, run_steps, tokens_of, toy_config


@pytest.mark.fast
def test_chunks_divide_the_steps():
    assert [chunk_length(12, most) for most in (1, 3, 5, 7, 12, 100)] == [1, 3, 4, 6, 12, 12]
    assert chunk_length(13, 6) == 1
    model = toy_config(model__training_depths="2,3,8", model__training_times="mixed", model__generate_chunk=4).model
    assert chunk_lengths(model) == {2: 2, 3: 4, 8: 3}


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, remat, changes",
    [
        ((1, 1, 1), "none", {"solver": "heun", "training_times": "shifted", "num_steps": 7}),
        ((1, 1, 1), "binomial", {"snapshots": 1, "field": "llama", "step_features": 4}),
        ((1, 1, 1), "reversible", {"solver": "reversible_euler", "dropout": 0.3, "microbatches": 2}),
        pytest.param((2, 2, 2), "products", {"dropout": 0.3, "kind": "looped"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "reversible", {"solver": "reversible_heun", "dropout": 0.3}, marks=pytest.mark.slow),
        ((4, 2, 1), "step", {"generator": 2, "microbatches": 2, "batch_size": 16, "dtype": "bfloat16"}),
    ],
)
def test_training_is_that_with_all_weights_at_once(mesh, remat, changes):
    places = {"microbatches": "", "batch_size": "", "kind": "", "field": "", "generator": "mesh__"}
    changes = {places.get(name, "model__") + name: value for name, value in changes.items()}
    devices, changes = make_mesh(mesh, jax.devices()[: math.prod(mesh)]), {"model__vocab_multiple": 16, **changes}
    whole = run_steps(toy_config(**changes, kernels="xla"), devices, 3)[2]
    chunked = run_steps(toy_config(**changes, model__remat=remat, model__generate_chunk=4), devices, 3)[2]
    # Gradients of weights are added up in another order; bf16 shows it.
    np.testing.assert_allclose(chunked, whole, rtol=2e-4 if changes.get("model__dtype") else 2e-6)


def temporaries(num_steps: int, **model) -> int:
    """The bytes of temporaries of a compiled train step."""
    config = toy_config(**{f"model__{name}": value for name, value in model.items()}, model__num_steps=num_steps)
    program = Program(config, ONE_DEVICE)
    lowered = program.train_step.lower(program.state_shapes, tokens_of(0, config))
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_does_not_grow_with_depth():
    reversible = {"solver": "reversible_euler", "remat": "reversible", "generate_chunk": 4}
    few, many = (temporaries(steps, **reversible) for steps in (12, 1024))
    assert many < 1.2 * few
    binomial = {"remat": "binomial", "snapshots": 4, "generate_chunk": 4}
    few, many = (temporaries(steps, **binomial) for steps in (12, 1024))
    assert many < 1.3 * few
