"""The program that the TPU compiler dumps: its instructions, in the order in which they run, and where they are from.

With `xla_dump_to` the compiler writes the program after all its work to `*.after_codegen.txt`. Each instruction states
the cycles that the compiler expects of it, and the stack of calls that it comes from.
"""

import math
import pathlib
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


class Module:
    """A dumped program (a module, as XLA calls it).

    bodies: the instructions of every computation by its name, a line each; where the program begins is called ENTRY
    callers: for every stack frame the functions of ours in it, as file:function, the innermost first
    rounds: how often a loop runs on average whose number of rounds is computed; 0: there is none

    Args:
        text: what the compiler wrote.
    """

    def __init__(self, text: str, rounds: float = 0):
        self.bodies, self.callers, self.rounds = computations(text), origins(text), rounds

    def sources(self, line: str) -> tuple[str, ...]:
        """The functions of ours that an instruction comes from, as file:function, the innermost first."""
        frame = re.search(r"stack_frame_id=(\d+)", line)
        return self.callers.get(int(frame[1]), ()) if frame else ()

    def source(self, line: str) -> str:
        """The innermost of them; empty if there is none."""
        return next(iter(self.sources(line)), "")

    def inside(self, line: str) -> list[str]:
        """The instructions of the computation that an instruction calls."""
        called = re.search(r"calls=(%[\w.-]+)", line)
        return self.bodies.get(called[1], []) if called else []

    def uses(self, name: str, body: str) -> Iterator[str]:
        """The instructions from functions of ours that use a value of a computation, through copies and loops."""
        for line in self.bodies[body]:
            kind, operands = operation(line)
            if name not in operands:
                continue
            if self.sources(line):
                yield line
            elif kind == "tuple":
                for loop, part in self.parts(name_of(line), operands.index(name), body):
                    yield from self.uses(part, loop)
            else:
                yield from self.uses(name_of(line), body)

    def parts(self, name: str, index: int, body: str) -> list[tuple[str, str]]:
        """The bodies of the loops that begin with a tuple, and the name of one of its parts there."""
        loops = [self.loop(line)[0] for line in self.bodies[body] if operation(line) == ("while", [name])]
        read = rf"get-tuple-element\(.*\), index={index}\b"
        return [(loop, name_of(line)) for loop in loops for line in self.bodies[loop] if re.search(read, line)]

    def loop(self, line: str) -> tuple[str, int | float] | None:
        """The body of a loop and how often it runs, if the instruction is one."""
        loop = re.search(r" while\(.*condition=(%[\w.-]+), body=(%[\w.-]+)", line)
        if not loop:
            return None
        counts = re.findall(r" constant\((\d+)\)", "\n".join(self.bodies[loop[1]]))
        if len(counts) > 1 or not (counts or self.rounds):
            raise ValueError(f"how often this loop runs can't be read from its condition: {line.strip()}")
        return loop[2], int(counts[0]) if counts else self.rounds

    def instructions(self, body: str = "ENTRY", times: int | float = 1) -> Iterator[tuple[str, int | float]]:
        """All instructions that run one after the other, and how often; those of a loop come in its place."""
        for line in self.bodies[body]:
            if loop := self.loop(line):
                yield from self.instructions(loop[0], times * loop[1])
            else:
                yield line, times


def name_of(line: str) -> str:
    """The name of an instruction's result."""
    return re.match(r"\s*(?:ROOT )?(%[\w.-]+) =", line)[1]


def operation(line: str) -> tuple[str, list[str]]:
    """The operation of an instruction, and the names of its operands; empty if it has none."""
    found = re.search(r" ([a-z][a-z-]*)\((%[^)]*)\)", line)
    return (found[1], re.findall(r"%[\w.-]+", found[2])) if found else ("", [])


def bytes_of(types: str) -> int:
    """The bytes of all arrays in the text of a type, without padding."""
    found = re.findall(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]", types)
    return sum(BYTES[kind] * math.prod(int(size) for size in shape.split(",") if size) for kind, shape in found)


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


def origins(text: str) -> dict[int, tuple[str, ...]]:
    """For every stack frame the functions of ours in it, as file:function, the innermost first."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations, found = _table(text, "FileLocations"), dict[int, tuple[str, ...]]()
    for number, row in _table(text, "StackFrames").items():
        location, parent = map(int, re.findall(r"=(\d+)", row))
        file, function = map(int, re.findall(r"=(\d+)", locations[location])[:2])
        path, name = files[file].strip('"'), functions[function].strip('"').partition(".<locals>")[0]
        ours = "/diffeqformer/" in path.rpartition("/site-packages")[2]
        found[number] = ((f"{pathlib.PurePath(path).name}:{name}",) if ours else ()) + found.get(parent - 1, ())
    return found


def _table(text: str, name: str) -> dict[int, str]:
    """A table in front of the computations: rows by number."""
    rows = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return {int(number): row for number, row in re.findall(r"^(\d+) (.*)$", rows[1], re.M)} if rows else {}
