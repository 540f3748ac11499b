"""`launch/tpu.sh watch`, with the fake clients of fake_cloud.py."""

import os
import signal

import pytest

from fake_cloud import NEW, TPU, until, verbs_of


@pytest.fixture
def interrupted(cloud, host):
    """The folder of a host whose run a signal has ended. The next run ends at once."""
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z", HOST_FOLDER=str(host.parent))
    until((host / "said").exists)
    os.kill(int((host / "run.pid").read_text()), signal.SIGTERM)
    until((host / "run.status").exists)
    (host / "end").touch()
    return host


def test_a_watched_run_goes_on_after_a_preemption(cloud, interrupted):
    cloud(TPU, "setup", ZONE="z")
    states = ["SUSPENDING", "SUSPENDING", "SUSPENDED", "NONE", "ACTIVE"]
    done, calls = cloud(TPU, "watch", ZONE="z", states=states, HOST_FOLDER=str(interrupted.parent))
    assert done.returncode == 0, done.stderr
    assert verbs_of(calls) == ["ssh", *["describe"] * 3, "delete", "describe", *NEW, "ssh"]
    assert (interrupted / "said").read_text().count("--config=configs/large.py") == 2
    assert "the run was interrupted" in done.stdout and done.stdout.endswith(": the run is complete\n")


def test_a_watched_run_starts_again_on_a_slice_that_is_still_there(cloud, interrupted):
    cloud(TPU, "setup", ZONE="z")
    states = ["LOGIN"] * 2 + ["ACTIVE"] * 2
    done, calls = cloud(TPU, "watch", ZONE="z", states=states, HOST_FOLDER=str(interrupted.parent))
    assert done.returncode == 0 and verbs_of(calls) == ["ssh", *["describe"] * 3, "ssh", "ssh"], done.stderr


@pytest.mark.parametrize(
    "status, states, said",
    [
        ("1", ["ACTIVE"] * 11, "the run has failed, and the slice is still there"),
        ("134", ["ACTIVE", "NONE"], "the slice is NONE, so the run isn't resumed"),
        ("", ["DELETING"], "the slice is DELETING, so the run isn't resumed"),
        (None, [], "watch: use 'run' first"),
    ],
)
def test_a_watched_run_that_failed_or_was_given_back_is_not_resumed(cloud, interrupted, status, states, said):
    (interrupted / ("run.pid" if status is None else "run.status")).write_text(status or "")
    done, calls = cloud(TPU, "watch", ZONE="z", states=states, HOST_FOLDER=str(interrupted.parent))
    assert done.returncode == 1 and said in done.stderr and verbs_of(calls) == ["ssh", *["describe"] * len(states)]


def test_a_run_that_lost_a_host_is_resumed_once_its_slice_is_known_to_be_lost(cloud, interrupted):
    (interrupted / "run.status").write_text("1")
    states = [*["ACTIVE"] * 5, *["SUSPENDED"] * 3, "NONE", "ACTIVE"]
    done, calls = cloud(TPU, "watch", ZONE="z", states=states, HOST_FOLDER=str(interrupted.parent))
    assert done.returncode == 0 and verbs_of(calls).count("create") == 1, done.stderr


def test_a_run_that_was_stopped_is_watched_no_longer(cloud, host):
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z", HOST_FOLDER=str(host.parent))
    until((host / "said").exists)
    cloud(TPU, "stop", ZONE="z", HOST_FOLDER=str(host.parent))
    done, calls = cloud(TPU, "watch", ZONE="z", HOST_FOLDER=str(host.parent))
    assert done.returncode == 0 and verbs_of(calls) == ["ssh"] and done.stdout.endswith(": the run was stopped\n")
    _, calls = cloud(TPU, "watch", ZONE="z", WORKER="3")
    assert " --worker=3 " in calls[0] and "run.log" in "".join(calls)
