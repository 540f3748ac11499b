"""Commands, and small training runs, in separate processes."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flags import FAST_COMPILATION, for_a_process
from helpers import ROOT

TINY = [
    "--config=configs/tiny.py", "--config.steps=24", "--config.log_every=1", "--config.eval_every=24",
    "--config.checkpoint_every=10", "--config.batch_size=8", "--config.sequence_length=64",
    "--config.model.num_steps=2", "--config.model.time_embed_dim=4", "--config.model.vocab_multiple=8",
    "--config.model.dropout=0.1",
]  # fmt: skip
# Gloo writes to the output's descriptor in pieces, from several threads at once. Python alone keeps the real one.
WITHOUT_GLOO = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
sys.argv[0], sys.orig_argv = "-m", ["diffeqformer"]  # as Python does
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
runpy.run_module("diffeqformer." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start_command(module: str, processes: int, devices: int, options: list[list]) -> list[subprocess.Popen]:
    """The processes of a command on this machine, one for each list of options, with some devices each.

    They wait for one another until there are as many as `processes`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    many = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}", "--process_id={}"]
    many = many if processes > 1 else []
    return [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_GLOO, module, *map(str, given), *(each.format(number) for each in many)],
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": for_a_process(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, given in enumerate(options)
    ]


def start(processes: int, devices: int, workdirs: list, stores, *options, last=()) -> list[subprocess.Popen]:
    """The processes of one training run on this machine, one for each folder, with the given number of devices each.

    `options` apply to all processes, and `last` only to the last one.
    """
    shared = [*TINY, f"--config.data.dir={stores}", *options]
    given = [[*shared, f"--workdir={workdir}"] for workdir in workdirs]
    given[-1] += last
    return start_command("main", processes, devices, given)


def finish(running: list[subprocess.Popen], status: int = 0) -> list[tuple[str, str]]:
    """The output of each process on both streams. All must exit with `status`."""
    said = [process.communicate(timeout=300) for process in running]
    for process, (output, errors) in zip(running, said):
        assert process.returncode == status, (output, errors)
    return said


def curves(workdir) -> dict[str, dict[int, float]]:
    """The curves that TensorBoard shows: every scalar's values by step."""
    events = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert all(len({event.step for event in series}) == len(series) for series in scalars.values())
    return {tag: {event.step: event.value for event in series} for tag, series in scalars.items() if series}


@functools.cache
def forking() -> subprocess.Popen:
    """The process that runs commands. It exits when its standard input closes, that is, together with this process."""
    environment = {**os.environ, "XLA_FLAGS": FAST_COMPILATION, "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "forking.py"],
        cwd=ROOT,
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # no threads before a fork
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def command(
    module: str, *arguments, environment: dict | None = None, input: str = "", folder: os.PathLike = ROOT
) -> subprocess.CompletedProcess:
    """Run a command, or a module of tests/, in a fork of a process with the imports done.

    `environment` is added to this process's, and `folder` is where it runs.
    """
    process = forking()
    with tempfile.TemporaryDirectory() as temporary:
        files = [pathlib.Path(temporary) / name for name in ("stdin", "stdout", "stderr")]
        for file, text in zip(files, (input, "", "")):
            file.write_text(text, encoding="utf-8")
        request = {
            "module": module,
            "arguments": [
                os.fsdecode(argument) if isinstance(argument, bytes) else str(argument) for argument in arguments
            ],
            "environment": {**os.environ, "XLA_FLAGS": FAST_COMPILATION, **(environment or {})},
            "files": [str(file) for file in files],
            "folder": str(folder),
        }
        print(json.dumps(request), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        said = [file.read_bytes().decode() for file in files[1:]]
    return subprocess.CompletedProcess(request["arguments"], status, *said)
