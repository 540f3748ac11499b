"""A process that has already imported what the commands need, and runs each command in a fork of itself.

So a command under test is a separate process, with its own environment, output and exit status, but doesn't spend
seconds on imports. What `prepare` starts are forks as well. Nothing here may start threads before a fork: JAX starts
its own when first used.

Reads a request as a line of JSON from standard input, and answers with a line: the command's exit status.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import types

from diffeqformer.__main__ import COMMANDS, module_of
from flags import lower_in_one_context

MODULES = [module_of(name) for name in COMMANDS if name != "harness"]


def become(request: dict) -> None:
    """Run a command in this process, then exit."""
    signal.alarm(300)  # of seconds, after which it is killed
    for number, path in enumerate(request["files"]):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.modules["jax"].config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64") == "1")  # it was read at import
    if encoding := os.environ.get("PYTHONIOENCODING"):
        sys.stdout.reconfigure(encoding=encoding, errors="strict")
    os.chdir(request["folder"])
    name = request["module"]
    if name == "prepare":
        preparation = sys.modules["diffeqformer.data.preparation"]
        preparation.subprocess = types.SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE)
    run(f"diffeqformer.{name}" if name in MODULES else name, *request["arguments"])


def run(name: str, *arguments: str) -> None:
    sys.modules.pop(name, None)  # runs as __main__ instead
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def fork(command: list[str], pass_fds: list[int], **options) -> subprocess.Popen:
    """`subprocess.Popen` of `python -m <module>`, but the module runs in a fork of this process."""

    def become_the_module():
        for file in os.listdir("/proc/self/fd"):
            if int(file) not in (0, 1, 2, *pass_fds):
                with contextlib.suppress(OSError):
                    os.close(int(file))
        run(command[-1])  # what it raises, SystemExit too, ends this process with a status that isn't 0
        os._exit(0)  # without executing the command

    return subprocess.Popen(command, pass_fds=pass_fds, preexec_fn=become_the_module, **options)


def main() -> None:
    importlib.import_module("diffeqformer.data.worker")
    for name in MODULES:
        importlib.import_module(f"diffeqformer.{name}")
    importlib.import_module("matplotlib.figure")  # which the commands import late
    lower_in_one_context()
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.buffer.raw.readline():
        child = os.fork()
        if not child:
            return become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
