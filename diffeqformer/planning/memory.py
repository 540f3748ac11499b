"""What takes the memory of a dumped program at the moment of its largest use, by cause.

The compiler dumps where in memory each value lies (`*buffer-assignment.txt`) and during which instructions it is needed
(`*live-range.txt`).
"""

import collections
import re

from diffeqformer.planning.hlo import Module, name_of
from diffeqformer.planning.times import COLLECTIVE, cause_of

SMALL = 2**16  # bytes of values that don't matter
TEMPORARY = r"^allocation \d+: size (\d+)(?:, page \d+)?, preallocated-temp:"  # in the main memory, which has no color
CAUSES = {"generator": "weights and their gradient", "loss": "logits and the loss", "update": "update"}


def temporaries_by_cause(module: Module, buffers: str, ranges: str) -> dict[str, int]:
    """The bytes of values by cause, at the moment when most memory is in use. Arguments aren't counted."""
    places, spans = values(buffers), live_spans(ranges)
    lines = {name_of(line): (line, body) for body, inside in module.bodies.items() for line in inside}
    moments = {spans[name][0] for name in places if name in spans}
    used = (in_use(places, spans, moment) for moment in moments)
    largest = max(used, key=lambda parts: sum(size for _, size in parts), default={})
    found: dict[str, int] = collections.defaultdict(int)
    for place, names in largest.items():
        causes = [memory_cause(module, *lines.get("%" + name.partition("{")[0], ("", ""))) for name in names]
        known = [cause for cause in causes if cause != "others"]
        found[known[0] if known else "others"] += place[1]
    return found


def size_of_temporaries(buffers: str) -> int:
    """The bytes of the part of the main memory that all temporary values share.

    Raises:
        ValueError: if another compiler writes them in another way.
    """
    found = re.findall(TEMPORARY, buffers, re.M)
    if not found and re.search("^(?!.* color ).*preallocated-temp", buffers, re.M):
        raise ValueError("the compiler's allocations can't be read; plan with the libtpu of constraints.txt")
    return sum(map(int, found))


def memory_cause(module: Module, line: str, body: str) -> str:
    """What a value of a computation is for; what the compiler allocates by itself is for what uses it first."""
    if "splash_mha" in line or module.source(line).startswith("attention.py"):
        return "attention"
    for inner in (line, *module.inside(line)):
        if re.search(COLLECTIVE, inner):
            return moved_cause(module.sources(inner))
    if not module.source(line):
        uses = module.uses(name_of(line), body) if line else iter(())
        return next((memory_cause(module, use, body) for use in uses), "others")
    return CAUSES.get(cause_of(module, line), "states and activations")


def moved_cause(sources: tuple[str, ...]) -> str:
    """What the result of a collective is for, by the functions of ours that it comes from, the innermost first."""
    if any(source.startswith("solver.py:") for source in sources):
        return "gathered weights"
    if "loss.py:ShardedLoss.device_sum" in sources:
        return "gathered embeddings"
    if "loss.py:ShardedLoss.mean_and_gradient" in sources:
        return "gathered weights" if sources[0] == "sharding.py:gather" else "summed gradients"
    return "collectives"


def values(buffers: str) -> dict[str, tuple[int, int]]:
    """The offset and the size of every temporary value in the main memory, by its name."""
    heap = re.search(TEMPORARY + r"\n((?: value: .*\n)*)", buffers, re.M)
    found = re.findall(r"value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", heap[2] if heap else "")
    return {name: (int(offset), int(size)) for name, size, offset in found if int(size) >= SMALL}


def live_spans(ranges: str) -> dict[str, tuple[int, int]]:
    """The first and the last instruction that needs a value, by the value's name."""
    found = re.findall(r"^    (\S+?)(?:\{\})?:(\d+)-(\d+)$", ranges, re.M)
    return {name: (int(first), int(last)) for name, first, last in found}


def in_use(places: dict, spans: dict, moment: int) -> dict[tuple[int, int], list[str]]:
    """The parts of memory in use at a moment, each with the names of the values that lie there."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, place in places.items():
        first, last = spans.get(name, (1, 0))
        if first <= moment <= last:
            found.setdefault(place, []).append(name)
    return found
