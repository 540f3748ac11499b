"""What a run prints and writes as it goes, and the comparison of runs."""

import json
import math
import types

import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffeqformer import compare
from diffeqformer.console import progress as progress_module
from diffeqformer.console.progress import Progress, TensorBoard, read_curves
from diffeqformer.errors import UserError
from helpers import save_params, toy_config
from runs import curves


def test_curves_hold_each_step_once_whatever_the_clock_does(tmp_path, monkeypatch):
    """Clocks are set back. A validation left over at step 2 is made twice, because the process ends before it saves."""
    result = {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0}
    for hour, first in ((3, 0), (2, 2), (1, 2)):
        monkeypatch.setattr("time.time", lambda hour=hour: 1.8e9 + 3600 * hour)
        progress = Progress(first, 4, 1, [TensorBoard(tmp_path, first)])
        if first == 2:
            progress.validation(2, result)
        for step in range(first + 1, 4 if first == 0 else 5):
            progress.train(step, {"loss": float(hour)})
        progress.close()
    losses = {1: 3.0, 2: 3.0, 3: 1.0, 4: 1.0}
    assert read_curves(tmp_path)["train/loss"] == curves(tmp_path)["train/loss"] == losses
    assert curves(tmp_path)["validation/loss"] == {2: 1.0}


def test_rates_and_the_time_left_leave_out_what_does_not_come_again(monkeypatch, capsys):
    now = types.SimpleNamespace(seconds=0.0)
    clock = types.SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: now.seconds)
    monkeypatch.setattr(progress_module, "time", clock)
    progress = Progress(0, steps=103, tokens_per_step=10)
    progress.first(1, 5.0, 7.0)
    now.seconds += 2 + 100 + 30
    progress.compiled(100.0)
    progress.pause(30.0)  # a validation, which comes again
    progress.train(3, {"loss": 4.0})
    progress.close()
    assert "10 tokens/s  26:40 left" in capsys.readouterr().out


def test_the_config_is_a_text_of_tensorboard(tmp_path):
    progress = Progress(0, 1, 1, [TensorBoard(tmp_path, 0)])
    progress.trackers[0].config({"model.kind": "gpt", "sample.prompt": "a | b"})
    progress.close()
    [event] = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "| model.kind | gpt |\n| sample.prompt | a &#124; b |" in text


pytestmark = pytest.mark.fast


def pretend(
    folder, validations: dict[int, float], kind="diffeqformer", data="hash", scored="", at=None, **changes
) -> None:
    """A run with the given validations, bits per byte by step, and one more `at` a number of steps of depth."""
    config = toy_config(kind, steps=20, **changes)
    save_params(folder, config, {20: {"w": jnp.ones((4, 3))}}, data_sha256=data, validation_sha256=scored)
    progress = Progress(0, 20, 64, [TensorBoard(folder, 0)])
    for step, value in validations.items():
        progress.validation(step, {"loss": value, "perplexity": value, "bits_per_byte": value} | (at or {}))
    progress.close()


@pytest.fixture
def runs(tmp_path, capsys):
    for seed, end in ((3, 2.0), (1, 2.2)):
        pretend(tmp_path / f"ours-{seed}", {10: 2.5, 20: end}, seed=seed, eval_every=7 + seed)
    pretend(tmp_path / "fast", {10: 1.9, 20: 2.4}, optimizer__learning_rate=0.5)
    pretend(tmp_path / "gpt", {10: 3.0}, "gpt")
    capsys.readouterr()
    return tmp_path


def test_seeds_of_equal_configs_are_one_row_and_others_say_what_sets_them_apart(runs, capsys):
    (runs / "log.txt").touch()
    (runs / "empty").mkdir()
    (runs / "link").symlink_to(runs / "gpt")
    compare.compare([str(path) for path in sorted(runs.iterdir())] + [f"{runs}/gpt/"], str(runs / "out"))
    ours = f"| toy: diffeqformer, learning_rate {toy_config().optimizer.learning_rate}"
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("left out")] == [
        f"left out: {runs}/empty: there is no checkpoint here; give the folder of a run"
    ]
    assert (runs / "out" / "results.md").read_text().splitlines()[2:] == [
        f"{ours} | 2 | 1, 3 | 12 | 20 | 2.10 ± 0.14 | 2.1000 ± 0.1414 | 2.1000 ± 0.1414 | 20 |  |",
        "| toy: diffeqformer, learning_rate 0.5 | 1 | 0 | 12 | 20 | 2.40 | 2.4000 | 1.9000 | 10 |  |",
        "| toy-gpt: gpt | 1 | 0 | 12 | 10 (unfinished) | 3.00 | 3.0000 | 3.0000 | 10 |  |",
    ]
    assert "WARNING" not in said and (runs / "out" / "validation.png").stat().st_size > 1e4
    results = json.loads((runs / "out" / "results.json").read_text())
    curves = [run["curve"]["20"] for run in results[ours.removeprefix("| ")]]
    assert curves == pytest.approx([2.2, 2.0])


def test_a_run_of_several_depths_is_a_row_at_each(tmp_path, capsys):
    pretend(tmp_path / "both", {20: 2.0}, at={"bits_per_byte_at_3": 2.25}, model__training_depths="3,6")
    pretend(tmp_path / "whole", {20: 1.9})
    compare.compare([str(tmp_path / "both"), str(tmp_path / "whole")], str(tmp_path / "out"))
    rows = [line.split(" | ") for line in (tmp_path / "out" / "results.md").read_text().splitlines()[2:]]
    assert [(row[0], row[5], row[6]) for row in rows] == [
        ("| toy: diffeqformer, num_steps 6, training_depths ", "1.90", "1.9000"),
        ("| toy: diffeqformer, num_steps 6, training_depths 3,6", "2.00", "2.0000"),
        ("| toy: diffeqformer, num_steps 3, training_depths 3,6", "", "2.2500"),
    ]


def test_runs_on_other_data_are_apart_and_warned_of(runs, capsys):
    pretend(runs / "elsewhere", {20: 2.0}, seed=5, data="another")
    ours, elsewhere = (compare.read_run(str(runs / name))[0] for name in ("ours-1", "elsewhere"))
    assert list(compare.grouped([ours, elsewhere])) == [f"toy: diffeqformer, data {n}" for n in ("hash", "another")]
    compare.compare([ours.folder, elsewhere.folder], str(runs / "out"))
    assert "WARNING: these runs read different tokens" in capsys.readouterr().out
    pretend(runs / "hard", {20: 2.0}, scored="hard")
    [hard] = compare.read_run(str(runs / "hard"))
    compare.compare([hard.folder, ours.folder], str(runs / "out2"))  # ours is of an earlier version, without a hash
    said = capsys.readouterr().out
    assert "WARNING" not in said and "| toy: diffeqformer | 2 | 0, 1 |" in said


def test_a_run_whose_text_has_unknown_ids_is_left_out(tmp_path):
    pretend(tmp_path, {10: math.nan, 20: math.nan})
    with pytest.raises(UserError, match="no validation here yet, or its text has unknown ids and so no bits/byte$"):
        compare.read_run(str(tmp_path))
