"""What devices, hosts and disks do: measured, or read from what is installed. Nothing is judged here."""

import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.requirements import Requirement

from diffeqformer.checkpoints.folder import work_folder
from diffeqformer.errors import reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import free_bytes

FILE = 32 * 2**20  # bytes that each process writes and reads
LOOPS = 8  # products or all-reduces in one call, beside which its start doesn't count
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
OF_TASKS = {"importlib_resources", "seqio", "tensorflow", "tensorflow-datasets", "tensorflow-text"}
"""What a light installation lacks (requirements-light.txt)."""
EXTRAS = ("tpu", "cuda12", "cuda13")


def everywhere(measure: Callable[[], dict]) -> list[dict]:
    """What a measurement finds on every process, or {"error": why} where it fails. All must call this together."""
    try:
        found = measure()
    except Exception as error:  # devices and cloud clients have many exceptions of their own
        found = {"error": f"{type(error).__name__}: {reason_of(error)}"}
    return [json.loads(text) for text in hosts.texts_of_all(json.dumps(found))]


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it isn't there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str) -> Iterator[tuple[Requirement, bool]]:
    """What an installed package requires of others, and whether they may be absent."""
    for line in importlib.metadata.requires(package) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, package == "diffeqformer" and requirement.name in OF_TASKS
        elif requirement.name != "jaxlib" and any(requirement.marker.evaluate({"extra": name}) for name in EXTRAS):
            yield requirement, True


def installed() -> dict[str, str]:
    """The versions of Python and of packages that this one requires, and a hash of its own code."""
    code, folder = hashlib.sha256(), pathlib.Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    names = {requirement.name for requirement, _ in requirements("diffeqformer")} if version_of("diffeqformer") else ()
    packages = {name: version_of(name) or "absent" for name in sorted({*names, *PACKAGES, "libtpu"})}
    return {"Python": platform.python_version(), "the code": code.hexdigest()[:12], **packages}


def times_after_barrier(rounds: int = 3) -> list[tuple[float, ...]]:
    """What the clock of each process says after a barrier, in seconds, by rounds. All must call this together."""
    multihost_utils.sync_global_devices("the clocks")  # compiles
    times = []
    for _ in range(rounds):
        multihost_utils.sync_global_devices("the clocks")
        times.append(time.time())
    return list(zip(*(each["times"] for each in everywhere(lambda: {"times": times}))))


def own_devices() -> dict:
    """The number and kind of this process's devices, and the free bytes of each."""
    devices = jax.local_devices()
    return {"number": len(devices), "kind": devices[0].device_kind, "free": free_bytes(devices)}


def seconds_of(call: Callable[[], jax.Array], rounds: int = 5) -> float:
    """The median time of a call, after one that compiles."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def product_rates() -> dict:
    """FLOP/s of large products in bfloat16 on each of this process's devices; on CPUs in float32, on one of them."""
    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (512, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    draw = jax.jit(lambda key: (jax.random.normal(key, (size, size)) / math.sqrt(size)).astype(dtype))
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, LOOPS, lambda _, y: x @ y, x))
    seconds = []
    for device in jax.local_devices()[: 1 if on_cpu else None]:
        with jax.default_device(device):
            matrix = draw(jax.random.key(0))
        seconds.append(seconds_of(lambda: multiply(matrix)))
    return {"rates": [LOOPS * 2 * size**3 / each for each in seconds]}


def seconds_of_all_reduce(mesh: Mesh, axis: str, size: int) -> float:
    """The time in which all devices take the mean of `size` bytes over an axis. All processes call this together."""
    spec, shape = PartitionSpec(mesh.axis_names), (mesh.size * size // 4,)
    array = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, spec))()

    def reduce(x):
        return jax.lax.fori_loop(0, LOOPS, lambda _, y: jax.lax.pmean(y, axis), x)

    call = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return seconds_of(lambda: call(array)) / LOOPS


def existing(folder: os.PathLike | str) -> epath.Path:
    """A folder that may be on gs://, or on this machine the nearest one above that exists: nothing is created."""
    if "://" in str(folder):
        return work_folder(folder)
    path = pathlib.Path(folder).absolute()
    return epath.Path(next(each for each in (path, *path.parents) if each.exists()))


def disk_rates(folder: os.PathLike | str) -> dict:
    """Bytes in a second that this process writes to a folder and reads back. The file is gone afterwards."""
    there, data, times = existing(folder), os.urandom(FILE), [time.perf_counter()]
    if "://" in str(folder):
        file = there / f".doctor-{uuid.uuid4().hex}"
        try:
            file.write_bytes(data)
            times.append(time.perf_counter())
            read = file.read_bytes()
        finally:
            file.unlink(missing_ok=True)
    else:
        with tempfile.TemporaryFile(dir=there) as file:  # has no name, so it goes even if this process is killed
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter())
            if hasattr(os, "posix_fadvise"):  # to read from the disk and not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            read = file.read()
    times.append(time.perf_counter())
    if read != data:
        raise OSError("what was read isn't what was written")
    return {"write": FILE / (times[1] - times[0]), "read": FILE / (times[2] - times[1])}
