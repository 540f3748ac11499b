"""A run killed at any moment resumes from its newest complete checkpoint, bit for bit.

`make test-kill` does this for ten minutes. The suite has two kills, each in the middle of a save.
"""

import pathlib
import random
import re
import signal
import time

import jax
import numpy as np
import pytest

from diffeqformer import checkpoint
from diffeqformer.console.terminal import printable
from diffeqformer.training import loop
from runs import curves, finish, start

KILLING = ["--config.checkpoint_every=3", "--config.steps=30", "--config.eval_every=10"]


def newest(workdir: pathlib.Path) -> int:
    """The newest checkpoint that has its final name, 0 for none."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def kill_one(workdir, stores, when) -> int:
    """Start or resume a run and kill it when `when(process)` returns. Returns the step from which it resumed."""
    before = newest(workdir)
    [running] = start(1, 1, [workdir], stores, *KILLING)
    read = when(running) or ""
    running.send_signal(signal.SIGKILL)
    output, errors = running.communicate()
    output = read + output
    assert running.returncode in (-signal.SIGKILL, 0) and errors == "", errors
    resumed = re.search(r"from its checkpoint at step (\d+)", output)
    if resumed or before == 0:
        assert before == 0 or int(resumed[1]) == before
    assert newest(workdir) >= before
    return before


def check_as_if_nothing_had_been(tmp_path, stores) -> None:
    """Curves, sample, parameters and Adam moments of the killed run equal those of an undisturbed run."""
    [(output, _)] = finish(start(1, 1, [tmp_path / "killed"], stores, *KILLING))
    [(alone, _)] = finish(start(1, 1, [tmp_path / "alone"], stores, *KILLING))
    assert output[output.index("--- sample ---") :] == alone[alone.index("--- sample ---") :]
    found, expected = curves(tmp_path / "killed"), curves(tmp_path / "alone")
    assert set(expected["train/loss"]) == set(range(1, 31)) and set(expected["validation/loss"]) == {10, 20, 30}
    assert {tag for tag in expected if found[tag] != expected[tag]} == {"train/tokens_per_second"}
    killed, alone = (saved_state(tmp_path / folder) for folder in ("killed", "alone"))
    jax.tree.map(np.testing.assert_array_equal, killed, alone)


def saved_state(workdir) -> dict:
    """Parameters and optimizer state of the last step."""
    items = {name: checkpoint.ocp.args.StandardRestore() for name in ("params", "optimizer")}
    with checkpoint.open_to_read(workdir) as (manager, step, _, _):
        assert step == 30 and {27, 30} <= set(manager.all_steps())  # a kill can keep an older one from being deleted
        return dict(manager.restore(step, args=checkpoint.ocp.args.Composite(**items)).items())


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save(tmp_path, short_stores):
    def saves_begun() -> set:
        return {(path.name, path.stat().st_ino) for path in (tmp_path / "killed" / "checkpoints").glob("*tmp*")}

    def saving(running):
        before = saves_begun()
        while not saves_begun() - before:
            assert running.poll() is None

    killed = False
    while not killed:
        before = saves_begun()
        kill_one(tmp_path / "killed", short_stores, saving)
        killed = bool(saves_begun() - before)  # or the save was faster
    check_as_if_nothing_had_been(tmp_path, short_stores)

    [(again, _)] = finish(start(1, 1, [tmp_path / "alone"], short_stores, *KILLING))
    assert "has already finished its 30 steps" in again and "first step" not in again
    opened = checkpoint.load(tmp_path / "alone")  # by itself: config, model and tokenizer come from the checkpoint
    text = loop.sample(opened.config, opened.model, opened.tokenizer)
    assert f"--- sample ---\n{printable(text)}\n" in again


@pytest.mark.kill
def test_kills_at_random_moments_for_ten_minutes(tmp_path, short_stores, capsys):
    """Every other kill comes after the first step, when saves follow one another."""
    deadline, kills, at = time.monotonic() + 600, 0, random.Random(0)

    def early(running):
        time.sleep(at.uniform(1, 14))

    def training(running):
        lines = []
        while lines[-1:] != [""] and "first step" not in "".join(lines[-1:]):
            lines.append(running.stdout.readline())
        time.sleep(at.uniform(0, 3))
        return "".join(lines)

    while time.monotonic() < deadline:
        if newest(tmp_path / "killed") == 30:
            check_as_if_nothing_had_been(tmp_path, short_stores)
            for folder in ("killed", "alone"):
                (tmp_path / folder).rename(tmp_path / f"{folder}-{kills}")
        kill_one(tmp_path / "killed", short_stores, training if kills % 2 else early)
        kills += 1
        with capsys.disabled():
            print(f"kill {kills}: the newest checkpoint is step {newest(tmp_path / 'killed')}", flush=True)
    check_as_if_nothing_had_been(tmp_path, short_stores)
