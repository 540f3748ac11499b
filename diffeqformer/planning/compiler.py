"""The TPU compiler, without a TPU."""

import math
import os
import pathlib
import re
import tempfile

import jax
from jax.experimental import topologies

from diffeqformer.errors import UserError
from diffeqformer.planning.estimate import Planned
from diffeqformer.planning.hlo import Module


def tpu_devices(topology: str, slices: int) -> list:
    """The devices of one or more slices, which need not exist.

    Raises:
        UserError: if the compiler doesn't know the topology.
    """
    kind, _, shape = topology.partition(":")
    chips = math.prod(map(int, re.findall(r"\d+", shape)))
    if kind == "v5e" and chips > 256:  # libtpu would end the process
        raise UserError(f"--topology: a slice of v5e has at most 256 chips, but {topology} has {chips:,}")
    more: dict = {"num_slices": slices} if slices > 1 else {}
    if set(re.findall(r"\d+", shape)) == {"1"}:  # a host usually has four
        more["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **more).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--topology: {topology} isn't available ({reason}); libtpu comes with pip install -e '.[tpu]'"
        ) from None


def needed_bytes(message: str) -> int | None:
    """The bytes that a program needs by the compiler's message about memory; None: it says another thing."""
    found = re.search(r"required for HLO temporaries \(([\d.]+)([KMGTP])\)|Used ([\d.]+)([KMGTP]) of", message)
    if "RESOURCE_EXHAUSTED" not in message or not found:
        return None
    number, unit = (group for group in found.groups() if group)
    return round(float(number) * 2 ** (10 * (1 + "KMGTP".index(unit))))


def size_of_temporaries(buffers: str) -> int:
    """The bytes of the part of the main memory that all temporary values share.

    XLA's `memory_analysis` can state half as many again, but isn't what the compiler compares with a chip's memory.

    Raises:
        ValueError: if another compiler writes them in another way.
    """
    # The main memory has no color.
    found = re.findall(r"^allocation \d+: size (\d+)(?:, page \d+)?, preallocated-temp:", buffers, re.M)
    if not found and re.search("^(?!.* color ).*preallocated-temp", buffers, re.M):
        raise ValueError("the compiler's allocations can't be read; plan with the libtpu of constraints.txt")
    return sum(map(int, found))


def compile_for_tpu(
    name: str, lowered: jax.stages.Lowered, arrays: int = 0, dump: str | None = None, rounds: float = 0
) -> Planned:
    """Compile a program that was lowered for such devices.

    Args:
        name: what it is called.
        arrays: bytes of a run's arrays that are there while it runs.
        dump: a folder that keeps all that the compiler writes; None: it is removed.
        rounds: how often loops run on average whose number of rounds is computed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(dump or temporary)
        try:
            compiled = lowered.compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
            return Planned(name, needed, {})
        program, buffers = (
            max(folder.glob(f"*{what}.txt"), key=os.path.getmtime).read_text()
            for what in ("after_codegen", "after_optimizations-buffer-assignment")
        )
    stats = compiled.memory_analysis()
    parts = {
        "arrays": max(arrays, stats.argument_size_in_bytes),  # which XLA may pad
        "temporaries": size_of_temporaries(buffers),
        "results": stats.output_size_in_bytes - stats.alias_size_in_bytes,
    }
    return Planned(name, sum(parts.values()), parts, Module(program, rounds), compiled.output_shardings)
