"""Cycles that the TPU compiler expects of a program, by the function of ours that they come from.

The compiler writes its estimate into each instruction of the program that it dumps. It gives none for collectives,
for splash attention and for other Pallas kernels; those count as zero here.
"""

import collections
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9}  # cycles in a second, by kind of chip
CAUSES = {  # by the innermost function of ours, or its file
    "dropout": ("layers.py:dropout", "layers.py:fold_in", "layers.py:Context.at_step", "step.py:dropout_keys"),
    "generated weights": ("generated.py", "low_rank.py"),
    "loss": ("cross_entropy.py",),
    "update": ("step.py", "optimizer.py"),
}


class Instruction(NamedTuple):
    """One instruction: its computation, whether it or what it calls has a matrix product, cycles, and origin."""

    computation: str
    matmul: bool
    cycles: int
    backward: bool
    origin: str  # file:function


def table(text: str, name: str) -> dict[int, str]:
    """One of the tables in front of the instructions, by number."""
    rows = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return {int(number): row for number, row in re.findall(r"^(\d+) (.*)$", rows[1], re.M)} if rows else {}


def origins(text: str) -> dict[int, str]:
    """For each stack frame the file and function of ours that is innermost in it."""
    files, functions = table(text, "FileNames"), table(text, "FunctionNames")
    places = {
        number: [int(value) for value in re.findall(r"=(\d+)", row)[:2]]
        for number, row in table(text, "FileLocations").items()
    }
    found: dict[int, str] = {}
    for number, row in table(text, "StackFrames").items():
        place, parent = (int(value) for value in re.findall(r"=(\d+)", row))
        file, function = (names[key].strip('"') for names, key in zip((files, functions), places[place]))
        ours = "/diffeqformer/" in file and "site-packages" not in file
        function = function.partition(".<locals>")[0]
        found[number] = f"{pathlib.Path(file).name}:{function}" if ours else found.get(parent - 1, "")
    return found


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation; the program itself is called ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.endswith("{"):
            lines = found.setdefault("ENTRY" if line.startswith("ENTRY") else line.split()[0], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def instructions(text: str) -> Iterator[tuple[Instruction, int]]:
    """Every instruction with the number of times that it runs."""
    bodies, frames = computations(text), origins(text)
    matmuls = {name for name, lines in bodies.items() if any(" convolution(" in line for line in lines)}
    waiting = [("ENTRY", 1)]
    while waiting:
        name, times = waiting.pop()
        for line in bodies[name]:
            if loop := re.search(r" while\(.*condition=(%[\w.-]+), body=(%[\w.-]+)", line):
                [count] = re.findall(r" constant\((\d+)\)", "\n".join(bodies[loop[1]]))
                waiting.append((loop[2], times * int(count)))
            elif (cycles := re.search(r'"estimated_cycles":"(\d+)"', line)) and "-done(" not in line:
                called = re.search(r"calls=(%[\w.-]+)", line)
                frame = re.search(r"stack_frame_id=(\d+)", line)
                yield (
                    Instruction(
                        name,
                        " convolution(" in line or bool(called and called[1] in matmuls),
                        int(cycles[1]),
                        "transpose(" in line,
                        frames.get(int(frame[1]), "") if frame else "",
                    ),
                    times,
                )


def cause(instruction: Instruction) -> str:
    """What an instruction is for."""
    file = instruction.origin.partition(":")[0]
    for name, places in CAUSES.items():
        if instruction.origin in places or file in places:
            return name
    direction = "backward" if instruction.backward else "forward"
    return f"matrix products, {direction}" if instruction.matmul else "everything else"


def by_cause(text: str) -> collections.Counter:
    """Cycles of a whole program by cause, from the text of its `*after_codegen.txt`."""
    found: collections.Counter = collections.Counter()
    for instruction, times in instructions(text):
        found[cause(instruction)] += instruction.cycles * times
    return found
