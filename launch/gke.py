#!/usr/bin/env python3
"""Print a JobSet, for kubectl, that trains on TPU slices or GPU nodes of GKE. docs/cloud.md shows how.

    launch/gke.py --tpu=v6e:4x4 --slices=2 --image=IMAGE -- --config=large --workdir=gs://my-bucket/runs/large |
      kubectl apply -f -

What follows -- are options of diffeqformer.main. This script needs Python alone, and the cluster needs JobSet 0.8.
"""

import argparse
import json
import math
import re
import sys

TPUS = {  # GKE's name, and the dimensions of a slice
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
CHIPS_OF_A_HOST = 4  # of a slice of several hosts
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # the slices of two dimensions
GPUS = {"a100": "nvidia-a100-80gb", "h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb"}
WORKERS = "workers"  # pod P of slice S is named NAME-workers-S-P.NAME
PORT = 8482
A_WEEK = 7 * 24 * 3600  # seconds, the most that flex-start gives
TO_SAVE = 600  # seconds to save a checkpoint; a preemption gives fewer
TO_JOIN = 1800  # seconds; nodes come one after the other, and each has to fetch the image
RESTARTS = 10  # after failures other than notices to stop, such as a lost host
TOLD_TO_STOP = 143  # status of a run that SIGTERM has ended


def fail(sentence: str) -> None:
    """Say what is wrong, and end."""
    sys.exit(f"launch/gke.py: {sentence}")


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chips = parser.add_mutually_exclusive_group(required=True)
    chips.add_argument("--tpu", help="a slice, such as v6e:4x4, as --topology of diffeqformer.plan")
    chips.add_argument("--gpu", help="the GPUs of a node, such as h100:8")
    parser.add_argument("--slices", type=int, default=1, help="of that shape (1), joined by the data centre's network")
    parser.add_argument("--nodes", type=int, default=1, help="with those GPUs (1)")
    parser.add_argument("--image", required=True, help="built from launch/Dockerfile, in a registry")
    parser.add_argument("--name", default="diffeqformer", help="of the JobSet (diffeqformer)")
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument("--spot", action="store_true", help="on spot nodes, much cheaper but preemptible")
    capacity.add_argument("--flex_start", action="store_true", help="on flex-start nodes, for a week at most")
    parser.add_argument("--queue", help="Kueue's LocalQueue, in which the run waits for its capacity")
    parser.add_argument("--secret", help="a Secret whose entries are environment variables, such as WANDB_API_KEY")
    parser.add_argument("--no_doctor", action="store_true", help="train without examining devices and disks first")
    parser.add_argument("options", nargs="*", help="of diffeqformer.main, after --")
    given = parser.parse_args()
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", given.name):
        fail(f"--name: must be at most 40 small letters, digits and inner hyphens, but it is {given.name}")
    for option, number, other in (("slices", given.slices, given.gpu), ("nodes", given.nodes, given.tpu)):
        if number < 1 or (other and number != 1):
            fail(f"--{option}: must be 1 or more{f', and 1 with {other}' if other else ''}, but it is {number}")
    if not re.search(r"(^| )--?workdir[= ]gs://", " ".join(given.options)):
        fail("--workdir: put one on gs:// after --, such as --workdir=gs://my-bucket/runs/large; pods keep no files")
    return given


def hosts_of(tpu: str, slices: int) -> tuple[dict, dict, int]:
    """The node selector of a slice, what each of its pods takes, and how many pods there are."""
    kind, _, topology = tpu.partition(":")
    name, dimensions = TPUS.get(kind, ("", 0))
    if not name or not re.fullmatch("x".join(["[1-9][0-9]*"] * dimensions), topology):
        fail(f"--tpu: must be a slice of {', '.join(TPUS)}, such as v6e:4x4 or v5p:2x2x4, but it is {tpu}")
    if dimensions == 2 and topology not in FLAT:
        fail(f"--tpu: a slice of {kind} must be one of {', '.join(FLAT)}, but it is {topology}")
    chips = math.prod(int(size) for size in topology.split("x"))
    of_host = min(chips, CHIPS_OF_A_HOST)
    if dimensions == 3 and chips % CHIPS_OF_A_HOST:
        fail(f"--tpu: must be a multiple of {CHIPS_OF_A_HOST} chips, but {topology} are {chips}")
    hosts = chips // of_host
    if slices > 1 and hosts == 1:
        fail(f"--slices: GKE joins slices of several hosts only, and a {tpu} has one; choose a larger slice")
    where = {"cloud.google.com/gke-tpu-accelerator": name, "cloud.google.com/gke-tpu-topology": topology}
    return where, {"google.com/tpu": of_host}, hosts


def gpus_of(gpu: str) -> tuple[dict, dict]:
    """The node selector of GPU nodes, and what each pod takes."""
    kind, _, number = gpu.partition(":")
    if kind not in GPUS or number not in ("1", "2", "4", "8") or (kind == "h200" and number != "8"):
        fail(f"--gpu: must be 1, 2, 4 or 8 of a100 or h100, or 8 of h200, such as h100:8, but it is {gpu}")
    return {"cloud.google.com/gke-accelerator": GPUS[kind]}, {"nvidia.com/gpu": int(number)}


def pod(given: argparse.Namespace, where: dict, takes: dict, options: list[str]) -> dict:
    """The pod of one process, which has all chips of its node. `diffeqformer doctor` runs in it first."""
    tolerated = [*takes]  # nodes that keep other pods away
    if given.spot:
        where = {**where, "cloud.google.com/gke-spot": "true"}
        tolerated.append("cloud.google.com/gke-spot")
    if given.flex_start:
        where = {**where, "cloud.google.com/gke-flex-start": "true"}
        tolerated.append("cloud.google.com/gke-queued")
    options = [f"--join_timeout={TO_JOIN}", *options, *(option.replace("$", "$$") for option in given.options)]
    container = {
        "image": given.image,
        # without its accelerator, a run fails, and doesn't go on for days on the host
        "env": [{"name": "JAX_PLATFORMS", "value": "tpu,cpu" if given.tpu else "cuda,cpu"}],
        "envFrom": [{"secretRef": {"name": given.secret}}] if given.secret else [],
        "resources": {"requests": takes, "limits": takes},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    doctor = {"name": "doctor", "args": ["doctor", "--undefok=verify", *options], **container}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": TO_SAVE,
        "shareProcessNamespace": True,  # the first process of a container ignores a SIGTERM that it has no handler for
        "nodeSelector": where,
        "tolerations": [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tolerated],
        "initContainers": [] if given.no_doctor else [doctor],
        "containers": [{"name": "main", "args": ["main", *options], **container}],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],  # 64 MB are too little for NCCL
    }


def job(pods: int, template: dict) -> dict:
    """The job of a slice, or of all GPU nodes. It fails with the first of its pods.

    PodFailurePolicy is its reason if the pod was told to stop.
    """
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [TOLD_TO_STOP]}},
            ]
        },
        "template": {"spec": template},
    }


def job_set(given: argparse.Namespace) -> dict:
    """All jobs of a run. If one fails, all end, and then all start again, from the last checkpoint."""
    annotations, labels, options = {}, {}, []
    if given.tpu:  # GKE tells the pods of each other, and JAX reads that
        where, takes, pods = hosts_of(given.tpu, given.slices)
        annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "cloud.google.com/gke-nodepool"
    else:
        (where, takes), pods = gpus_of(given.gpu), given.nodes
        first = f"{given.name}-{WORKERS}-0-0.{given.name}:{PORT}"
        if pods > 1:  # Kubernetes puts the pod's number into the option
            options = [f"--coordinator={first}", f"--num_processes={pods}", "--process_id=$(JOB_COMPLETION_INDEX)"]
    if given.queue:
        labels["kueue.x-k8s.io/queue-name"] = given.queue
        annotations["provreq.kueue.x-k8s.io/maxRunDurationSeconds"] = str(A_WEEK)
    stopped = {
        "name": "toldToStop",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": given.name, "labels": labels, "annotations": annotations},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS, "restartStrategy": "BlockingRecreate", "rules": [stopped]},
            "replicatedJobs": [
                {
                    "name": WORKERS,
                    "replicas": given.slices,
                    "template": {"spec": job(pods, pod(given, where, takes, options))},
                }
            ],
        },
    }


if __name__ == "__main__":
    print(json.dumps(job_set(parse()), indent=2))  # JSON is YAML
