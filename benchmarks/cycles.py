"""The cycles that the TPU compiler expects of a program, by what they are spent on.

The compiler writes its expectation into each instruction of the program that it dumps (`*.after_codegen.txt`). It has
none for collectives and Pallas kernels. A kernel that states the bytes that it moves counts as these at the memory's
rate. Splash attention doesn't: like collectives, it counts as nothing here. An instruction that fuses several
operations belongs to the last of them.
"""

import collections
import math
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9}  # cycles in a second, by kind of chip
BANDWIDTH = {"v5e": 820e9, "v5p": 2460e9}  # bytes of memory in a second
CAUSES = {  # by the innermost function of ours, or by its file
    "dropout": ("layers.py:dropout", "layers.py:fold_in", "layers.py:Context.at_step", "step.py:dropout_keys"),
    "generated weights": ("generated.py", "projection.py", "forward.py", "statistics.py", "low_rank.py"),
    "loss": ("cross_entropy.py",),
    "update": ("step.py", "optimizer.py", "update.py"),
}


class Instruction(NamedTuple):
    """An instruction: its origin (file:function), and whether it has a matrix product or is of the backward pass."""

    cycles: int
    origin: str
    matmul: bool
    backward: bool


def cause(instruction: Instruction) -> str:
    """What an instruction is for."""
    file = instruction.origin.partition(":")[0]
    for name, places in CAUSES.items():
        if instruction.origin in places or file in places:
            return name
    direction = "backward" if instruction.backward else "forward"
    return f"matrix products, {direction}" if instruction.matmul else "everything else"


def by_cause(text: str, chip: str) -> collections.Counter:
    """The cycles of a program that was dumped for a kind of chip, by cause."""
    found: collections.Counter = collections.Counter()
    for instruction, times in instructions(text, chip):
        found[cause(instruction)] += instruction.cycles * times
    return found


def instructions(text: str, chip: str) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a dumped program, and how often each runs."""
    bodies, frames = computations(text), origins(text)
    bytes_per_cycle = BANDWIDTH[chip] / CLOCK[chip] if chip in CLOCK else math.inf
    matmuls = {name for name, lines in bodies.items() if any(" convolution(" in line for line in lines)}
    waiting = [("ENTRY", 1)]
    while waiting:
        name, times = waiting.pop()
        for line in bodies[name]:
            if loop := re.search(r" while\(.*condition=(%[\w.-]+), body=(%[\w.-]+)", line):
                [count] = re.findall(r" constant\((\d+)\)", "\n".join(bodies[loop[1]]))  # of rounds
                waiting.append((loop[2], times * int(count)))
            elif (count := expected_cycles(line, bytes_per_cycle)) and "-done(" not in line:
                called, frame = re.search(r"calls=(%[\w.-]+)", line), re.search(r"stack_frame_id=(\d+)", line)
                origin = frames.get(int(frame[1]), "") if frame else ""
                matmul = " convolution(" in line or bool(called and called[1] in matmuls)
                yield Instruction(count, origin, matmul, "transpose(" in line), times


def expected_cycles(line: str, bytes_per_cycle: float) -> int:
    """The cycles of an instruction; 0 if nothing is said of it."""
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
        return int(cycles[1])
    moved = re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"', line)
    return round(int(moved[1]) / bytes_per_cycle) if moved else 0


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of every computation by its name, a line each. Where the program begins is called ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.endswith("{"):
            lines = found.setdefault("ENTRY" if line.startswith("ENTRY") else line.split()[0], [])
        elif line == "}":
            lines = []
        elif line.startswith(("  %", "  ROOT %")):
            lines.append(line)
        elif lines:  # attributes of Pallas kernels, and of copies of their results, take several lines
            lines[-1] += line
    return found


def origins(text: str) -> dict[int, str]:
    """For every stack frame the innermost function of ours in it, as file:function."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations, found = _table(text, "FileLocations"), {}
    for number, row in _table(text, "StackFrames").items():
        location, parent = map(int, re.findall(r"=(\d+)", row))
        file, function = map(int, re.findall(r"=(\d+)", locations[location])[:2])
        path, name = files[file].strip('"'), functions[function].strip('"').partition(".<locals>")[0]
        ours = "/diffeqformer/" in path.rpartition("/site-packages")[2]
        found[number] = f"{pathlib.PurePath(path).name}:{name}" if ours else found.get(parent - 1, "")
    return found


def _table(text: str, name: str) -> dict[int, str]:
    """A table in front of the computations: rows by number."""
    rows = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return {int(number): row for number, row in re.findall(r"^(\d+) (.*)$", rows[1], re.M)} if rows else {}
