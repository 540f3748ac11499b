"""A run with the schedule `wsd` is given more steps, or a lower rate."""

import pathlib

import jax
import numpy as np
import pytest

from diffeqformer import compare, inspect
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import folder_of, move_aside, steps_of
from diffeqformer.errors import UserError
from diffeqformer.training import loop, resuming, run
from diffeqformer.training.room import train_step_by_shapes
from diffeqformer.training.step import Program
from diffeqformer.transformer import split_model
from helpers import ONE_DEVICE, change, lively_model, save_params, toy_config
from runs import curves

TOY = pathlib.Path("runs/toy")
WSD = {"optimizer__schedule": "wsd", "optimizer__warmup_steps": 2, "optimizer__decay_fraction": 0.5}


def short(stores, **changes):
    """A run of 8 steps that decays after 4."""
    config = toy_config(steps=8, batch_size=8, eval_every=4, checkpoint_every=2, checkpoints_kept=2, log_every=1)
    return change(config, **WSD, data__dir=str(stores), **changes)


def stop(calls: list) -> None:
    """Interrupt at the third call."""
    calls.append(1)
    if len(calls) == 3:
        raise KeyboardInterrupt


@pytest.mark.long
def test_a_run_that_is_given_more_steps_is_the_longer_run(tmp_path, short_stores, monkeypatch, one_device_loop):
    """Bit for bit, with its curves; what it was before stays, also if moving it was interrupted."""
    config, ours = short(short_stores), tmp_path / "ours"
    long = split_model(loop.train(change(short(short_stores), steps=16), tmp_path / "long"))[1]
    first = split_model(loop.train(config, ours))[1]
    assert steps_of(folder_of(ours)) == [4, 6, 8]  # the newest two, and that before the decay

    (ours / "trackers").mkdir()
    config, moved = change(short(short_stores), steps=16), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resuming, "move_aside", lambda *paths: stop(moved) or move_aside(*paths))
        loop.train(config, ours)
    assert moved and steps_of(folder_of(ours)) == [4, 6]
    extended = split_model(loop.train(config, ours))[1]
    jax.tree.map(np.testing.assert_array_equal, extended, long)
    names = ("train/loss", "train/learning_rate", "validation/loss")
    assert all(curves(ours)[name] == curves(tmp_path / "long")[name] for name in names)
    assert steps_of(folder_of(ours)) == steps_of(folder_of(tmp_path / "long"))

    ended = checkpoint.load(ours / "ended-8")
    assert ended.step == 8 and ended.config.steps == 8
    assert (ours / "ended-8" / "trackers").is_dir() and not (ours / "trackers").exists()
    jax.tree.map(np.testing.assert_array_equal, split_model(ended.model)[1], first)
    assert max(curves(ours / "ended-8")["validation/loss"]) == 8
    assert compare.read_run(str(ours / "ended-8"))[0].end() == curves(ours / "ended-8")["validation/bits_per_byte"][8]


@pytest.mark.long
def test_a_run_records_how_many_microbatches_it_took(tmp_path, short_stores, monkeypatch, one_device_loop, capsys):
    """Resumed where there is more memory, it takes fewer."""
    tried = Program(short(short_stores, microbatches=2), ONE_DEVICE)
    room_for_two = int(sum(train_step_by_shapes(tried).values()) / 0.9) + 1
    for steps, memory, number in ((4, room_for_two, 2), (8, None, 1)):
        monkeypatch.setattr(run, "bytes_of_device", lambda _, memory=memory: memory)
        loop.train(change(short(short_stores, microbatches=0), steps=steps), tmp_path)
        assert checkpoint.read_about(folder_of(tmp_path), steps).config["microbatches"] == number
        said = capsys.readouterr().out
        assert f"microbatches: {number}; by its shapes, a train step needs" in said
        assert ("tokens in 2 microbatches" in said) == (number == 2)


@pytest.mark.long
def test_a_lower_rate_makes_another_run(tmp_path, short_stores, one_device_loop, capsys):
    """Which the log, the curve, `inspect` and `compare` say. Adapters find their frozen weights from both folders."""
    base = toy_config("gpt")
    save_params(tmp_path / "base", base, {1: split_model(lively_model(**base.model))[1]}, data_sha256="")
    config = short(short_stores, model__lora_rank=2, base=str(tmp_path / "base"), optimizer__learning_rate=1e-3)
    loop.train(config, tmp_path / "run")
    capsys.readouterr()
    loop.train(change(config, steps=12, optimizer__learning_rate=5e-4), tmp_path / "run")
    said = "until step 4 its peak learning rate was 0.001; now it is 0.0005, so this is another run"
    assert said in capsys.readouterr().out
    rates = curves(tmp_path / "run")["train/learning_rate"]
    assert rates[4] == pytest.approx(1e-3) and rates[5] == rates[6] == pytest.approx(5e-4)
    assert "until step 4 the peak learning rate was 0.001" in inspect.text(inspect.inspect_run(tmp_path / "run"))
    [found] = compare.read_run(str(tmp_path / "run"))
    assert found.setting()["before"] == "0.001 until step 4"
    assert [checkpoint.load(folder).step for folder in (tmp_path / "run", tmp_path / "run" / "ended-8")] == [12, 8]


def test_what_cannot_go_on_is_refused(tmp_path):
    cosine, stable = toy_config(steps=10), toy_config(steps=10, **WSD)
    ways = r"--config.base=runs/toy\); one with config.optimizer.schedule=wsd can be given more steps$"
    with pytest.raises(UserError, match=rf"^runs/toy: holds a run with another config.steps \(there 10, .*{ways}"):
        resuming.check_resumable(change(toy_config(), steps=20), cosine, TOY)
    sentence = "another config.optimizer.learning_rate .there 0.0006, now 0.001; it may only be lowered"
    with pytest.raises(UserError, match=sentence):
        resuming.check_resumable(toy_config(steps=20, **WSD, optimizer__learning_rate=1e-3), stable, TOY)
    changes = dict(optimizer__learning_rate=1e-4, optimizer__final_fraction=0.0)
    resuming.check_resumable(toy_config(steps=20, **WSD, **changes), stable, TOY)

    save_params(tmp_path, stable, {7: {"x": np.ones(1)}, 10: {"x": np.ones(1)}})
    with pytest.raises(UserError, match="^config.steps: must be above 10 to go on from before the decay .* it is 9"):
        resuming.check_extendable(toy_config(steps=9, **WSD), stable, tmp_path)
    with pytest.raises(UserError, match="has to go on from a checkpoint of step 5 or before, but there are 7, 10;"):
        resuming.check_extendable(toy_config(steps=20, **WSD), stable, tmp_path)
    resuming.check_extendable(stable, stable, tmp_path)
