"""The commands: `python -m diffeqformer` lists them, and `python -m diffeqformer NAME ...` runs one.

Once installed, `diffeqformer` is the same.
"""

import ast
import pathlib
import runpy
import sys

from diffeqformer.errors import did_you_mean, printable, say_and_end

COMMANDS = (
    "main", "plan", "doctor", "prepare", "generate", "evaluate", "downstream", "harness", "materialize", "import",
    "export", "push", "leave_out", "depth", "analyze", "ode", "inspect", "compare",
)  # fmt: skip


def module_of(command: str) -> str:
    """The name of a command's module: `import` is a word of Python's own, and `depth` a package."""
    return {"import": "import_model", "depth": "depth_report"}.get(command, command)


def summary(command: str) -> str:
    """What a command does: the first line of its docstring, without the example. Nothing is imported."""
    source = pathlib.Path(__file__).with_name(f"{module_of(command)}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0].partition("`")[0].rstrip(" :.")


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [name, *arguments]
        runpy.run_module(f"diffeqformer.{module_of(name)}", run_name="__main__", alter_sys=True)
    elif name in ("--help", "-h", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"{command:{width}}  {summary(command)}" for command in COMMANDS]
        how = "Run one with `python -m diffeqformer.NAME` or `diffeqformer NAME`; --help shows its options."
        say_and_end("\n".join([*lines, "", how]))
    else:
        sys.exit(f"diffeqformer: there is no command {printable(name)}{did_you_mean(name, COMMANDS)}")


if __name__ == "__main__":
    main()
