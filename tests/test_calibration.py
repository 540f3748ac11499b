"""Grids that a tolerance chooses: as fine as necessary, and no finer."""

import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.depth.grid import Grid
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context
from diffeqformer.inference import calibration
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import weights_at
from helpers import lively_model

TOKENS = jnp.arange(24).reshape(2, 12)


def smooth_model():
    return lively_model("diffeqformer", time_frequency=10.0, width=16, heads=2, mlp=16)


def last_state(model, solver, grid) -> np.ndarray:
    model = model.replace(solver=SOLVERS[solver])
    return np.asarray(model.trajectory(TOKENS, weights_at(model, grid))[-1])


@pytest.mark.long
def test_each_step_meets_the_tolerance_and_is_not_much_shorter_than_it_must_be():
    model = smooth_model()
    scale = np.sqrt(np.mean(last_state(model, "euler", None) ** 2))
    times = calibration.choose_times(model, TOKENS, 0.01)
    assert times[-1] == 1.0 and np.all(np.diff(times, prepend=0.0) > 0) and len(times) > 4
    errors = []
    x, start = model.embed(TOKENS, Context()), 0.0
    for end in times:
        before, after = (
            {
                name: {k: v[i] for k, v in layer.items()}
                for name, layer in model.depth(Grid.of(np.array([start, end]))).items()
            }
            for i in (0, 1)
        )
        k_1 = model.field(before, x, Context())
        k_2 = model.field(after, x + (end - start) * k_1, Context())
        errors.append(float(jnp.sqrt(jnp.mean(((end - start) / 2 * (k_2 - k_1)) ** 2)) / scale))
        x, start = x + (end - start) / 2 * (k_1 + k_2), end
    assert max(errors) <= 0.01 * (1 + 1e-3) and np.median(errors) > 0.003
    np.testing.assert_allclose(last_state(model, "heun", times), x, atol=1e-5)


@pytest.mark.long
def test_a_smaller_tolerance_takes_more_steps_and_comes_nearer():
    model = smooth_model()
    exact = last_state(model, "rk4", 64)
    grids = [calibration.choose_times(model, TOKENS, tolerance) for tolerance in (0.1, 0.01, 0.001)]
    errors = [np.abs(last_state(model, "heun", grid) - exact).max() for grid in grids]
    assert len(grids[0]) < len(grids[1]) < len(grids[2]) <= calibration.MOST * 6
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3


def test_rounding_leaves_no_step_of_its_own():
    """A step that grows by the factor of five, the greatest, ends at 1 but for rounding."""
    times = calibration.choose_times(lively_model("diffeqformer", num_steps=6), TOKENS, 100.0)
    np.testing.assert_allclose(np.diff(times, prepend=0.0), [1 / 6, 5 / 6])


def test_a_tolerance_that_takes_too_many_steps_is_refused():
    with pytest.raises(UserError, match="^--tolerance: 1e-09 can't be met with 96 steps: at t = 0.000 "):
        calibration.choose_times(smooth_model(), TOKENS, 1e-9)


def test_calibration_takes_the_first_windows_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    tokens = calibration.calibration_tokens(str(tmp_path / "*.txt"), ByteTokenizer(), 3, count=8)
    np.testing.assert_array_equal(tokens, [[97, 98, 99], [100, 101, 102]])
    with pytest.raises(
        UserError, match="^--calibration_files: must have at least one window of 8 tokens, but they have 7"
    ):
        calibration.calibration_tokens(str(tmp_path / "a.txt"), ByteTokenizer(), 8)
    with pytest.raises(UserError, match="^--calibration_files: no file matches"):
        calibration.calibration_tokens(str(tmp_path / "b.txt"), ByteTokenizer(), 8)
