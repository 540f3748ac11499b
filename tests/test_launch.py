"""The launch scripts, with the fake clients of fake_cloud.py."""

import os
import pathlib
import subprocess
import sys

import pytest

from fake_cloud import NEW, TPU, until, verbs_of
from helpers import ROOT


def test_the_scripts_pass_shellcheck():
    scripts = sorted(file for folder in ("launch", "benchmarks") for file in (ROOT / folder).glob("*.sh"))
    subprocess.run([pathlib.Path(sys.executable).with_name("shellcheck"), *scripts], check=True)


@pytest.mark.parametrize(
    "states, doors, verbs",
    [
        (["NONE", "PROVISIONING", *["ACTIVE"] * 2], [255], ["describe", *NEW[:2], *["describe", "ssh"] * 2]),
        (["PROVISIONING", "PROVISIONING", "ACTIVE"], [], ["describe"] * 3 + ["ssh"]),  # interrupted before
        (["DELETING", "DELETING", "NONE", "ACTIVE"], [], ["describe"] * 3 + NEW[:3]),
        (["NONE", "ACTIVE", "FAILED"], [255], ["describe", *NEW[:3], "describe"]),
        (["FAILED"], [], ["describe"]),
    ],
)
def test_a_slice_is_asked_for_once_and_waited_for_until_it_lets_us_in(cloud, states, doors, verbs):
    done, calls = cloud(TPU, "create", ZONE="z", SPOT="0", states=states, doors=doors)
    assert verbs_of(calls) == verbs and not any("--spot" in call for call in calls)
    assert done.returncode == ("FAILED" in states) == ("the slice is FAILED" in done.stderr)


def test_a_wait_outlasts_a_network_that_fails_but_not_for_ever(cloud):
    nine = ["LOGIN"] * 9
    done, _ = cloud(TPU, "create", ZONE="z", states=["NONE", *nine, "PROVISIONING", *nine, "ACTIVE"])
    assert done.returncode == 0 and done.stdout.count("ERROR: (gcloud) your login has expired") == 18
    done, calls = cloud(TPU, "create", ZONE="z", states=["NONE", *nine, "LOGIN", "ACTIVE"])
    assert done.returncode == 1 and "unknown in 10 checks in a row; gcloud says: WARNING" in done.stderr
    assert "your login has expired" in done.stderr and verbs_of(calls)[-1] == "describe"


@pytest.mark.parametrize("command", ["create", "delete"])
def test_nothing_is_done_to_a_slice_of_unknown_state(cloud, command):
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z")
    done, calls = cloud(TPU, command, ZONE="z", states=["LOGIN", "ACTIVE"])
    assert done.returncode == 1 and len(calls) == 1 and done.stderr.count("\n") == 1
    assert "nothing was done; gcloud says: WARNING" in done.stderr and "your login has expired" in done.stderr


def test_all_hosts_are_set_up(cloud):
    done, calls = cloud(TPU, "setup", ZONE="z", NFS="10.0.0.2:/share")
    assert done.returncode == 0 and " scp .launch/slice/source.tar.gz " in calls[0]
    assert calls[0].endswith("--worker=all --zone=z")
    assert "10.0.0.2:/share /mnt/runs nfs" in "\n".join(calls) and "-e '.[tpu,gcs]'" in "\n".join(calls)
    again = "\n".join(cloud(TPU, "setup", ZONE="z", EXTRAS="eval")[1])
    assert "10.0.0.2:/share /mnt/runs nfs" in again and "-e '.[tpu,gcs,eval]'" in again
    assert not any("mount" in call for call in cloud(TPU, "setup", ZONE="z", NFS="")[1])


def test_a_new_slice_is_like_the_old_one_and_has_its_commit(cloud):
    """Also from another shell, after other commits."""
    asked = {"ZONE": "z", "TYPE": "v5p-8", "RUNTIME": "v2 alpha", "SPOT": "1", "PROJECT": "p", "NFS": "10.0.0.2:/share"}
    cloud(TPU, "create", states=["NONE", "ACTIVE"], **asked)
    cloud(TPU, "setup")
    cloud(TPU, "run", "--config=configs/large.py")
    commit = ROOT / ".launch" / f"test-{os.getpid()}" / "commit"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert commit.read_text() == head
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit.write_text(tree.stdout)  # as if there were another commit now
    done, calls = cloud(TPU, "resume", states=["SUSPENDED", "SUSPENDED", "NONE", "ACTIVE"])
    assert done.returncode == 0, done.stderr
    [create] = [call for call in calls if " create " in call]
    asked = "create slice --node-id=slice --accelerator-type=v5p-8 --runtime-version=v2 alpha"
    assert f"{asked} --spot --zone=z --project=p" in create
    assert any("10.0.0.2:/share" in call for call in calls)
    assert f"git archive --output=.launch/test-{os.getpid()}/source.tar.gz {tree.stdout.strip()}" in done.stderr
    done, _ = cloud(TPU, "--dry-run", "resume", TYPE="v5p-16", SPOT="")
    assert "=v5p-16 --runtime-version=v2\\ alpha --zone=z" in done.stderr
    commit.write_text("0" * 40)
    done, calls = cloud(TPU, "resume", states=["SUSPENDED"])
    assert done.returncode == 1 and f"the commit {'0' * 40}, which the hosts had, isn't in this" in done.stderr
    assert verbs_of(calls) == ["describe"]  # and nothing is deleted or asked for
    done, calls = cloud(TPU, "resume", states=["ACTIVE"])  # a slice that is there needs no commit
    assert done.returncode == 0 and verbs_of(calls) == ["describe", "ssh"]
    cloud(TPU, "create", states=["NONE", "ACTIVE"], ZONE="y")
    assert not commit.exists()
    assert "--accelerator-type=v5litepod-64" in cloud(TPU, "--dry-run", "resume")[0].stderr


def test_hosts_run_what_was_asked_once(cloud, host):
    options = ["--config=configs/large.py", "--config.sample.prompt=a b'c\n$d"]
    done, calls = cloud(TPU, "run", *options, ZONE="z", HOST_FOLDER=str(host.parent))
    assert done.returncode == 0 and " --worker=all --command=" in calls[0], done.stderr
    until((host / "said").exists)
    once = "|".join(["-m", "diffeqformer.main", *options, ""])
    assert (host / "said").read_text() == once
    done, _ = cloud(TPU, "run", *options, ZONE="z", HOST_FOLDER=str(host.parent))  # as if one host of many had failed
    assert done.returncode == 0 and "this run is already in progress" in done.stdout
    done, _ = cloud(TPU, "run", "--config=configs/tiny.py", ZONE="z", HOST_FOLDER=str(host.parent))
    pid = (host / "run.pid").read_text().strip()
    assert done.returncode == 1 and f"another run is in progress, as process {pid}" in done.stderr
    done, _ = cloud(TPU, "stop", ZONE="z", HOST_FOLDER=str(host.parent))
    assert done.returncode == 0 and (host / "saved").exists(), "stop waits until the run has saved itself"
    assert "was told to stop and is saving a checkpoint" in done.stdout and "has ended" in done.stdout
    assert (host / "said").read_text() == once
    cloud(TPU, "setup", ZONE="z")
    done, _ = cloud(TPU, "resume", ZONE="z", states=["ACTIVE"], HOST_FOLDER=str(host.parent))
    assert done.returncode == 0, done.stderr
    until(lambda: (host / "said").read_text() == once * 2)  # not the options of the refused run


def test_a_run_starts_on_hosts_of_which_nothing_is_wrong(cloud, host):
    run = {"ZONE": "z", "HOST_FOLDER": str(host.parent), "JAX_PLATFORMS": ""}
    done, _ = cloud(TPU, "run", "--config=tiny", **run, ILL="1")
    assert done.returncode == 1 and not (host / "run.options").exists()
    assert (host / "examined").read_text() == "tpu,cpu -m|diffeqformer.doctor|--undefok=verify|--config=tiny|"
    (host / "examined").unlink()
    done, _ = cloud(TPU, "run", "--config=tiny", **run, ILL="1", DOCTOR="0")
    assert done.returncode == 0 and not (host / "examined").exists()
    until((host / "said").exists)


def test_a_start_that_fails_is_repeated_without_another_examination(cloud):
    for start, times in (("run.pid", 2), ("nothing", 1), ("nothing", 2)):  # the last is another run
        done, calls = cloud(TPU, "run", "--config=tiny", ZONE="z", BROKEN=start)
        assert done.returncode == (start != "nothing") and verbs_of(calls) == ["ssh"] * times


def test_a_number_that_another_process_has_got_is_no_run(cloud, host):
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (host / "run.pid").write_text(str(other.pid))
        done, _ = cloud(TPU, "stop", ZONE="z", HOST_FOLDER=str(host.parent))
        assert done.returncode == 0 and done.stdout.endswith("no run is in progress\n") and other.poll() is None
        done, _ = cloud(TPU, "run", "--config=configs/large.py", ZONE="z", HOST_FOLDER=str(host.parent))
        assert done.returncode == 0 and other.poll() is None
        until((host / "said").exists)
        other.kill()


@pytest.mark.parametrize("command, states", [("create", ["NONE", "ACTIVE"]), ("delete", ["ACTIVE"])])
def test_another_slice_is_not_set_up_until_a_setup_succeeds(cloud, command, states):
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z")
    cloud(TPU, "setup", ZONE="z")
    cloud(TPU, command, ZONE="z", states=states)
    done, calls = cloud(TPU, "resume", ZONE="z", states=["ACTIVE"] * 3, BROKEN="scp")
    assert done.returncode == 1 and verbs_of(calls)[-1] == "scp"
    slice_there = {"ZONE": "z", "states": ["ACTIVE"] * 3}
    for _ in range(2):  # if something is wrong with a new slice, no attempt starts the run
        done, calls = cloud(TPU, "resume", **slice_there, BROKEN="diffeqformer.doctor")
        assert done.returncode == 1 and verbs_of(calls)[-2:] == ["ssh", "ssh"]
    done, calls = cloud(TPU, "resume", **slice_there)
    assert done.returncode == 0 and verbs_of(calls)[-4:] == ["scp", "ssh", "ssh", "ssh"]


def test_a_dry_run_calls_and_writes_nothing(cloud):
    for command in ("create", "setup", "run --config=configs/large.py", "watch", "stop", "resume", "delete"):
        done, calls = cloud(TPU, "--dry-run", *command.split(), ZONE="z")
        assert done.returncode == 0 and calls == [] and done.stderr.startswith("+ g"), done.stderr
        assert "tpu.googleapis.com" in done.stdout and all(line.startswith("# ") for line in done.stdout.splitlines())
    assert not (ROOT / ".launch" / f"test-{os.getpid()}").exists()
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z")
    done, calls = cloud(TPU, "--dry-run", "resume", ZONE="z")
    assert done.returncode == 0 and calls == [] and "configs/large.py" in done.stderr
    lines = [line.removeprefix("+ ") for line in done.stderr.splitlines()]
    assert verbs_of(lines) == ["delete", "create", "ssh", "scp", "ssh", "ssh", "ssh"]


@pytest.mark.parametrize(
    "arguments, settings, sentence",
    [
        (["create"], {}, "ZONE: name the zone"),
        (["create"], {"ZONE": "z", "TYPE": "v9-8"}, "RUNTIME: name the runtime of a v9-8"),
        (["create"], {"ZONE": "z", "SPOT": "yes"}, "SPOT: must be 1 or 0, but it is yes"),
        (["create"], {"ZONE": "z", "HOME": "/nowhere"}, "ssh: gcloud's key is missing; make it with 'ssh-keygen -t"),
        (["create"], {"ZONE": "z", "AGENT": "3072 SHA256:other"}, "ssh: the agent doesn't have gcloud's key"),
        (["resume"], {"ZONE": "z", "PASSPHRASE": "1"}, "ssh: gcloud's key has a passphrase, and no agent runs; use"),
        (["run"], {"ZONE": "z"}, "run: give the options of diffeqformer.main"),
        (["resume"], {"ZONE": "z"}, "resume: no run was started from this checkout"),
    ],
)
def test_what_is_missing_is_one_sentence(cloud, arguments, settings, sentence):
    done, calls = cloud(TPU, *arguments, **settings)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1 and calls == []


@pytest.mark.parametrize("status, more", [(0, []), (143, ["scontrol requeue 7"]), (1, [])])
def test_a_job_that_was_told_to_stop_is_queued_again(cloud, status, more):
    slurm = {"JAX_PLATFORMS": "", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "5"}
    done, calls = cloud("launch/slurm.sh", "--config=configs/large.py", STATUS=str(status), **slurm)
    step, options = "srun --cpus-per-task=5 --kill-on-bad-exit=0 .venv/bin/python -m diffeqformer", "configs/large.py"
    doctor, program = f"{step}.doctor --undefok=verify --config={options}", f"{step}.main --config={options}"
    assert calls == [doctor, *[program] * (status == 0), *more] and done.returncode == status


def test_other_commands_run_on_all_hosts_unless_a_run_is_in_progress(cloud, host):
    (host / "end").touch()
    command = ["do", "evaluate", "--workdir=/mnt/a b", "--num_steps=2,3"]
    done, calls = cloud(TPU, *command, ZONE="z", HOST_FOLDER=str(host.parent))
    assert done.returncode == 0, done.stderr
    assert (host / "said").read_text() == "-m|diffeqformer.evaluate|--workdir=/mnt/a b|--num_steps=2,3|"
    assert any(" --worker=all " in call for call in calls)
    (host / "end").unlink()
    cloud(TPU, "run", "--config=configs/large.py", ZONE="z", HOST_FOLDER=str(host.parent))
    done, _ = cloud(TPU, *command, ZONE="z", HOST_FOLDER=str(host.parent))
    assert done.returncode == 1 and "a run is in progress, as process" in done.stderr


def test_several_slices_are_one_request_and_each_is_reached(cloud):
    done, calls = cloud(TPU, "create", ZONE="z", SLICES="2", states=["NONE", "ACTIVE"])
    assert done.returncode == 0, done.stderr
    assert " create slice --node-count=2 --node-prefix=slice --accelerator-type=v5litepod-64 " in calls[1]
    assert verbs_of(calls) == ["describe", "create", "describe", "ssh", "ssh"]
    assert {call.split()[5] for call in calls if " ssh " in call} == {"slice-0", "slice-1"}
    done, calls = cloud(TPU, "setup")  # the number is remembered
    assert done.returncode == 0 and sorted(verbs_of(calls)) == ["scp", "scp", "ssh", "ssh"]
    for number in range(2):  # one that fails is enough
        file = f"slice-{number}:diffeqformer.tar.gz"
        assert any(f" {file} " in call for call in calls)
        done, failed = cloud(TPU, "setup", BROKEN=file.replace("slice", f"test-{os.getpid()}"))
        assert done.returncode == 1 and sorted(verbs_of(failed)) == ["scp", "scp"]
    assert " ssh slice-0 --worker=0 " in cloud(TPU, "watch")[1][0]


def test_slices_that_do_not_know_of_each_other_do_not_train(cloud, host, tmp_path):
    (host / "end").touch()
    metadata = tmp_path / "tpu-env"
    for line in ("MEGASCALE_NUM_SLICES: '3'", "WORKER_ID: '0'"):
        metadata.write_text(f"ZONE: 'z'\n{line}\n")
        done, _ = cloud(TPU, "run", "--config=tiny", ZONE="z", SLICES="2", HOST_FOLDER=str(host.parent))
        assert done.returncode == 1 and "has no MEGASCALE_NUM_SLICES: '2'" in done.stderr
    metadata.write_text("ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '0'\n")
    done, _ = cloud(TPU, "do", "evaluate", ZONE="z", SLICES="2", HOST_FOLDER=str(host.parent))
    assert done.returncode == 0, done.stderr
