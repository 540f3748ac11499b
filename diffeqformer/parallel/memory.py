"""How much memory devices have, and what arrays and compiled programs need of it."""

import contextlib
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from diffeqformer.errors import UserError


class NoRoom(UserError):
    """Something doesn't fit into the free memory."""


def check_free(what: str, shapes: Any, times: int | float = 1, remedy: str = "take fewer") -> None:
    """Check that arrays of some shapes fit into the free memory of the first device, or raise a NoRoom.

    Args:
        what: their name and the option that made them large, for the message.
        shapes: a tree of arrays or of their shapes.
        times: how many such trees there will be on the device.
    """
    check_enough(what, int(times * bytes_of(shapes)), free_bytes(jax.local_devices()[:1]), remedy)


def check_enough(what: str, needed: int, free: int | None, remedy: str) -> None:
    """Check that something that takes `needed` bytes fits into `free` bytes (None: not known), or raise a NoRoom."""
    if free is not None and needed > free:
        raise NoRoom(f"{what} would take {gigabytes(needed)}, but {gigabytes(free)} are free; {remedy}")


def bytes_of(shapes: PyTree) -> int:
    """The bytes of a tree of arrays or shapes, over all devices."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def size_of(shapes: PyTree) -> int:
    """The bytes of a tree of shapes with shardings, on one device."""
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def placed(shapes: PyTree, shardings: PyTree) -> PyTree:
    """A tree of shapes with shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)


def bytes_of_program(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs on one device at once; 0 if the compiler doesn't say.

    For TPUs they are those of the arguments: what the compiler states of temporaries can be half as much again as what
    it lays out. It refuses a program that doesn't fit.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    if compiled.runtime_executable().client.platform == "tpu":
        return stats.argument_size_in_bytes
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes  # donated buffers are reused
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def free_bytes(devices: list) -> int | None:
    """Free memory of each of this process's devices; CPU devices share the host's. None if it isn't known."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free_on_host() // len(devices) if devices[0].platform == "cpu" else None


def bytes_of_device(devices: list) -> int | None:
    """All memory that programs can have on each of this process's devices; None if it isn't known, as of CPUs."""
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def free_on_host(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Free bytes of this machine, or of the control groups around this process (such as a container); all its memory if
    free bytes aren't known.
    """
    table = root / "proc/meminfo"
    if not table.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":") for line in table.read_text().splitlines())
    free = sum(int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    return min([free, *free_in_groups(root)])


def free_in_groups(root: pathlib.Path) -> Iterator[int]:
    """The free bytes of each control group of this process that limits memory. Cached files count as free."""
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.exists() else ():
        _, controllers, name = line.split(":", 2)
        top, files, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        if "memory" in controllers.split(","):  # version 1
            top, files, prefix = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        here = pathlib.PurePosixPath(name.lstrip("/"))
        for group in (top / here, *(top / parent for parent in here.parents)):  # a container sees but some of them
            with contextlib.suppress(OSError, ValueError, KeyError):  # without a limit, it says "max"
                limit, used = (int((group / file).read_text()) for file in files)
                table = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = sum(int(table[f"{prefix}{state}_file"]) for state in ("active", "inactive"))
                yield max(0, limit - used + cached)


def gigabytes(count: int) -> str:
    """A number of bytes as readable text."""
    return f"{count / 1e9:,.1f} GB"
