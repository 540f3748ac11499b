"""A process that has already imported what the commands need, and runs each command in a fork of itself.

So a command under test is a separate process, with its own environment, output and exit status, but doesn't spend
seconds on imports. With the argument `tensorflow` it has imported that, too. Nothing here may start threads before a
fork: JAX and TensorFlow start theirs when first used.

Reads a request as a line of JSON from standard input, and answers with a line: the command's exit status.
"""

import importlib
import json
import os
import runpy
import signal
import sys

COMMANDS = ("analyze", "downstream", "evaluate", "generate", "inspect", "main", "materialize", "ode", "prepare")


def become(request: dict) -> None:
    """Run a command in this process, then exit."""
    signal.alarm(300)  # of seconds, after which it is killed
    for number, path in enumerate(request["files"]):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    name = f"diffeqformer.{request['module']}"
    sys.modules.pop(name)  # runs as __main__ instead
    sys.argv = [name, *request["arguments"]]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    if sys.argv[1:] == ["tensorflow"]:
        from diffeqformer.data.quiet import import_tensorflow

        import_tensorflow()
        importlib.import_module("diffeqformer.inference.perplexity")
    for name in COMMANDS:
        importlib.import_module(f"diffeqformer.{name}")
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.buffer.raw.readline():
        child = os.fork()
        if not child:
            return become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
