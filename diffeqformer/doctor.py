"""Examine devices, hosts, packages and disks before a run: `python -m diffeqformer.doctor [--config=tiny]`.

It takes the options of `main`, and prints a row for each check: what was found, what is needed and, if something is
slow or wrong, what to do. The exit status is 1 if something is wrong. Nothing that it writes stays.
"""

import contextlib
import hashlib
import importlib.metadata
import math
import os
import pathlib
import platform
import re
import shutil
import statistics
import sys
import time
import timeit
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags, logging
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from packaging.requirements import Requirement

from diffeqformer.checkpoints.folder import folder_of, size_on_disk, work_folder
from diffeqformer.config import check_overrides, check_used, explain, given_fields
from diffeqformer.console import command_line
from diffeqformer.data.preparation import store_folder, tokenizer_of
from diffeqformer.data.remote import has_store
from diffeqformer.data.store import token_type
from diffeqformer.errors import UserError, UserErrorEverywhere, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import bytes_of, free_bytes, size_of
from diffeqformer.parallel.mesh import make_mesh, number_of_slices
from diffeqformer.planning.chips import TPUS
from diffeqformer.rules import decay_start
from diffeqformer.training.run import complete, program_of, saved_tokenizer
from diffeqformer.training.utilisation import peak_of, utilisation

MATMUL = 0.6  # of the peak, which large products reach on a sound chip
ALL_REDUCE = 0.1  # of one link's rate
CLOCKS = 1.0  # seconds between the clocks of two hosts
FILE = 32 * 2**20  # bytes that each process writes and reads
LOOPS = 8  # products or all-reduces in one call, beside which its start doesn't count
PACKAGES = ("diffeqformer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")  # which JAX requires with its extras alone


class Row(NamedTuple):
    """The result of a check."""

    what: str
    found: str
    needed: str
    verdict: str  # ok, slow, wrong, or unknown where nothing is known to compare with
    remedy: str = ""  # what to do if it is slow or wrong

    def __str__(self) -> str:
        row = f"{self.verdict:8} {self.what:26} {self.found:44} {self.needed}".rstrip()
        return row + f"\n{'':8} {self.remedy}" * (self.verdict in ("slow", "wrong"))


class Needs(NamedTuple):
    """What a config needs, in bytes and bytes in a second; None where it isn't known."""

    mesh: Mesh
    on_device: int | None = None  # parameters, moments and a teacher
    checkpoint: int | None = None
    checkpoints: int | None = None  # all that are there at once
    read_rate: float | None = None  # of batches, if the devices work at their peak
    write_rate: float | None = None  # for a checkpoint to be written before the next one


def needs_of(config: ConfigDict, workdir: str) -> Needs:
    """What a complete config needs, by shapes; raises a UserError if its mesh doesn't suit the devices."""
    program = program_of(config, workdir)
    state = program.state_shapes
    frozen = bytes_of(program.loss.trained_and_frozen(state["params"])[1])
    checkpoint, once = bytes_of(state) - frozen, frozen + bytes_of(program.teacher_shapes)
    number = config.checkpoints_kept + 2 + (decay_start(config) is not None)  # with the best and one in the making
    seconds = utilisation(config, 1.0, list(program.mesh.devices.flat), min(program.depths))
    batch = config.batch_size * config.sequence_length * token_type(config.model.vocab_size).itemsize
    rates = (batch / seconds, checkpoint / seconds / config.checkpoint_every) if not math.isnan(seconds) else ()
    return Needs(program.mesh, size_of((state, program.teacher_shapes)), checkpoint, number * checkpoint + once, *rates)


def check(what: str, remedy: str, measure: Callable[[], Any], judge: Callable[[list], tuple[str, str, str]]) -> Row:
    """The row of a measurement on every process; wrong if it fails on one. All processes call this together.

    `judge` says what was found, what is needed and the verdict, from the results of all processes.
    """
    try:
        result = {"found": measure()}
    except Exception as error:  # devices and cloud clients have many exceptions of their own
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        result = {"error": kind + reason_of(error)}
    results = hosts.of_all(result)
    errors = [f"process {number}: {each['error']}" for number, each in enumerate(results) if "error" in each]
    if errors:
        return Row(what, "; ".join(errors), "", "wrong", remedy)
    return Row(what, *judge([each["found"] for each in results]), remedy)


def compared(found: int | float | None, needed: int | float | None, otherwise: str) -> str:
    """The verdict on something of which there must be enough."""
    return "unknown" if found is None or needed is None else "ok" if found >= needed else otherwise


def amount(count: int | float) -> str:
    """A number of bytes as text, also a small one."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:.{0 if count >= 1e7 else 2}f} MB"


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it isn't there."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def requirements(package: str) -> list[Requirement]:
    """What a package requires of others; nothing if it isn't installed."""
    found = map(Requirement, importlib.metadata.requires(package) or ()) if version_of(package) else ()
    return [each for each in found if each.name in PLUGINS or not each.marker or each.marker.evaluate({"extra": ""})]


def packages() -> list[Row]:
    """Whether the installed versions are those that this package, JAX and the rest of `PACKAGES` require."""
    count, wrong = 0, []
    for package in PACKAGES:
        for requirement in requirements(package):
            name, wanted, found = requirement.name, requirement.specifier, version_of(requirement.name)
            count += 1
            if found and not wanted.contains(found, prereleases=True):
                remedy = f"pip install '{name}{wanted}'; constraints.txt has versions that work together"
                wrong.append(Row(name, found, f"{wanted}, by {package}", "wrong", remedy))
    main = ", ".join(f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "flax"))
    return wrong or [Row("packages", main, f"{count} requirements", "ok")]


def installed() -> dict[str, str]:
    """The versions of Python and of packages that this one requires, and a hash of its own code."""
    code, folder = hashlib.sha256(), pathlib.Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    names = {requirement.name for requirement in requirements("diffeqformer")} | {*PACKAGES, "libtpu"}
    versions = {name: version_of(name) or "absent" for name in sorted(names)}
    return {"Python": platform.python_version(), "the code": code.hexdigest()[:12], **versions}


def alike(found: Sequence[dict[str, str]], same: str) -> tuple[str, str, str]:
    """Whether all processes have what process 0 has, such as versions or devices; `same` describes it."""
    apart = []
    for name, own in found[0].items():
        if others := [f"{each[name]} on {number}" for number, each in enumerate(found) if each[name] != own]:
            apart.append(f"{name}: {own} on 0, {', '.join(others)}")
    return "; ".join(apart) or same, "the same on all", "wrong" if apart else "ok"


def times_after_barriers() -> list[float]:
    """What the clock of this process says after each of some barriers. All processes call this together."""
    times = []
    for _ in range(4):  # the first one compiles
        multihost_utils.sync_global_devices("the clocks")
        times.append(time.time())
    return times


def clocks(found: Sequence[Sequence[float]]) -> tuple[str, str, str]:
    """Whether the clocks of all processes agree after the barrier that they left closest to one another."""
    times = min(zip(*found), key=lambda times: max(times) - min(times))
    spread, middle = max(times) - min(times), statistics.median(times)
    furthest = max(range(len(times)), key=lambda number: abs(times[number] - middle))
    said = f"{spread:.2f} s apart, process {furthest} the furthest"
    return said, f"within {CLOCKS:g} s", "wrong" if spread > CLOCKS else "ok"


def memory(found: Sequence[int | None], needed: int | None) -> tuple[str, str, str]:
    """Whether the state fits into the free memory of each device."""
    free = None if None in found else min(found)
    said = "not known" if free is None else f"{amount(free)} free on each"
    return said, f"{amount(needed)} for the state alone" if needed else "", compared(free, needed, "wrong")


def seconds_of(call: Callable[[], jax.Array]) -> float:
    """The median time of a call, after one that compiles."""
    times = timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=6)
    return statistics.median(times[1:])


def slowest_product() -> float:
    """FLOP/s of large products in bfloat16 on this process's slowest device; on CPUs in float32, on one of them."""
    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (512, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    draw = jax.jit(lambda key: (jax.random.normal(key, (size, size)) / math.sqrt(size)).astype(dtype))
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, LOOPS, lambda _, y: x @ y, x))
    seconds = []
    for device in jax.local_devices()[: 1 if on_cpu else None]:
        with jax.default_device(device):
            matrix = draw(jax.random.key(0))
        seconds.append(seconds_of(lambda: multiply(matrix)))
    return LOOPS * 2 * size**3 / max(seconds)


def products(found: Sequence[float], peak: float | None) -> tuple[str, str, str]:
    """Whether the slowest device multiplies as fast as it should (`slowest_product`)."""
    rate = min(found)
    said = f"{rate / 1e12:,.2f} TFLOP/s on process {found.index(rate)}"
    needed = f"{MATMUL:.0%} of {peak / 1e12:,.0f} TFLOP/s" if peak else ""
    return said, needed, compared(rate, peak and MATMUL * peak, "slow")


def seconds_of_all_reduce(mesh: Mesh, axis: str, size: int) -> float:
    """The time in which all devices take the mean of `size` bytes over an axis. All processes call this together."""
    spec, shape = PartitionSpec(mesh.axis_names), (mesh.size * size // 4,)
    array = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, spec))()

    def reduce(x):
        return jax.lax.fori_loop(0, LOOPS, lambda _, y: jax.lax.pmean(y, axis), x)

    call = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return seconds_of(lambda: call(array)) / LOOPS


def all_reduces(mesh: Mesh) -> Iterator[Row]:
    """A row for each axis with several devices. All processes call this together."""
    size = 2**20 if jax.default_backend() == "cpu" else 2**25  # bytes on each device
    chip = next((chip for chip in TPUS.values() if chip.name == mesh.devices.flat[0].device_kind), None)
    remedy = "see that these devices are joined by their fast network, and that nothing else uses it"
    for place, (axis, number) in enumerate(mesh.shape.items()):
        if number > 1:
            line = list(mesh.devices.swapaxes(0, place).reshape(number, -1)[:, 0])
            link = chip and (chip.network_rate if number_of_slices(line) > 1 else chip.link_rate)
            yield check(
                f"all-reduce over {axis}",
                remedy,
                lambda: seconds_of_all_reduce(mesh, axis, size),
                lambda found: all_reduce(found, size, number, link),
            )


def all_reduce(found: Sequence[float], size: int, number: int, link: float | None) -> tuple[str, str, str]:
    """Whether an all-reduce is as fast as the links in a ring: a device sends and receives 2(n - 1)/n of the bytes."""
    rate = 2 * (number - 1) / number * size / max(found)
    needed = f"{ALL_REDUCE:.0%} of a link's {amount(link)}/s" if link else ""
    return f"{amount(rate)}/s, {number} devices", needed, compared(rate, link and ALL_REDUCE * link, "slow")


def existing(folder: os.PathLike | str) -> epath.Path:
    """A folder that may be on gs://, or on this machine the nearest one above that exists: nothing is created."""
    path = work_folder(folder)
    return path if "://" in str(folder) else next(each for each in (path, *path.absolute().parents) if each.exists())


def disk_rates(folder: os.PathLike | str) -> dict[str, float]:
    """Bytes in a second that this process writes to a folder and reads back. The file is gone afterwards."""
    file, data, start = existing(folder) / f".doctor-{uuid.uuid4().hex}", os.urandom(FILE), time.perf_counter()
    try:
        file.write_bytes(data)
        if "://" not in str(folder):
            with open(file, "rb") as written:
                os.fsync(written.fileno())
                if hasattr(os, "posix_fadvise"):  # to read from the disk and not from memory
                    os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        middle = time.perf_counter()
        read = file.read_bytes()
        end = time.perf_counter()
    finally:
        file.unlink(missing_ok=True)
    if read != data:
        raise OSError("what was read isn't what was written")
    return {"write": FILE / (middle - start), "read": FILE / (end - middle)}


def disk(found: Sequence[dict[str, float]], way: str, needed: float | None) -> tuple[str, str, str]:
    """Whether all processes at once write or read (the `way`) at the rate that is needed (`disk_rates`)."""
    rates = {name: len(found) * min(each[name] for each in found) for name in ("write", "read")}
    said = ", ".join(f"{name}s {amount(rate)}/s" for name, rate in rates.items())
    return said, f"{way}s {amount(needed)}/s" if needed else "", compared(rates[way], needed, "slow")


def space(workdir: str) -> list[int]:
    """Free bytes of the disk of a work folder, and those of checkpoints in it. On gs://, room has no end."""
    if "://" in workdir:
        return [2**63, 0]
    there = folder_of(workdir)
    return [shutil.disk_usage(existing(workdir)).free, size_on_disk(there) if there.exists() else 0]


def room(found: Sequence[Sequence[int]], needs: Needs) -> tuple[str, str, str]:
    """Whether a run's checkpoints fit (`space`)."""
    free, there = map(min, zip(*found))
    said = "no limit" if free == 2**63 else f"{amount(free)} free"
    said += f", {amount(there)} of checkpoints" * bool(there)
    needed = f"{amount(needs.checkpoints)}, {amount(needs.checkpoint)} each" if needs.checkpoints else ""
    return said, needed, compared(free + there, needs.checkpoints, "wrong")


def folders(workdir: str, data: str | None, needs: Needs) -> Iterator[Row]:
    """Rows for the work folder, which all processes must share, and for the folder of token stores."""
    faster = "choose a faster disk with room, or a bucket in the region of the devices"
    what, rates = "disk of --workdir", lambda: disk_rates(workdir)
    yield (row := check(what, faster, rates, lambda found: disk(found, "write", needs.write_rate)))
    if row.verdict != "wrong":
        try:
            hosts.check_shared(existing(workdir))
        except UserErrorEverywhere as error:
            said, _, remedy = str(error).partition("; ")
            yield Row(what, said.removeprefix("--workdir: "), "one for all", "wrong", remedy)
    remedy = "make room, use another --workdir, or keep fewer (config.checkpoints_kept)"
    yield check("room for checkpoints", remedy, lambda: space(workdir), lambda found: room(found, needs))
    if data:
        what, rates = "disk of config.data.dir", lambda: disk_rates(data)
        row = check(what, faster, rates, lambda found: disk(found, "read", needs.read_rate))
        yield row._replace(verdict="unknown") if row.verdict == "wrong" else row  # what is there needn't be written


def store(config: ConfigDict, workdir: str) -> Row:
    """The row of the config's token store, which is at `data.remote`."""
    remedy = "diffeqformer prepare with the same options puts it there"

    def find() -> None:
        folder = store_folder(config.data, tokenizer_of(config.data, saved_tokenizer(config, workdir)))
        if not folder.exists() and not has_store(config.data.remote, folder.name):
            raise UserError("no token store of this config")

    return check("config.data.remote", remedy, find, lambda _: ("there", "", "ok"))


def examine(config: ConfigDict | None, workdir: str, given: Set[str]) -> Iterator[Row]:
    """The rows of all checks, each as soon as it is known. All processes call this together.

    Without a config, less is known to compare with. `given` is as of `diffeqformer.training.run.complete`.
    """
    work_folder(workdir)
    yield from packages()
    if jax.process_count() > 1:
        hosts.wait("the doctor")
        remedy = "install the same on all hosts"
        yield check("versions of processes", remedy, installed, lambda found: alike(found, "the same"))
        remedy = "let the hosts' clocks follow a time server (chrony, ntpd)"
        yield check("clocks of processes", remedy, times_after_barriers, clocks)
    own = jax.local_devices()
    remedy = "use hosts with the same devices, all of them visible and free"
    kind, total = own[0].device_kind, f"{jax.device_count()} x {own[0].device_kind}"
    yield check("devices", remedy, lambda: {"devices": f"{len(own)} x {kind}"}, lambda found: alike(found, total))
    config = config and complete(config, workdir, given)
    needs = needs_of(config, workdir) if config else Needs(make_mesh())
    remedy = "end what else takes memory there, or spread the state over more devices (config.mesh.fsdp)"
    yield check("memory of devices", remedy, lambda: free_bytes(own), lambda found: memory(found, needs.on_device))
    remedy = "see that nothing else runs there and that the chip isn't throttled, or replace the host"
    yield check("slowest matmul", remedy, slowest_product, lambda found: products(found, peak_of(kind)))
    yield from all_reduces(needs.mesh)
    yield from folders(workdir, config and config.data.dir, needs)
    if config and config.data.remote:
        yield store(config, workdir)


def report(rows: Iterable[Row]) -> None:
    """Print rows as they come, and what they amount to; if something is wrong, as a UserErrorEverywhere."""
    print(Row("check", "found", "needed", "verdict"), flush=True)
    verdicts = {}
    for row in rows:
        print(row, flush=True)
        verdicts[row.what] = row.verdict
    wrong, slow = (", ".join(what for what, of in verdicts.items() if of == verdict) for verdict in ("wrong", "slow"))
    if wrong:
        raise UserErrorEverywhere(f"{wrong}: wrong; do what the table above says")
    print(f"Nothing is wrong, but this is slow: {slow}" if slow else "Nothing is wrong")


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
