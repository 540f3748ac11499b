"""Which of some small faults do the tests notice?

    python tests/mutations.py --count=40                 # draws the faults and shows them
    python tests/mutations.py --count=40 --run           # runs the tests against each, in a copy: some hours

A fault is one operator, comparison or number of the package, replaced by another. They are drawn with a fixed seed from
the lines as they are now, so a later version of the code has other ones. Compare the share that is noticed.
"""

import argparse
import ast
import contextlib
import io
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "and": "or", "or": "and", "True": "False", "False": "True",
}  # fmt: skip


class Fault(NamedTuple):
    """A part of a line of a file, and what takes its place."""

    path: str
    line: int
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"

    def text(self) -> str:
        """That of the file with it."""
        lines = (ROOT / self.path).read_text().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new + line[self.start + len(self.old) :]
        return "".join(lines)

    def is_python(self) -> bool:
        """Whether that is a program, as f(*all) is, but f(/all) isn't."""
        with contextlib.suppress(SyntaxError):
            return bool(ast.parse(self.text()))
        return False


def faults_of(path: pathlib.Path) -> list[Fault]:
    """All faults that a file can have, and some that aren't Python."""
    name, found = str(path.relative_to(ROOT)), []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        old, rest = token.string, token.line[token.end[1] :]
        new = f"({old} + 1)" if token.type == tokenize.NUMBER else OTHER.get(old)
        if new and not (old == "*" and rest.startswith(",")):  # after which arguments have names
            found.append(Fault(name, *token.start, old, new))
    return found


def drawn(count: int, seed: int) -> list[Fault]:
    faults = [fault for path in sorted((ROOT / "diffeqformer").rglob("*.py")) for fault in faults_of(path)]
    random.Random(seed).shuffle(faults)
    return list(itertools.islice(filter(Fault.is_python, faults), count))


def noticed(fault: Fault) -> str:
    """The test that fails first; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", "runs", "token_stores", "__pycache__"))
        (copy / fault.path).write_text(fault.text())
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider", "tests"]
        done = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True)
    lines = done.stdout.decode(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"status {done.returncode}" if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    seen = 0
    for number, fault in enumerate(drawn(options.count, options.seed), start=1):
        how = ""
        if options.run:
            how = noticed(fault)
            seen += bool(how)
            how = f"  {how or 'NOT NOTICED'}  ({seen} of {number})"
        print(f"{fault}{how}", flush=True)


if __name__ == "__main__":
    main()
