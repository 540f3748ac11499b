"""A run killed at any moment goes on from its newest complete checkpoint, bit for bit.

`make test-kill` does it for ten minutes; the suite holds two kills, each in the middle of a save.
"""

import pathlib
import random
import re
import signal
import time

import pytest

from runs import finish, losses, start

KILLING = ["--config.checkpoint_every=3", "--config.steps=30", "--config.eval_every=30"]


def newest(workdir: pathlib.Path) -> int:
    """The newest checkpoint that has its final name, 0 for none."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def kill_one(workdir, stores, when) -> int:
    """Start, or go on; kill at a moment that `when(process)` waits for; the step from which it went on."""
    before = newest(workdir)
    [running] = start(1, 1, [workdir], stores, *KILLING)
    when(running)
    running.send_signal(signal.SIGKILL)
    output, errors = running.communicate()
    assert running.returncode in (-signal.SIGKILL, 0) and errors == "", errors
    resumed = re.search(r"from its checkpoint at step (\d+)", output)
    if resumed or before == 0:
        assert before == 0 or int(resumed[1]) == before
    assert newest(workdir) >= before
    return before


def check_as_if_nothing_had_been(tmp_path, stores) -> None:
    """The killed run's curves are those of one that was left alone."""
    finish(start(1, 1, [tmp_path / "killed"], stores, *KILLING))
    finish(start(1, 1, [tmp_path / "alone"], stores, *KILLING))
    assert losses(tmp_path / "killed") == losses(tmp_path / "alone")


def test_a_kill_in_the_middle_of_a_save(tmp_path, short_stores):
    def saving(running):
        while not list((tmp_path / "killed" / "checkpoints").glob("*tmp*")):
            assert running.poll() is None

    kills = 0
    while kills < 2:
        kill_one(tmp_path / "killed", short_stores, saving)
        kills += bool(list((tmp_path / "killed" / "checkpoints").glob("*tmp*")))  # or the save was faster
    check_as_if_nothing_had_been(tmp_path, short_stores)


@pytest.mark.kill
def test_kills_at_random_moments_for_ten_minutes(tmp_path, short_stores, capsys):
    deadline, kills, at = time.monotonic() + 600, 0, random.Random(0)
    while time.monotonic() < deadline:
        if newest(tmp_path / "killed") == 30:
            check_as_if_nothing_had_been(tmp_path, short_stores)
            for folder in ("killed", "alone"):
                (tmp_path / folder).rename(tmp_path / f"{folder}-{kills}")
        kill_one(tmp_path / "killed", short_stores, lambda _: time.sleep(at.uniform(1, 14)))
        kills += 1
        with capsys.disabled():
            print(f"kill {kills}: the newest checkpoint is step {newest(tmp_path / 'killed')}", flush=True)
    check_as_if_nothing_had_been(tmp_path, short_stores)
