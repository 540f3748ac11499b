"""How long a dumped program should take on a kind of chip, by what its instructions are for.

The compiler states the cycles that it expects of each instruction, but not for collectives and Pallas kernels:

- A kernel that states the bytes that it moves takes these at the memory's rate.
- Splash attention reaches `ATTENTION` of the chip's peak on the products that its kernels compute for causal attention,
  with heads filled up to 128 entries. Its instructions take that long, within a tenth, for GPT-large on v5e and
  Llama-1B on v5p. In fp32 they take about `IN_FLOAT32` times as long, by those for GPT-small on v5e.
- A collective takes its bytes at the rate of one link, as if its devices stood in a line. Work between its start and
  its end hides it. Between slices, every device sends its part to another slice at the rate of the network, one part
  after another.

An instruction that fuses several operations belongs to the last of them. What runs only on a condition counts as
nothing: the loss's sums by the largest logit, which a run hardly ever needs.
"""

import collections
import math
import re

from diffeqformer.planning.chips import Tpu
from diffeqformer.planning.hlo import Module, name_of, sizes_of

ATTENTION = 0.45
IN_FLOAT32 = 4
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # of a splash kernel, by its name
ACCOUNTED = ("attention", "collectives")  # the causes of which the compiler says nothing
CAUSES = {  # by the innermost function of ours, or by its file
    "dropout": ("layers.py:dropout", "layers.py:fold_in", "layers.py:Context.at_step", "step.py:dropout_keys"),
    "generator": (
        "generated.py", "plain.py", "projection.py", "low_rank.py", "generator.py:project", "generator.py:gradients",
    ),
    "loss": ("cross_entropy.py",),
    "update": ("step.py", "optimizer.py", "generator.py:update"),
}  # fmt: skip
COLLECTIVE = r" (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start|-done)?\("


def seconds_by_cause(module: Module, chip: Tpu, slice_size: int, body: str = "ENTRY") -> dict[str, float]:
    """The seconds of one round of a computation, by cause."""
    found: dict[str, float] = collections.defaultdict(float)
    arrivals: dict[str, float] = {}  # when collectives end that have begun, by the names of what began them
    receipts: dict[str, str] = {}  # what instructions receive from other slices
    network = 0.0  # when the last transfer to another slice ends
    for line in module.bodies[body]:
        now = sum(found.values(), 0.0)
        rendezvous = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', line)
        if loop := module.loop(line):
            for cause, seconds in seconds_by_cause(module, chip, slice_size, loop[0]).items():
                found[cause] += loop[1] * seconds
        elif rendezvous and " send(" in line:
            arrivals[rendezvous[1]] = network = max(now, network) + exchange_seconds(line, chip)
        elif rendezvous:
            receipts[name_of(line)] = rendezvous[1]
        elif received := re.search(r" recv-done\((%[\w.-]+)\)", line):
            found["collectives"] += max(0.0, arrivals[receipts[received[1]]] - now)
        elif moved := collective(module, line):
            phase, instruction = moved
            if phase == "done":
                found["collectives"] += max(0.0, arrivals[started(line)] - now)
            elif phase == "start":
                arrivals[name_of(line)] = now + transfer_seconds(instruction, chip, slice_size)
            else:
                found["collectives"] += transfer_seconds(instruction, chip, slice_size)
        elif products := re.search(r"%splash_mha_(fwd|dq|dkv)", line.partition("=")[0]):
            found["attention"] += attention_flops(line, PRODUCTS[products[1]]) / (ATTENTION * chip.peak)
        elif "-done(" not in line:
            found[cause_of(module, line)] += expected_seconds(line, chip)
    return {cause: seconds for cause, seconds in found.items() if seconds}


def cause_of(module: Module, line: str) -> str:
    """What an instruction is for."""
    source = module.source(line)
    for name, sources in CAUSES.items():
        if source in sources or source.partition(":")[0] in sources:
            return name
    products = any(" convolution(" in inner for inner in (line, *module.inside(line)))
    direction = "backward" if "transpose(" in line else "forward"
    return f"depth {direction}, {'products' if products else 'rest'}"


def expected_seconds(line: str, chip: Tpu) -> float:
    """The seconds of an instruction by its cycles, or by the bytes that it moves; 0 if nothing is said of it."""
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
        return int(cycles[1]) / chip.clock
    moved = re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"', line)
    return int(moved[1]) / chip.memory_rate if moved else 0.0


def attention_flops(line: str, products: int) -> int:
    """The FLOPs of a splash kernel over causal pairs of positions, with heads of multiples of 128 entries.

    In fp32 it is the number that bf16 could do in the same time.
    """
    query = re.search(r"\b(bf16|f32)\[([\d,]+)\]", line.partition("operand_layout_constraints")[2])
    products *= IN_FLOAT32 if query[1] == "f32" else 1
    *copies, rows, columns = map(int, query[2].split(","))  # a batch of one has no axis of its own
    width, length = sorted((rows, columns))
    return products * math.prod(copies) * length**2 * -(-width // 128) * 128


def collective(module: Module, line: str) -> tuple[str, str] | None:
    """Whether an instruction starts a collective, is done with one, or runs a whole one, and the collective itself."""
    if found := re.search(COLLECTIVE, line):
        return (found[2] or "-whole")[1:], line
    called = re.search(r"calls=(%[\w.-]+)", line)
    if not called or called[1].startswith("%async_collective_fusion"):  # work that is done meanwhile
        return None
    inside = module.inside(line)
    for inner in inside:
        if re.search(COLLECTIVE, inner):
            told = re.search(r'custom_call_target="AsyncCollective(Start|Done)"', "\n".join(inside))
            if called[1].startswith("%all-reduce-scatter"):  # keeps a part, and so moves no more than a gather
                inner = inner.replace(" all-reduce(", " all-gather(")
            return told[1].lower() if told else "whole", inner
    return None


def started(line: str) -> str:
    """The name of the instruction that began the collective that this one is done with."""
    operand = re.search(r"-done\((%[\w.-]+-start[\w.-]*)\)", line)
    return operand[1] if operand else name_of(line).replace("-done", "-start")


def transfer_seconds(line: str, chip: Tpu, slice_size: int) -> float:
    """The seconds of the transfers of a collective in a slice."""
    kind, phase = re.search(COLLECTIVE, line).groups()
    result = line.partition(" = ")[2].partition(f" {kind}{phase or ''}(")[0]
    payload = (max if phase else sum)(sizes_of(result))
    if kind == "collective-permute":
        return payload / chip.link_rate
    devices = group_size(line, slice_size)
    payload *= {"reduce-scatter": devices, "all-reduce": 2}.get(kind, 1)
    return payload * (1 - 1 / devices) / chip.link_rate


def group_size(line: str, slice_size: int) -> int:
    """How many devices take part in a collective together: {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}.

    A part of an axis has its size last: {'b':(1)2}.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(counted[1])
    if of_mesh := re.search(r"replica_groups=mesh\[([^]]*)\][^{]* \{([^}]*)\}", line):
        sizes = dict(re.findall(r"(\w+)'?=(\d+)", of_mesh[1]))
        axes = re.findall(r"(\w+)'?(?::\(\d+\)(\d+))?(?:,|$)", of_mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if " reduce-scatter" in line or re.search(r"replica_groups=(?!\{\})", line):
        raise ValueError(f"the devices of this collective can't be read: {line.strip()}")
    return slice_size


def exchange_seconds(line: str, chip: Tpu) -> float:
    """The seconds in which a device sends its part of an all-reduce over several slices, and gets the others'."""
    [listed] = re.findall(r'_xla_megascale_target="\{([\d:,]+)\}', line)
    ends = [list(map(int, part.split(":"))) for part in listed.split(",")]  # such as 1:4 or 1,2
    slices = sum(part[-1] - part[0] + 1 for part in ends)
    return 2 * (1 - 1 / slices) * max(sizes_of(line.partition(" send(")[0])) / chip.network_rate
