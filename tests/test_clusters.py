"""What launch/gke.py prints fits Kubernetes' schemas and its pods go on together; the image's build steps work."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import kubernetes_validate
import pytest

from diffeqformer.errors import Stopped
from environments import LIGHT, make_environment, run
from helpers import ROOT
from runs import TINY, finish, start_command

RUN = ["--image=registry/image:1", "--name=large", "--", "--config=large", "--workdir=gs://bucket/runs/large"]


def printed(*options, status=0):
    """What the script prints, without any package."""
    command = [sys.executable, "-I", "-S", ROOT / "launch" / "gke.py", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr if status else json.loads(done.stdout)


@pytest.mark.parametrize(
    "options, slices, pods, takes, where",
    [
        ("--tpu=v5e:1x1 --no_doctor", 1, 1, {"google.com/tpu": 1}, ["tpu-v5-lite-podslice", "1x1"]),
        ("--tpu=v5p:2x2x4 --spot", 1, 4, {"google.com/tpu": 4}, ["tpu-v5p-slice", "2x2x4"]),
        ("--tpu=v6e:4x4 --slices=2 --flex_start --queue=dws", 2, 4, {"google.com/tpu": 4}, ["tpu-v6e-slice", "4x4"]),
        ("--tpu=tpu7x:2x2x1", 1, 1, {"google.com/tpu": 4}, ["tpu7x", "2x2x1"]),
        ("--gpu=h100:8 --nodes=2 --spot --secret=keys", 1, 2, {"nvidia.com/gpu": 8}, ["nvidia-h100-80gb"]),
    ],
)
def test_jobs_fit_the_schemas_and_the_hosts(options, slices, pods, takes, where):
    asked = printed(*options.split(), *RUN)
    assert (asked["apiVersion"], asked["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [replicated] = asked["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.33", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}] * ("keys" in options)
    assert replicated["replicas"] == slices and job["spec"]["completions"] == job["spec"]["parallelism"] == pods
    assert pod["containers"][0]["resources"]["limits"] == takes and pod["tolerations"][0]["key"] in takes
    assert [each["args"][0] for each in pod.get("initContainers", ())] == ["doctor"] * ("doctor" not in options)
    assert list(pod["nodeSelector"].values())[: len(where)] == where
    for option, key in (("--spot", "gke-spot"), ("--flex_start", "gke-flex-start")):
        assert (option in options) == (f"cloud.google.com/{key}" in pod["nodeSelector"])
    assert asked["metadata"]["labels"] == ({"kueue.x-k8s.io/queue-name": "dws"} if "--queue" in options else {})
    assert ("gke-nodepool" in json.dumps(asked["metadata"])) == ("--tpu" in options)  # a slice is a node pool


def test_a_notice_to_stop_restarts_a_run_without_end():
    asked = printed("--tpu=v6e:4x4", *RUN, "--config.sample.prompt=$(HOME) is $5")
    [rule] = asked["spec"]["failurePolicy"]["rules"]
    job = asked["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    disrupted, told = job["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert told["onExitCodes"] == {"operator": "In", "values": [Stopped("").status]}
    args = job["template"]["spec"]["containers"][0]["args"]
    assert args[0] == "main" and args[-1] == "--config.sample.prompt=$$(HOME) is $$5"  # Kubernetes halves the signs


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--tpu=v9:4x4", *RUN], "--tpu: must be a slice of v5e, v5p, v6e, tpu7x, such as v6e:4x4"),
        (["--tpu=v5p:1x1x3", *RUN], "--tpu: must be a multiple of 4 chips, but 1x1x3 are 3"),
        (["--tpu=v6e:2x2", "--slices=2", *RUN], "--slices: GKE joins slices of several hosts only"),
        (["--gpu=h100", *RUN], "--gpu: must be 1, 2, 4 or 8 of a100 or h100"),
        (["--tpu=v6e:4x4", *RUN[:-1]], "--workdir: put one on gs:// after --"),
    ],
)
def test_what_can_not_run_is_one_sentence(options, sentence):
    said = printed(*options, status=1)
    assert said.startswith(f"launch/gke.py: {sentence}") and said.count("\n") == 1


def start_pods(asked, workdir, of="containers"):
    """A container in all pods of GPU nodes, as processes of this machine. The names are those that JobSet gives."""
    name, [replicated] = asked["metadata"]["name"], asked["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    first = re.escape(f"{name}-{replicated['name']}-0-0.{name}") + r":\d+"
    pods = []
    for number in range(job["completions"]):
        module, *args = job["template"]["spec"][of][0]["args"]
        args = " ".join(args)
        args = re.sub(first, address, args).replace("$(JOB_COMPLETION_INDEX)", str(number))
        pods.append(args.replace("gs://bucket", str(workdir)).split())
    return start_command(module, 1, 1, pods)


@pytest.mark.slow
def test_pods_go_on_together_after_a_preemption_and_after_a_lost_host(tmp_path, short_stores):
    options = [*TINY, "--config.steps=60", f"--config.data.dir={short_stores}", "--workdir=gs://bucket/run"]
    asked = printed("--gpu=h100:1", "--nodes=2", "--image=image", "--", *options)
    [(output, _), _] = finish(start_pods(asked, tmp_path, "initContainers"))
    assert "versions of processes" in output and output.endswith("Nothing is wrong\n")
    for step, event, status in ((1, signal.SIGTERM, 143), (22, signal.SIGKILL, 1)):
        running = start_pods(asked, tmp_path)
        for line in running[0].stdout:
            if line.startswith(f"step {step}/"):
                running[1].send_signal(event)
                break
        errors = running[0].communicate(timeout=300)[1]
        assert running[0].returncode == status, errors
        assert ("saved at step" if status == 143 else "process 0 of 2 failed: ") in errors
        assert running[1].communicate(timeout=300) and running[1].returncode in (143, -signal.SIGKILL)
    [(output, _), _] = finish(start_pods(asked, tmp_path))
    assert re.search("from its checkpoint at step (10|20)\n", output) and "Finished." in output  # 20 may not be whole


@pytest.mark.slow
def test_the_build_steps_of_the_image_work_in_a_clean_folder(tmp_path):
    """With links to this environment's packages. TPUs' and NVIDIA's aren't here, so JAX's extra is one of none."""
    everything, *kept = (ROOT / ".dockerignore").read_text().split()
    assert everything == "*"
    context, folder = tmp_path / "context", tmp_path / "source"
    context.mkdir()
    folder.mkdir()
    for name in (name[1:] for name in kept if name.startswith("!")):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    python = make_environment(tmp_path / "venv", [*LIGHT, "gcsfs", "setuptools", "wheel"], None)
    lines = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    build = lines[: lines.index("")]
    assert {line.split()[0] for line in build} <= {"#", "FROM", "ARG", "WORKDIR", "COPY", "RUN"}
    variables = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "ACCELERATOR": "none"}
    variables |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # which means without isolation
    for line in build:
        instruction, _, rest = line.partition(" ")
        if instruction == "COPY":
            subprocess.run(f"cp -r {rest.rpartition(' ')[0]} {folder}", shell=True, check=True, cwd=context)
        elif instruction == "RUN":
            command = rest.replace("/venv", str(tmp_path / "venv"))
            subprocess.run(command, shell=True, check=True, cwd=folder, env=variables)
    assert run(python, tmp_path).stdout.startswith("main ")
    assert subprocess.run([python, "-c", "import tensorflow"], cwd="/", capture_output=True).returncode == 1
