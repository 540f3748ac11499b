"""What only a GPU can fail: attention by cuDNN, bfloat16 there, memory, checkpoints and restarts. `make test-gpu`.

The bounds are multiples of what rounding costs. On a CPU, with flash attention imitated in bfloat16, the largest
distances were 0.0028 for attention and 0.021 for a gradient.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffeqformer.checkpoints import checkpoint
from diffeqformer.errors import UserError
from diffeqformer.fields import attention
from diffeqformer.orbax import ocp
from diffeqformer.parallel import memory
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.room import check_memory
from diffeqformer.training.step import Program
from helpers import change, first_state, load_config, normal, tokens_of, toy_config
from runs import curves, finish, start

pytestmark = pytest.mark.gpu
GPU, CPU = jax.devices()[0], jax.devices("cpu")[-1]
AMPERE = float(getattr(GPU, "compute_capability", 0)) >= 8  # or later
CUDNN = "cuDNN" if AMPERE else attention.fastest(GPU, "bfloat16", 128, 64)[1]  # what a run in bfloat16 should take


def distance(found, expected) -> float:
    """The norm of the difference, relative to the expected one's."""
    found, expected = (np.asarray(array, np.float64) for array in (found, expected))
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / size) if size else float(np.any(found))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, query, key, value, cotangent):
    mixed, pull_back = jax.vjp(attend, query, key, value)
    return mixed, *pull_back(cotangent)


@pytest.mark.skipif(not AMPERE, reason=CUDNN)
@pytest.mark.parametrize(
    "width, length, shared",
    [(64, 1024, 1), (64, 1024, 4), (64, 78, 1), (8, 192, 1), (24, 18, 1), (80, 334, 1), (128, 1022, 2), (256, 512, 1)],
    ids=str,
)
def test_attention_by_cudnn_is_plain_attention(width, length, shared):
    """Values and gradients. A key and a value are `shared` by so many heads."""
    attend, said = attention.fastest(GPU, "bfloat16", length, width)
    if width > 128 and attend is attention.plain:
        pytest.skip(said)
    assert said == "cuDNN"
    random = np.random.RandomState(0)
    heads = (3 * shared, 3, 3, 3 * shared)
    arrays = [jnp.asarray(normal(random, (2, length, count, width)), jnp.bfloat16) for count in heads]
    with jax.default_matmul_precision("highest"):  # fp32, and not TF32
        expected = with_gradients(attention.plain, *(array.astype(jnp.float32) for array in arrays))
    found = with_gradients(attend, *arrays)
    assert all(array.dtype == jnp.bfloat16 for array in found)
    assert max(map(distance, found, expected)) <= 2**-7  # two units in the last place


@functools.cache
def program_on(device, kind: str, dtype: str = "float32") -> Program:
    """The functions of a small run on one device, with the same masks of dropout on each."""
    config = toy_config(kind, batch_size=8, sequence_length=128, model__dtype=dtype, model__dropout=0.1)
    config.model.remat = "products" if kind == "gpt" else "step"
    config.model.update(width=128, heads=2, mlp=512, num_steps=4, time_embed_dim=16, max_length=128)
    return Program(config, make_mesh(devices=[device]))


def first_step(program: Program) -> tuple[dict, dict]:
    """The scalars of the first step, and the gradient: Adam's first moment has a part of it."""
    state, scalars = program.train_step(first_state(program), tokens_of(0, program.config))
    return jax.device_get((scalars, optax.tree_utils.tree_get(state["optimizer"], "mu")))


def assert_close(found: tuple[dict, dict], expected: tuple[dict, dict], bound: float):
    assert set(found[0]) == set(expected[0])
    np.testing.assert_allclose(list(found[0].values()), list(expected[0].values()), rtol=bound)
    apart = jax.tree_util.tree_leaves_with_path(jax.tree.map(distance, found[1], expected[1]))
    assert len(apart) > 10 and not {jax.tree_util.keystr(path): part for path, part in apart if not part <= bound}


@pytest.mark.parametrize("kind", ["diffeqformer", "gpt"])
def test_a_step_is_that_of_a_cpu_and_one_in_bfloat16_is_near(kind):
    expected = first_step(program_on(CPU, kind))
    assert_close(first_step(program_on(GPU, kind)), expected, 1e-4)  # with TF32 some are 3e-4 apart
    rounded = program_on(GPU, kind, "bfloat16")
    assert rounded.attention == CUDNN
    assert_close(first_step(rounded), expected, 2**-5)


@pytest.mark.parametrize("there, here", [(GPU, CPU), (CPU, GPU)], ids=["to a CPU", "to a GPU"])
def test_a_checkpoint_is_restored_on_another_device(there, here, tmp_path):
    programs = [program_on(device, "diffeqformer") for device in (there, here)]
    state, _ = programs[0].train_step(first_state(programs[0]), tokens_of(0, programs[0].config))
    about = checkpoint.About(programs[0].config.to_dict(), "bytes")
    with checkpoint.open_to_write(tmp_path, 1) as checkpoints:
        checkpoint.save(checkpoints, 1, state, about)
    folder, step, _, _ = checkpoint.open_to_read(tmp_path)
    restored = checkpoint.restore_state(folder, step, programs[1].state_shapes)
    assert {device for leaf in jax.tree.leaves(restored) for device in leaf.devices()} == {here}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    tokens = tokens_of(1, programs[0].config)
    found, expected = (program.train_step(s, tokens)[1] for program, s in zip(programs, (state, restored)))
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-4)


def test_free_memory_is_read_and_a_model_that_is_too_large_is_said():
    gc.collect()
    before, block = memory.free_bytes([GPU]), jax.device_put(np.zeros(2**28, np.uint8), GPU)
    block.block_until_ready()
    assert abs(before - memory.free_bytes([GPU]) - block.nbytes) < 2**20
    config = change(load_config("llama_1b"), mesh__fsdp=1, model__vocab_size=32_000, model__num_steps=10_000)
    config.model.update(width=2**14, mlp=2**16)
    program = Program(config, make_mesh(devices=[GPU]))
    with pytest.raises(UserError, match="^config.model: its parameters and the optimizer's state need"):
        check_memory(program, will_train=True)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, short_stores):
    """Curves, sample, parameters and moments, with XLA's deterministic kernels, in bfloat16."""
    options = ["--config.steps=400", "--config.eval_every=200", "--config.model.dtype=bfloat16"]
    undisturbed = start(1, 1, [tmp_path / "alone"], short_stores, *options)
    stopped = start(1, 1, [tmp_path / "stopped"], short_stores, *options)
    try:
        for line in stopped[0].stdout:
            if line.startswith("step 9/"):
                stopped[0].terminate()
        finish(stopped, 143)
        [(resumed, _)] = finish(start(1, 1, [tmp_path / "stopped"], short_stores, *options))
        [(alone, _)] = finish(undisturbed)
    finally:
        undisturbed[0].kill()
    assert "from its checkpoint at step" in resumed and f"attention: {CUDNN[:5]}" in resumed
    assert resumed[resumed.index("--- sample ---") :] == alone[alone.index("--- sample ---") :]
    found, expected = curves(tmp_path / "stopped"), curves(tmp_path / "alone")
    assert len(expected["train/loss"]) == 400 and len(expected["validation/loss"]) == 2
    speeds = {"train/tokens_per_second", "train/utilisation"}
    assert set(found) == set(expected) and {tag for tag in expected if found[tag] != expected[tag]} <= speeds
    states = []
    for folder in ("stopped", "alone"):
        checkpoints, step, _, _ = checkpoint.open_to_read(tmp_path / folder)
        states.append(ocp.load_checkpointables(checkpoints / str(step), {"params": None, "optimizer": None}))
    jax.tree.map(np.testing.assert_array_equal, *states)
