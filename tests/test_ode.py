"""The examination of a model as a differential equation: results that are known in advance."""

import dataclasses
import json
import math
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer import ode, reference
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.inference.scoring import Scorer, Stretch
from diffeqformer.parallel.memory import NoRoom
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import weights_at
from helpers import lively_model
from runs import command

TEXT = "a text of our own. " * 40


def model_of(time_frequency: float, **changes):
    return lively_model("diffeqformer", time_frequency=time_frequency, width=16, heads=2, mlp=16, **changes)


def test_smooth_weights_and_unrelated_weights_are_told_apart():
    smooth = ode.smoothness(model_of(1.0, num_steps=16))
    assert set(smooth) == {"qkv", "attention_out", "mlp_up", "mlp_down"}
    assert all(row["ratio"] < 0.15 and row["half_change"] > 1e-4 for row in smooth.values())
    unrelated = ode.smoothness(model_of(1e7, num_steps=200, time_embed_dim=32, sinusoidal_dim=32))
    assert all(row["ratio"] == pytest.approx(math.sqrt(3), rel=0.15) for row in unrelated.values())


@pytest.mark.long
def test_convergence_is_seen_where_weights_are_smooth_and_only_there():
    tokens = np.arange(12).reshape(2, 6)
    found = ode.convergence(model_of(5.0, num_steps=4), tokens, refinements=3)
    assert found["num_steps"] == [4, 8, 16, 32]
    for method, order in found["orders"].items():
        assert order == pytest.approx(SOLVERS[method].order, abs=0.35), (method, found["errors"][method])
    rough = ode.convergence(model_of(1000.0, num_steps=4), tokens, refinements=3)
    assert all(order < 1.5 for order in rough["orders"].values())


def test_orders_are_slopes_over_three_usable_grids():
    numbers = [4, 8, 16, 32, 64]
    errors = [0.5 * n**-2.0 for n in numbers]
    assert ode.observed_order(numbers, errors) == pytest.approx(2)
    assert ode.observed_order(numbers, [*errors[:-1], 1e-7]) == pytest.approx(2)  # where fp32 rounds
    assert ode.observed_order(numbers, [0.9, *errors[1:]]) == pytest.approx(2)  # of a grid that is too coarse
    assert ode.observed_order(numbers[:3], [0.1, math.inf, 0.01]) is None


@pytest.mark.parametrize("kind", ["diffeqformer", "interpolated"])
def test_curves_pass_through_the_trained_weights(kind):
    model = lively_model(kind, time_frequency=1000.0)
    times, values, trained = ode.curves(model, points=600)
    kernel = model.depth(model.grid())["qkv"]["kernel"]
    kernel = kernel - kernel.mean(0)
    assert np.allclose(values[99::100], trained, atol=1e-5) and times[99] == pytest.approx(1 / 6)
    rows, columns = ([size * (2 * i + 1) // 8 for i in range(4)] for size in kernel.shape[1:])
    np.testing.assert_allclose(trained, kernel[:, rows, columns], atol=1e-5)


@pytest.mark.slow
def test_the_command_reports_on_a_run(run, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT[:70])  # 4 windows, fewer than the 64 that are asked for
    options = "--workdir", run, "--files", tmp_path / "text.txt", "--output", tmp_path / "out"
    done = command("ode", *options, "--refinements=2")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (tmp_path / "out" / "results.md").read_text() in done.stdout and (tmp_path / "out" / "ode.png").exists()
    assert results["windows"] == 4 and len({*results["perplexities"].values()}) >= 9
    model = checkpoint.load(run).model
    ids = jnp.asarray(np.frombuffer(TEXT.encode(), np.uint8)[:64].reshape(4, 16).astype(np.int32))
    for name, solver, steps in (
        ("as trained: 6 steps", SOLVERS["euler"], 6),
        ("12 steps", SOLVERS["euler"], 12),
        ("weights 0.25 of a step earlier", dataclasses.replace(SOLVERS["euler"], nodes=(0.75,)), 6),
        ("rk4, 12 steps", SOLVERS["rk4"], 12),
    ):
        walker = model.replace(solver=solver)
        expected = reference.loss(walker(ids, weights_at(walker, steps)), ids)
        assert results["perplexities"][name] == pytest.approx(math.exp(expected), rel=1e-4)


def test_other_solvers_have_other_trained_times_and_grids():
    model = model_of(10.0, num_steps=3, solver="midpoint")
    np.testing.assert_allclose(ode.trained_times(model), np.arange(6) / 6)
    rows = ode.grids(model, [2, 6])  # as commands take a number of steps that wasn't trained
    assert list(rows)[:3] == ["3 steps", "as trained: 2 steps", "4 steps"] and not any("earlier" in row for row in rows)


def test_a_grid_that_does_not_fit_or_overflows_is_left_out(monkeypatch, capsys):
    alive = weakref.WeakSet()

    class SmallScorer(Scorer):
        def __init__(self, model, num_steps, batch_size):
            assert not alive  # only one has its weights in memory
            super().__init__(model, num_steps, batch_size)
            alive.add(self)
            if num_steps > 2:
                raise {3: NoRoom("batch_size: take fewer"), 4: NotFinite()}[num_steps]

    monkeypatch.setattr(ode, "Scorer", SmallScorer)
    grids = {f"{number} steps": (SOLVERS["euler"], number) for number in (3, 4, 2)}
    monkeypatch.setattr(ode, "grids", lambda *_: grids)
    found = ode.perplexities(model_of(10.0, num_steps=2), [2], [Stretch(list(range(8)), 1)], 1)
    assert found.keys() == {"2 steps"}
    assert "  4 steps: left out, as the logits aren't finite" in capsys.readouterr().out
