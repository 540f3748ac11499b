"""Whether a run fits into memory, checked before anything is allocated.

Without this check, running out of memory on a CPU is reported late or never. JAX 0.10 can wait forever for scalars of
a program whose allocation failed, and Linux kills a process that uses more memory than there is.
"""

import math
import os
import pathlib

import jax
from ml_collections import ConfigDict

from diffeqformer.errors import UserError, out_of_memory
from diffeqformer.training.step import Program


def check_memory(config: ConfigDict, program: Program, state: dict, will_train: bool) -> None:
    """Compare a run's memory needs with the free memory of each device of this process, if the device reports it.

    This compiles the train step. Its first call then finds it compiled.

    Args:
        state: shapes and shardings of the whole state.
        will_train: whether train steps will follow.

    Raises:
        UserError: if the state is too large, or a train step needs too much.
    """
    free = free_bytes(program.batch_sharding.mesh.local_devices)
    if free is None:
        return
    needed = sum(map(bytes_on_device, jax.tree.leaves(state)))
    if needed > free:
        raise UserError(
            f"config.model: its parameters and the optimizer's state need {gigabytes(needed)} on each device, but "
            f"{gigabytes(free)} are free; take a smaller model, or spread it over more devices (config.mesh.fsdp)"
        )
    if not will_train:
        return
    shape = (config.batch_size, config.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=program.batch_sharding)
    lowered = program.train_step.lower(state, tokens, max(program.depths))
    try:
        needed = bytes_of_program(lowered.compile())
    except jax.errors.JaxRuntimeError as error:  # the TPU's compiler refuses a program that is too large
        if not out_of_memory(error):
            raise
        needed = math.inf
    if needed > free:
        said = gigabytes(needed) if needed < math.inf else "more memory"
        raise UserError(
            f"config.batch_size: a train step needs {said} on each device, but {gigabytes(free)} are free; take a "
            "smaller batch, more config.microbatches, config.model.remat=step, more devices (config.mesh.fsdp) or a "
            "smaller model"
        )


def bytes_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's part on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


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


def free_on_host() -> int:
    """Free bytes of this machine or of the container around this process; all its memory if free bytes aren't known."""
    limit, table = pathlib.Path("/sys/fs/cgroup/memory.max"), pathlib.Path("/proc/meminfo")
    if not table.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":") for line in table.read_text().splitlines())
    free = sum(int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    of_container = limit.read_text().strip() if limit.exists() else "max"
    return free if of_container == "max" else min(free, int(of_container))


def gigabytes(count: int) -> str:
    """A number of bytes as readable text."""
    return f"{count / 1e9:,.1f} GB"
