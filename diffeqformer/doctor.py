"""Examine devices, hosts, packages and disks before a run: `python -m diffeqformer.doctor [--config=tiny]`.

It takes the options of `main`, and prints a row for each check: what was found, what is needed and, if something is
slow or wrong, what to do. The exit status is 1 if something is wrong. Nothing that it writes stays.
"""

import importlib.metadata
import math
import platform
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict
from packaging.specifiers import SpecifierSet

from diffeqformer.checkpoints.folder import folder_of, work_folder
from diffeqformer.checkpoints.one_by_one import size_on_disk
from diffeqformer.config import check_overrides, check_used, explain, given_fields
from diffeqformer.console import command_line
from diffeqformer.data.store import token_type
from diffeqformer.errors import UserErrorEverywhere, counted
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import gigabytes, size_of
from diffeqformer.parallel.mesh import make_mesh, mesh_shape, number_of_slices
from diffeqformer.planning import measure
from diffeqformer.planning.chips import TPUS
from diffeqformer.planning.measure import PACKAGES, everywhere, requirements, version_of
from diffeqformer.rules import decay_start
from diffeqformer.training.run import complete
from diffeqformer.training.step import Program
from diffeqformer.training.utilisation import peak_of, utilisation

MATMUL = 0.6  # of the peak, which large products reach on a sound chip
ALL_REDUCE = 0.1  # of one link's rate
CLOCKS = 1.0  # seconds between the clocks of two hosts


class Row(NamedTuple):
    """The result of a check.

    verdict: ok, slow, wrong, or unknown where nothing is known to compare with.
    remedy: what to do if it is slow or wrong.
    """

    what: str
    found: str
    needed: str
    verdict: str
    remedy: str = ""

    def __str__(self) -> str:
        row = f"{self.verdict:8} {self.what:26} {self.found:44} {self.needed}".rstrip()
        return row + f"\n{'':8} {self.remedy}" * (self.verdict in ("slow", "wrong"))


class Needs(NamedTuple):
    """What a config needs.

    mesh: of all devices.
    on_device: bytes of parameters and moments on each device.
    checkpoint, checkpoints: bytes of a checkpoint, and of all that are there at once.
    read_rate, write_rate: bytes in a second for batches, and for a checkpoint to be written before the next, if the
        devices work at their peak; None if that isn't known.
    """

    mesh: Mesh
    on_device: int
    checkpoint: int
    checkpoints: int
    read_rate: float | None
    write_rate: float | None


def needs_of(config: ConfigDict) -> Needs:
    """What a complete config needs, by shapes.

    Raises:
        UserError: if its mesh doesn't suit the devices.
    """
    program = Program(config, make_mesh(mesh_shape(config.mesh, jax.device_count())))
    state = program.state_shapes
    frozen = bytes_of(program.frozen(state["params"]))  # saved once
    checkpoint = bytes_of(state) - frozen
    number = config.checkpoints_kept + 2 + (decay_start(config) is not None)  # with the best and one in the making
    seconds = utilisation(config, 1.0, list(program.mesh.devices.flat), min(program.depths))
    batch = config.batch_size * config.sequence_length * token_type(config.model.vocab_size).itemsize
    rates = batch / seconds, checkpoint / seconds / config.checkpoint_every
    rates = (None, None) if math.isnan(seconds) else rates
    return Needs(program.mesh, size_of(state), checkpoint, number * checkpoint + frozen, *rates)


def bytes_of(shapes: PyTree) -> int:
    """The bytes of a tree of shapes, over all devices."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def failed(what: str, found: Sequence[dict], remedy: str) -> list[Row]:
    """A row that says on which processes a measurement failed and why; none if it didn't."""
    errors = [(number, each["error"]) for number, each in enumerate(found) if "error" in each]
    said = "; ".join(f"process {number}: {error}" if len(found) > 1 else error for number, error in errors)
    return [Row(what, said, "", "wrong", remedy)] if errors else []


def judged(rate: float, needed: int | float | None) -> str:
    """The verdict on a rate."""
    return "unknown" if needed is None else "ok" if rate >= needed else "slow"


def amount(count: int | float) -> str:
    """A number of bytes as text, also a small one."""
    return gigabytes(round(count)) if count >= 1e9 else f"{count / 1e6:.{0 if count >= 1e7 else 2}f} MB"


def packages() -> list[Row]:
    """Whether the installed versions are those that this package, JAX and the rest of `PACKAGES` require."""
    main = ", ".join(f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "flax"))
    if version_of("diffeqformer") is None:
        return [Row("packages", main, "diffeqformer isn't installed: not known", "unknown")]
    python, needed = platform.python_version(), importlib.metadata.metadata("diffeqformer")["Requires-Python"]
    fits = SpecifierSet(needed).contains(python, prereleases=True)
    rows = [Row("Python", python, needed, "ok" if fits else "wrong", "make the environment with such a Python")]
    count, wrong = 0, []
    for package in ("diffeqformer", *filter(version_of, PACKAGES)):
        for requirement, optional in requirements(package):
            name, wanted, found = requirement.name, requirement.specifier, version_of(requirement.name)
            count += 1
            if found and not wanted.contains(found, prereleases=True) or not (found or optional):
                remedy = f"pip install '{name}{wanted}'; constraints.txt has versions that work together"
                wrong.append(Row(name, found or "absent", f"{wanted or 'any version'}, by {package}", "wrong", remedy))
    return rows + (wrong or [Row("packages", main, f"{count} requirements", "ok")])


def versions(found: Sequence[dict]) -> list[Row]:
    """Whether all processes have what process 0 has (`measure.installed`)."""
    what, needed, remedy = "versions of processes", "the same on all", "install the same on all hosts"
    rows = failed(what, found, remedy)
    for name in () if rows else found[0]:
        others = [f"{each[name]} on {number}" for number, each in enumerate(found) if each[name] != found[0][name]]
        if others:
            said = f"{name}: {found[0][name]} on 0, {', '.join(others)}"
            rows.append(Row(what, said, needed, "wrong", remedy))
    return rows or [Row(what, f"{len(found[0])} alike on {len(found)} processes", needed, "ok")]


def clocks(rounds: Iterable[Sequence[float]]) -> Row:
    """Whether the clocks of all processes agree, in the closest of some rounds (`measure.times_after_barrier`)."""
    times = min(rounds, key=lambda times: max(times) - min(times))
    spread, middle = max(times) - min(times), statistics.median(times)
    furthest = max(range(len(times)), key=lambda number: abs(times[number] - middle))
    wrong = spread > CLOCKS
    found = f"{spread:.2f} s apart" + f", process {furthest} the furthest" * wrong
    remedy = "let the hosts' clocks follow a time server (chrony, ntpd)"
    return Row("clocks of processes", found, f"within {CLOCKS:g} s", "wrong" if wrong else "ok", remedy)


def devices(found: Sequence[dict]) -> list[Row]:
    """Whether all processes have devices like those of process 0 (`measure.own_devices`)."""
    if rows := failed("devices", found, "see that no other program has them"):
        return rows
    says = [f"{each['number']} x {each['kind']}" for each in found]
    others = [f"{said} on {number}" for number, said in enumerate(says) if said != says[0]]
    total = f"{sum(each['number'] for each in found)} x {found[0]['kind']}, on {len(found)} process"
    total += "es" * (len(found) > 1)
    said = f"{says[0]} on 0, {', '.join(others)}" if others else total
    remedy = "use hosts with the same devices, all of them visible"
    return [Row("devices", said, "the same on all", "wrong" if others else "ok", remedy)]


def memory(found: Sequence[dict], needed: int | None) -> Row:
    """Whether `needed` bytes of a state fit into the free memory of each device (`measure.own_devices`)."""
    free = min((each["free"] for each in found if each.get("free") is not None), default=None)
    said = "not known" if free is None else f"{amount(free)} free on each"
    state = "" if needed is None else f"{amount(needed)} for the state alone"
    verdict = "unknown" if free is None or needed is None else "ok" if free >= needed else "wrong"
    remedy = "end what else takes memory there, or spread the state over more devices (config.mesh.fsdp)"
    return Row("memory of devices", said, state, verdict, remedy)


def products(found: Sequence[dict], peak: float | None) -> list[Row]:
    """Whether the slowest device multiplies as fast as it should (`measure.product_rates`)."""
    remedy = "see that nothing else runs there and that the chip isn't throttled, or replace the host"
    if rows := failed("matmul", found, remedy):
        return rows
    rate, process = min((min(each["rates"]), number) for number, each in enumerate(found))
    said = f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"
    said += f" on process {process}" * (len(found) > 1)
    needed = f"{MATMUL:.0%} of {peak / 1e12:,.0f} TFLOP/s" if peak else ""
    return [Row("slowest matmul", said, needed, judged(rate, peak and MATMUL * peak), remedy)]


def link_of(devices: list) -> float | None:
    """Bytes in a second over the slowest link among some devices; None if the chip's aren't known."""
    chip = next((chip for chip in TPUS.values() if chip.name == devices[0].device_kind), None)
    return chip and (chip.network_rate if number_of_slices(devices) > 1 else chip.link_rate)


def reduction(axis: str, number: int, size: int, seconds: float, link: float | None) -> Row:
    """Whether an all-reduce of `size` bytes over the devices of an axis is as fast as its links.

    In a ring of n devices, each one sends and receives 2(n - 1)/n of the bytes.
    """
    rate = 2 * (number - 1) / number * size / seconds
    needed = f"{ALL_REDUCE:.0%} of a link's {amount(link)}/s" if link else ""
    remedy = "see that these devices are joined by their fast network, and that nothing else uses it"
    verdict = judged(rate, link and ALL_REDUCE * link)
    return Row(f"all-reduce over {axis}", f"{amount(rate)}/s, {counted(number, 'device')}", needed, verdict, remedy)


def reductions(mesh: Mesh) -> Iterator[Row]:
    """A row for each axis with several devices. All processes call this together."""
    size = 2**20 if jax.default_backend() == "cpu" else 2**25
    for place, (axis, number) in enumerate(mesh.shape.items()):
        if number > 1:
            line = np.moveaxis(mesh.devices, place, 0).reshape(number, -1)[:, 0]
            seconds = measure.seconds_of_all_reduce(mesh, axis, size)
            slowest = max(each["seconds"] for each in everywhere(lambda: {"seconds": seconds}))
            yield reduction(axis, number, size, slowest, link_of(list(line)))


def disk(what: str, found: Sequence[dict], way: str, needed: int | float | None) -> list[Row]:
    """Whether a folder is written or read fast enough by all processes at once (`measure.disk_rates`).

    Args:
        way: write or read.
        needed: bytes in a second, over all processes; None: not known.
    """
    remedy = "choose a faster disk, or a bucket in the region of the devices"
    if rows := failed(what, found, "choose a folder that can be written and has room"):
        return rows
    rates = {name: len(found) * min(each[name] for each in found) for name in ("write", "read")}
    said = ", ".join(f"{name}s {amount(rate)}/s" for name, rate in rates.items())
    return [Row(what, said, f"{way}s {amount(needed)}/s" if needed else "", judged(rates[way], needed), remedy)]


def room(free: int | None, there: int, needs: Needs | None) -> Row:
    """Whether a run's checkpoints fit.

    Args:
        free: bytes of the disk; None: it has no end, as on gs://.
        there: bytes of checkpoints that are there already.
    """
    said = "no limit" if free is None else f"{amount(free)} free"
    said += f", {amount(there)} of checkpoints" * bool(there)
    if needs is None:
        return Row("room for checkpoints", said, "", "unknown")
    needed = f"{amount(needs.checkpoints)}, {amount(needs.checkpoint)} each"
    wrong = free is not None and free + there < needs.checkpoints
    remedy = "make room, use another --workdir, or keep fewer (config.checkpoints_kept)"
    return Row("room for checkpoints", said, needed, "wrong" if wrong else "ok", remedy)


def space(workdir: str) -> dict:
    """Free bytes of the disk of a work folder, and those of checkpoints in it."""
    if "://" in workdir:
        return {"free": None, "there": 0}
    there = folder_of(workdir)
    size = size_on_disk(there) if there.exists() else 0
    return {"free": shutil.disk_usage(measure.existing(workdir)).free, "there": size}


def folders(workdir: str, config: ConfigDict | None, needs: Needs | None) -> Iterator[Row]:
    """Rows for the work folder, which all processes must share, and for the folder of token stores."""
    found = everywhere(lambda: measure.disk_rates(workdir))
    rows = disk("disk of --workdir", found, "write", needs and needs.write_rate)
    yield from rows
    if rows[0].verdict != "wrong":
        try:
            hosts.check_shared(measure.existing(workdir))
        except UserErrorEverywhere as error:
            said, _, remedy = str(error).partition("; ")
            yield Row("disk of --workdir", said.removeprefix("--workdir: "), "one for all", "wrong", remedy)
    found = everywhere(lambda: space(workdir))
    rows = failed("room for checkpoints", found, "choose a folder that can be read")
    free = min((each["free"] for each in found if each.get("free") is not None), default=None)
    yield from rows or [room(free, found[0]["there"], needs)]
    if config:
        found = everywhere(lambda: measure.disk_rates(config.data.dir))
        [row] = disk("disk of config.data.dir", found, "read", needs and needs.read_rate)
        yield row._replace(verdict="unknown") if row.verdict == "wrong" else row  # what is there needn't be written


def examine(config: ConfigDict | None, workdir: str, given: Set[str]) -> Iterator[Row]:
    """The rows of all checks, each as soon as it is known. All processes call this together.

    Args:
        config, given: as of `diffeqformer.training.run.complete`; without a config, less is known to compare with.

    Raises:
        UserError: if the config has an error.
    """
    work_folder(workdir)
    yield from packages()
    many = jax.process_count() > 1
    if many:
        hosts.wait("the doctor")
        yield from versions(everywhere(measure.installed))
        yield clocks(measure.times_after_barrier())
    found = everywhere(measure.own_devices)
    yield from devices(found)
    config = config and complete(config, workdir, given)
    needs = config and needs_of(config)
    yield memory(found, needs and needs.on_device)
    yield from products(everywhere(measure.product_rates), peak_of(jax.devices()[0].device_kind))
    yield from reductions(needs.mesh if needs else make_mesh())
    yield from folders(workdir, config, needs)


def report(rows: Iterable[Row]) -> None:
    """Print rows as they come, and what they amount to.

    Raises:
        UserErrorEverywhere: if something is wrong.
    """
    print(Row("check", "found", "needed", "verdict"), flush=True)
    names = {"slow": [], "wrong": []}
    for row in rows:
        print(row, flush=True)
        names.setdefault(row.verdict, []).append(row.what)
    if names["wrong"]:
        raise UserErrorEverywhere(f"{', '.join(dict.fromkeys(names['wrong']))}: wrong; do what the table above says")
    slow = f", but this is slow: {', '.join(names['slow'])}" if names["slow"] else ""
    print(f"Nothing is wrong{slow}")


if __name__ == "__main__":
    asked = command_line.define_config()
    folder = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/<config name>.")
    hosts.define_flags()

    def command() -> None:
        config = asked.value
        if config is not None:
            check_used(sys.argv, config)
        workdir = folder.value or f"runs/{config.name if config else ''}"
        with hosts.joined(flags.FLAGS):
            report(examine(config, workdir, given_fields(sys.argv)))

    with_config = any(re.match("--?(no)?config", argument) for argument in sys.argv[1:])
    command_line.run(command, check_overrides if with_config else None, explain, verbosity=logging.FATAL)
