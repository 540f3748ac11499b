"""The program that the TPU compiler dumps: its instructions, in the order in which they run, and where they are from.

With `xla_dump_to` the compiler writes it to `*.after_codegen.txt`. Each instruction states the cycles that the compiler
expects of it, and the stack of calls that it comes from.
"""

import math
import pathlib
import re

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


class Module:
    """A dumped program (a module, as XLA calls it): its `computations` and `origins`.

    A loop whose number of rounds is computed runs `rounds` times on average; 0: there is no such loop.
    """

    def __init__(self, text: str, rounds: float = 0):
        self.bodies, self.sources, self.rounds = computations(text), origins(text), rounds

    def source(self, line: str) -> str:
        """The innermost function of ours that an instruction comes from; empty if there is none."""
        frame = re.search(r"stack_frame_id=(\d+)", line)
        return self.sources.get(int(frame[1]), "") if frame else ""

    def inside(self, line: str) -> list[str]:
        """The instructions of the computation that an instruction calls."""
        called = re.search(r"calls=(%[\w.-]+)", line)
        return self.bodies.get(called[1], []) if called else []

    def loop(self, line: str) -> tuple[str, int | float] | None:
        """The body of a loop and how often it runs, if the instruction is one."""
        loop = re.search(r" while\(.*condition=(%[\w.-]+), body=(%[\w.-]+)", line)
        if not loop:
            return None
        counts = re.findall(r" constant\((\d+)\)", "\n".join(self.bodies[loop[1]]))
        if len(counts) > 1 or not (counts or self.rounds):
            raise ValueError(f"how often this loop runs can't be read from its condition: {line.strip()}")
        return loop[2], int(counts[0]) if counts else self.rounds


def name_of(line: str) -> str:
    """The name of an instruction's result."""
    return re.match(r"\s*(?:ROOT )?(%[\w.-]+) =", line)[1]


def sizes_of(types: str) -> list[int]:
    """The bytes of each array in the text of a type, without padding."""
    found = re.findall(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]", types)
    return [BYTES[kind] * math.prod(int(size) for size in shape.split(",") if size) for kind, shape in found]


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
    """For every stack frame the innermost function of ours in it, as file:function; empty if there is none."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations, found = _table(text, "FileLocations"), dict[int, str]()
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
