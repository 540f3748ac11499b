"""Which of some small faults do the tests notice?

    python tests/mutations.py --count=40                 # draws the faults and shows them
    python tests/mutations.py --count=40 --run           # runs the tests against each, in a copy: some hours

A fault is one operator, comparison or number of the package, replaced by another. They are drawn with a fixed seed from
the lines as they are now, so a later version of the code has other ones. Compare the share that is noticed.
"""

import argparse
import ast
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "and": "or", "or": "and", "True": "False", "False": "True",
}  # fmt: skip
SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.And: "and", ast.Or: "or",
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

    def insert(self, root: pathlib.Path) -> None:
        """Put it into a copy of the repository."""
        file = root / self.path
        lines = file.read_text().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new + line[self.start + len(self.old) :]
        file.write_text("".join(lines))


def between(left: ast.expr, right: ast.expr, symbol: str, lines: list[str]) -> tuple[int, int] | None:
    """Where an operator stands that is on one line with the end of its left operand."""
    line, start = left.end_lineno, left.end_col_offset
    end = right.col_offset if right.lineno == line else len(lines[line - 1])
    found = lines[line - 1].find(symbol, start, end)
    return (line, found) if found >= 0 else None


def faults_of(path: pathlib.Path) -> list[Fault]:
    """All faults that a file can have."""
    text = path.read_text()
    lines, name, found = text.splitlines(), str(path.relative_to(ROOT)), []
    for node in ast.walk(ast.parse(text)):
        triples = []
        if isinstance(node, ast.BinOp):
            triples = [(node.left, node.op, node.right)]
        elif isinstance(node, ast.Compare):
            triples = list(zip([node.left, *node.comparators], node.ops, node.comparators))
        elif isinstance(node, ast.BoolOp):
            triples = [(left, node.op, right) for left, right in zip(node.values, node.values[1:])]
        for left, op, right in triples:
            symbol = SYMBOLS.get(type(op))
            if symbol and (place := between(left, right, symbol, lines)):
                found.append(Fault(name, *place, symbol, OTHER[symbol]))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            old = ast.get_source_segment(text, node)
            new = OTHER.get(old) or str(node.value + 1)
            found.append(Fault(name, node.lineno, node.col_offset, old, new))
    return [fault for fault in found if lines[fault.line - 1].isascii()]  # offsets count bytes


def drawn(count: int, seed: int) -> list[Fault]:
    """Some faults of the package."""
    faults = [fault for path in sorted((ROOT / "diffeqformer").rglob("*.py")) for fault in faults_of(path)]
    return random.Random(seed).sample(faults, count)


def noticed(fault: Fault) -> str:
    """The test that fails first; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", "runs", "token_stores", "__pycache__"))
        fault.insert(copy)
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
