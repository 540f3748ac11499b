"""The launch scripts, against stand-ins for the cloud's and the scheduler's clients that record their calls."""

import os
import pathlib
import subprocess
import sys

import pytest

from helpers import ROOT

TPU = "launch/tpu.sh"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
if [[ "$*" == *" describe "* ]]; then
  line=$(head -n 1 "$STATES"); sed -i 1d "$STATES"; [[ $line != NONE ]] || exit 1; echo "$line"
elif [[ "$*" == *" ssh "*--command=true* ]]; then
  line=$(head -n 1 "$DOORS"); sed -i 1d "$DOORS"; exit "${line:-0}"
fi
exit "${STATUS:-0}"
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Runs a script beside the stand-ins, and gives what came of it and the calls that were made."""
    for name in ("gcloud", "srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    files = {name: tmp_path / name for name in ("CALLS", "STATES", "DOORS")}

    def run(script, *arguments, states=(), doors=(), **settings):
        for name, lines in (("CALLS", ()), ("STATES", states), ("DOORS", doors)):
            files[name].write_text("".join(f"{line}\n" for line in lines))
        environment = {**os.environ, **{name: str(path) for name, path in files.items()}, **settings}
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NAME": f"test-{os.getpid()}", "PAUSE": "0"}
        done = subprocess.run(
            [ROOT / script, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        return done, files["CALLS"].read_text().replace(environment["NAME"], "slice").splitlines()

    yield run
    subprocess.run(["rm", "-rf", ROOT / ".launch" / f"test-{os.getpid()}"], check=True)


def test_the_scripts_pass_shellcheck():
    subprocess.run(
        [pathlib.Path(sys.executable).with_name("shellcheck"), *sorted((ROOT / "launch").glob("*.sh"))], check=True
    )


def test_a_slice_is_waited_for_until_it_lets_us_in(cloud):
    done, calls = cloud(
        TPU, "create", ZONE="z", SPOT="1", PROJECT="p",
        states=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], doors=[255, 0],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = "gcloud compute tpus queued-resources create slice --node-id=slice --accelerator-type=v5litepod-64"
    assert calls[0] == f"{asked} --runtime-version=v2-alpha-tpuv5-lite --spot --zone=z --project=p"
    assert [call.split()[3:5] for call in calls[1:]] == [["queued-resources", "describe"]] * 3 + [["tpu-vm", "ssh"]] * 2
    assert "WAITING_FOR_RESOURCES" in done.stdout and "waiting for ssh" in done.stdout


def test_a_slice_that_fails_is_said(cloud):
    done, calls = cloud(TPU, "create", ZONE="z", states=["PROVISIONING", "FAILED"])
    assert done.returncode == 1 and "the slice is FAILED" in done.stderr and "ssh" not in calls[-1]


def test_all_hosts_are_set_up_and_run_what_was_asked(cloud):
    done, calls = cloud(TPU, "setup", ZONE="z", NFS="10.0.0.2:/share")
    assert done.returncode == 0 and " scp " in calls[0] and calls[0].endswith("--worker=all --zone=z")
    assert "mount 10.0.0.2:/share /mnt/runs" in "\n".join(calls)
    done, calls = cloud(TPU, "run", "--config=configs/large.py", "--config.sample.prompt=a b'c", ZONE="z")
    assert done.returncode == 0, done.stderr
    [call] = calls
    remote = call.split("--command=")[1].rsplit(" --zone", 1)[0]
    script = remote.replace("cd diffeqformer;", "").replace(".venv/bin/python", "printf '%s|'").replace("nohup ", "")
    said = subprocess.run(
        ["bash", "-c", script.replace(">>run.log", "").replace(">run.pid", ">/dev/null")],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "-m|diffeqformer.main|--config=configs/large.py|--config.sample.prompt=a b'c|"


def test_a_preempted_run_gets_a_new_slice_and_the_same_options(cloud):
    cloud(TPU, "run", "--config=configs/large.py", "--workdir=/mnt/runs/a b", ZONE="z")
    done, calls = cloud(TPU, "resume", ZONE="z", states=["SUSPENDED", "SUSPENDED", "ACTIVE"])
    assert done.returncode == 0, done.stderr
    verbs = [next(word for word in call.split() if word in VERBS) for call in calls if call.startswith("gcloud")]
    assert verbs == ["describe", "describe", "delete", "create", "describe", "ssh", "scp", "ssh", "ssh"]
    assert "--workdir=/mnt/runs/a\\ b" in calls[-1]
    done, calls = cloud(TPU, "resume", ZONE="z", states=["ACTIVE"])  # the slice is there: only the run is begun again
    assert done.returncode == 0 and len(calls) == 2 and " ssh " in calls[1]


VERBS = {"create", "describe", "delete", "ssh", "scp"}


def test_a_dry_run_calls_nothing(cloud):
    for command in (["create"], ["setup"], ["run", "--config=configs/large.py"], ["watch"], ["stop"], ["delete"]):
        done, calls = cloud(TPU, "--dry-run", *command, ZONE="z")
        assert done.returncode == 0 and calls == [] and done.stderr.startswith("+ g"), done.stderr


@pytest.mark.parametrize(
    "arguments, settings, sentence",
    [
        (["create"], {}, "ZONE: name the zone"),
        (["create", "now"], {"ZONE": "z"}, "create: takes no options, but got now"),
        (["run"], {"ZONE": "z"}, "run: give the options of diffeqformer.main"),
        (["resume"], {"ZONE": "z"}, "resume: no run was started from here"),
    ],
)
def test_what_is_missing_is_one_sentence(cloud, arguments, settings, sentence):
    done, calls = cloud(TPU, *arguments, **settings)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1 and calls == []


@pytest.mark.parametrize("status, more", [(0, []), (143, ["scontrol requeue 7"]), (1, [])])
def test_a_job_that_was_told_to_stop_is_queued_again(cloud, status, more):
    done, calls = cloud("launch/slurm.sh", "--config=configs/large.py", STATUS=str(status), SLURM_JOB_ID="7")
    assert calls[0] == "srun --kill-on-bad-exit=0 .venv/bin/python -m diffeqformer.main --config=configs/large.py"
    assert calls[1:] == more and done.returncode == status
