"""The Pallas kernels' values, without a TPU, against float64 and optax."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu

from diffeqformer.kernels import blocks
from diffeqformer.kernels.generator import gradients, project, update
from helpers import normal

SHAPES = [(36, 24, 16, 384), (7, 144, 8, 640)]  # T, E, inputs, outputs
CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
WIDTHS = (768, 1024, 1280, 2048)  # of the models in configs/
LAYERS = [(inputs * width, outputs * width) for width in WIDTHS for inputs, outputs in [(1, 3), (4, 1)]]
CHIPS = [blocks.Chip(limit * blocks.MEBIBYTE, cores) for limit in (16, 32) for cores in (2, 1)]
CASES = [(SHAPES[0], "float32", True), (SHAPES[0], "bfloat16", CHECKED), (SHAPES[1], "bfloat16", True)]
"""Shapes, types of dW or the weights, and interpreters, of which one is careful and slow."""


def layer(shape: tuple[int, int, int, int], dtype: str) -> tuple[jax.Array, ...]:
    """h, P, B and dW of a layer; dW in `dtype`."""
    times, width, inputs, outputs = shape
    random = np.random.RandomState(sum(shape))
    sizes = [(times, width), (inputs, width, outputs), (inputs, outputs), (times, inputs, outputs)]
    h, projection, constant, d_weights = (jnp.asarray(normal(random, size)) for size in sizes)
    return h, projection, constant, d_weights.astype(dtype)


def exact(pattern: str, *arrays) -> np.ndarray:
    return np.einsum(pattern, *(np.asarray(array, np.float64) for array in arrays), optimize=True)


@pytest.fixture
def small_chip():
    """Two cores with room for one or two of the smallest blocks of a kernel, so that small layers need many."""

    def chip(times, width, per_weight):
        smallest = 2 * 8 * 128 * per_weight
        return blocks.Chip(max(-(-smallest * 8 // 7), smallest + blocks.bytes_beside(times, width, 8)), cores=2)

    yield chip
    pltpu.reset_tpu_interpret_mode_state()  # which an error would leave behind


@pytest.mark.parametrize("shape, dtype, interpret", CASES)
def test_weights_are_rounded_once(shape, dtype, interpret, small_chip):
    times, width, *_ = shape
    chip = small_chip(times, width, 4 * width + 4 + 4 * times)
    h, projection, constant, _ = layer(shape, dtype)
    weights = jax.jit(functools.partial(project, dtype=dtype, chip=chip, interpret=interpret))(h, projection, constant)
    expected = exact("te,ieo->tio", h, projection) + np.asarray(constant)
    assert weights.dtype == dtype
    half = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(weights, np.float64), expected, rtol=1.001 * half, atol=2e-5)


@pytest.mark.parametrize("shape, dtype, interpret", CASES)
def test_gradients(shape, dtype, interpret, small_chip):
    times, width, *_ = shape
    chip = small_chip(times, width, 4 * width + 4 + 4 * times)
    h, projection, _, d_weights = layer(shape, dtype)
    compute = jax.jit(functools.partial(gradients, chip=chip, interpret=interpret))
    d_h, d_constant, squares = compute(h, projection, d_weights)
    expected = exact("tio,ieo->te", d_weights, projection)
    np.testing.assert_allclose(d_h, expected, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(d_constant, exact("tio->io", d_weights), atol=1e-5)
    np.testing.assert_allclose(squares, (exact("te,tio->ieo", h, d_weights) ** 2).sum(), rtol=1e-5)


def test_squares_survive_cancellation():
    """With almost constant h and gradients that cancel over time, Gram matrices in fp32 lose the sum of squares."""
    _, projection, _, d_weights = layer((36, 24, 16, 384), "float32")
    h = 1 + 1e-3 * jnp.asarray(normal(np.random.RandomState(0), (36, 24)))
    d_weights -= d_weights.mean(0)
    expected = (exact("te,tio->ieo", h, d_weights) ** 2).sum()
    gram = jnp.sum((h @ h.T) * jnp.einsum("tio,sio->ts", d_weights, d_weights))
    assert abs(gram / expected - 1) > 1e-3
    *_, squares = gradients(h, projection, d_weights, chip=CHIPS[0], interpret=True)
    np.testing.assert_allclose(squares, expected, rtol=1e-4)


@pytest.mark.parametrize("shape, dtype, interpret", CASES)
def test_two_updates_are_those_of_optax(shape, dtype, interpret, small_chip):
    times, width, *_ = shape
    chip = small_chip(times, width, 6 * 4 * width + 4 * times)
    h, projection, _, d_weights = layer(shape, dtype)
    settings = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = optax.adamw(1e-2, **settings)
    step = jax.jit(functools.partial(update, **settings, chip=chip, interpret=interpret))

    @jax.jit
    def expected_step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(projection)
    for count, clip in ((1, 0.5), (2, 2.0)):
        scalars = jnp.array([clip, 1e-2, 1 - 0.9**count, 1 - 0.95**count], jnp.float32)
        found = step(h, d_weights, projection, state[0].mu, state[0].nu, scalars)
        gradient = clip * jnp.asarray(exact("te,tio->ieo", h, d_weights), jnp.float32)
        projection, state = expected_step(gradient, state, projection)
        # a step is 1e-2; where a gradient is almost 0, its last bits decide more
        np.testing.assert_allclose(found[0], projection, rtol=1e-6, atol=1e-5)
        assert np.sqrt(np.mean((found[0] - projection) ** 2)) < 2e-7
        np.testing.assert_allclose(found[1], state[0].mu, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(found[2], state[0].nu, rtol=1e-5, atol=1e-5)
        h = h[::-1]  # another gradient


@pytest.mark.parametrize("times, width", [(36, 96), (144, 144), (6, 8)])
def test_blocks_cover_a_layer_once(times, width):
    per_weight = 6 * 4 * width + 2 * times
    for chip, devices, (inputs, outputs) in itertools.product(CHIPS, (1, 32), LAYERS):
        rows = inputs // devices
        assert blocks.reason_against(times, width, rows, outputs, chip) is None
        cut = blocks.choose(times, width, rows, outputs, per_weight, chip)
        assert rows % cut.rows == outputs % cut.columns == 0 and cut.across == outputs // cut.columns
        assert np.prod(cut.grid) * cut.rows * cut.columns == rows * outputs and cut.grid[0] == chip.cores
        row, column = cut.of_constant().index_map(*np.indices(cut.grid, np.int32).reshape(2, -1))
        assert len({*zip(np.array(row).tolist(), np.array(column).tolist(), strict=True)}) == np.prod(cut.grid)
        assert 2 * per_weight * cut.rows * cut.columns <= chip.budget
    assert "fit in VMEM" in blocks.reason_against(256, 256, 1280, 5120, CHIPS[0])  # beside strip and stack
