"""A run's plan: whether it fits, what takes its memory and its time, how long it takes, and what it costs."""

import math
from typing import NamedTuple

from ml_collections import ConfigDict

from diffeqformer.planning.chips import Gpu, Tpu
from diffeqformer.planning.hlo import Module
from diffeqformer.planning.times import ACCOUNTED, seconds_by_cause
from diffeqformer.training.step import Program
from diffeqformer.training.utilisation import utilisation

BOUNDS = "cycles_alone", "with_account"  # by the compiler's cycles, and by these with attention and collectives


class Planned(NamedTuple):
    """A program of a run. Bytes are those of one device."""

    name: str
    needed: int
    parts: dict[str, int]  # what takes them; empty if the compiler refused the program
    module: Module | None = None  # what the compiler wrote
    shardings: object = None  # of its results, as JAX has them
    num_steps: int = 0  # steps of depth of a train step


def plan_of(
    program: Program, programs: list[Planned], chip: Tpu | Gpu, slices: int = 1, price: float | None = None
) -> dict:
    """The plan of a run as it is written to a file, from its programs, train steps from the deepest on.

    `price` is that of a device for an hour.

    Without rates and times if there is no train step, or none that was compiled.
    """
    config, largest = program.config, max(programs, key=lambda planned: planned.needed)
    found = {
        "config": config.name,
        "devices": program.mesh.size,
        "kind": chip.name,
        "mesh": dict(program.mesh.shape),
        "microbatches": config.microbatches,
        "attention": program.attention,
        "fits": largest.needed <= chip.memory and all(planned.parts for planned in programs),
        "memory": {
            "capacity": chip.memory,
            "to_spare": chip.memory - largest.needed,
            "largest_program": largest.name,
            "by_program": {planned.name: {**planned.parts, "needed": planned.needed} for planned in programs},
        },
    }
    steps = [planned for planned in programs if planned.num_steps]
    if steps and all(planned.module for planned in steps):
        times = [milliseconds_of(planned, chip, program.mesh.size // slices) for planned in steps]
        found["milliseconds"] = {planned.name: time for planned, time in zip(steps, times)}
        found["training"] = {}
        for bound in BOUNDS:
            by_depth = {planned.num_steps: time[bound] for planned, time in zip(steps, times)}
            found["training"][bound] = speed_of(config, program, by_depth, price)
    return found


def milliseconds_of(planned: Planned, chip: Tpu, slice_size: int) -> dict:
    """The milliseconds of a program by cause, and their sums."""
    seconds = seconds_by_cause(planned.module, chip, slice_size)
    causes = {cause: 1e3 * seconds[cause] for cause in sorted(seconds, key=seconds.get, reverse=True)}
    known = sum(time for cause, time in causes.items() if cause not in ACCOUNTED)
    return {"by_cause": causes, "cycles_alone": known, "with_account": sum(causes.values())}


def speed_of(config: ConfigDict, program: Program, milliseconds: dict[int, float], price: float | None) -> dict:
    """Rate, duration and cost of training, without validation, saves and compilation, from the milliseconds of a train
    step at each of its depths. The utilisation is None for a compute type whose peak isn't known.
    """
    devices, steps = list(program.mesh.devices.flat), sum(program.depths.values())
    shares = {depth: share / steps for depth, share in program.depths.items()}
    seconds = sum(share * milliseconds[depth] / 1e3 for depth, share in shares.items())
    used = sum(share * utilisation(config, seconds, devices, depth) for depth, share in shares.items())
    hours = config.steps * seconds / 3600
    found = {
        "tokens_per_second": config.batch_size * config.sequence_length / seconds,
        "utilisation": None if math.isnan(used) else used,
        "hours": hours,
    }
    return found if price is None else found | {"cost": hours * len(devices) * price}


def summary(config: ConfigDict, plan: dict) -> str:
    """A plan as lines of text."""
    memory = plan["memory"]
    spare, largest = memory["to_spare"], memory["by_program"][memory["largest_program"]]
    parts = ", ".join(f"{part} {gib(size)}" for part, size in largest.items() if part != "needed")
    lines = [
        f"It {'fits' if plan['fits'] else 'does not fit'}: {memory['largest_program']} needs "
        f"{gib(memory['capacity'] - spare)} of {gib(memory['capacity'])} GiB on each device, "
        f"{gib(abs(spare))} {'to spare' if spare >= 0 else 'too much'}.",
    ]
    if parts:  # the compiler names none for what it refuses
        lines.append(f"Its memory, GiB: {parts}")
    for name, times in plan.get("milliseconds", {}).items():
        causes = ", ".join(f"{cause} {time:.1f}" for cause, time in times["by_cause"].items())
        lines.append(
            f"{name}, ms: {causes}\n"
            f"  {times['cycles_alone']:.0f} ms by the compiler's cycles, {times['with_account']:.0f} with attention "
            "and with collectives that nothing hides"
        )
    if "training" in plan:
        least, most = (plan["training"][bound] for bound in BOUNDS)
        cost = f", for {most['cost']:,.0f} (at least {least['cost']:,.0f})" if "cost" in most else ""
        of_peak = ""
        if most["utilisation"] is not None:
            of_peak = f"{most['utilisation']:.1%} to {least['utilisation']:.1%} of the chips' peak, "
        lines.append(
            f"Training: {most['tokens_per_second']:,.0f} to {least['tokens_per_second']:,.0f} tokens/s, "
            f"{of_peak}{least['hours']:,.1f} to {most['hours']:,.1f} hours to step {config.steps:,}{cost}; validation, "
            "saves and compilation come on top"
        )
    return "\n".join(lines)


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.2f}"
