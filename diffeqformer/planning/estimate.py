"""A run's plan: whether it fits, what takes its memory and its time, and how long it takes."""

import math
from typing import NamedTuple

from ml_collections import ConfigDict

from diffeqformer.planning.chips import Tpu
from diffeqformer.planning.programs import Planned, size_of
from diffeqformer.planning.times import ACCOUNTED, seconds_by_cause
from diffeqformer.training.step import Program
from diffeqformer.training.utilisation import utilisation


class Range(NamedTuple):
    """What the compiler's cycles alone give, and what they give together with attention and collectives."""

    cycles_alone: float
    with_account: float


def memory_of(programs: list[Planned], program: Program, chip: Tpu) -> dict:
    """The bytes of a device that a run needs: by program, and by cause in its largest train step."""
    largest = max((planned for planned in programs if not planned.optional), key=lambda planned: planned.needed)
    found = {
        "capacity": chip.memory,
        "to_spare": chip.memory - largest.needed,
        "largest_program": largest.name,
        "by_program": {planned.name: planned.bytes() for planned in programs},
    }
    step = next((planned for planned in programs if planned.num_steps), None)
    if step and step.compiled:
        state = program.state_shapes
        causes = {"parameters": size_of(state["params"]), "moments": size_of(state["optimizer"])}
        causes |= dict(sorted(step.compiled.by_cause.items(), key=lambda item: -item[1]))
        found["of_train_step_by_cause"] = causes | {"gaps": step.needed - sum(causes.values())}
    return found


def milliseconds_of(planned: Planned, chip: Tpu, slice_size: int) -> dict:
    """The milliseconds of a program by cause, and their sums."""
    causes = seconds_by_cause(planned.compiled.module, chip, slice_size)
    known = sum(seconds for cause, seconds in causes.items() if cause not in ACCOUNTED)
    return {
        "by_cause": {cause: 1e3 * causes[cause] for cause in sorted(causes, key=causes.get, reverse=True)},
        **Range(1e3 * known, 1e3 * sum(causes.values()))._asdict(),
    }


def speed_of(config: ConfigDict, program: Program, milliseconds: dict[int, dict], price: float | None) -> dict:
    """Rates and durations of training, each with its `Range`, without validation, saves and compilation.

    The utilisation is None for a compute type whose peak isn't known.

    Args:
        milliseconds: those of the train step at each of its depths (`milliseconds_of`).
        price: of a device for an hour; None if it isn't known.
    """
    devices, found = list(program.mesh.devices.flat), {}
    for bound in Range._fields:
        shares = {depth: share / sum(program.depths.values()) for depth, share in program.depths.items()}
        seconds = sum(share * milliseconds[depth][bound] / 1e3 for depth, share in shares.items())
        used = sum(
            share * milliseconds[depth][bound] / 1e3 / seconds
            * utilisation(config, milliseconds[depth][bound] / 1e3, devices, depth)
            for depth, share in shares.items()
        )  # fmt: skip
        hours = config.steps * seconds / 3600
        found[bound] = {
            "tokens_per_second": config.batch_size * config.sequence_length / seconds,
            "utilisation": None if math.isnan(used) else used,
            "hours": hours,
        }
        if price is not None:
            found[bound]["cost"] = hours * len(devices) * price
    return found


def plan_of(config: ConfigDict, program: Program, programs: list[Planned], chip: Tpu, slices: int, price=None) -> dict:
    """The plan of a run from its compiled programs, as it is written to a file."""
    steps = {planned.num_steps: planned for planned in programs if planned.num_steps}
    found = {
        "config": config.name,
        "devices": program.mesh.size,
        "kind": program.mesh.devices.flat[0].device_kind,
        "mesh": dict(program.mesh.shape),
        "attention": program.attention,
        "fits": all(planned.fits(chip) for planned in programs if not planned.optional),
        "too_large_for": [planned.name for planned in programs if planned.optional and not planned.fits(chip)],
        "memory": memory_of(programs, program, chip),
    }
    if steps and all(planned.compiled for planned in steps.values()):
        slice_size = program.mesh.size // slices
        times = {depth: milliseconds_of(planned, chip, slice_size) for depth, planned in steps.items()}
        found["milliseconds"] = {steps[depth].name: time for depth, time in times.items()}
        found["training"] = speed_of(config, program, times, price)
    return found
