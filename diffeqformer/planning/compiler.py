"""The TPU compiler, without a TPU."""

import math
import os
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
from jax.experimental import topologies

from diffeqformer.errors import UserError
from diffeqformer.planning.hlo import Module
from diffeqformer.planning.memory import size_of_temporaries, temporaries_by_cause


class Compiled(NamedTuple):
    """A program that was compiled for TPUs. Bytes are those of one device.

    arguments: bytes
    temporaries: bytes of the part of memory in which XLA lays them out. Its `memory_analysis` can state half as many
        again, but isn't what the compiler compares with the memory of a chip
    results: bytes of what is returned, unless it takes the place of arguments
    by_cause: bytes of temporaries at the moment of their largest use, by cause; gaps are left out
    module: what was dumped
    output_shardings: as JAX has them
    """

    arguments: int
    temporaries: int
    results: int
    by_cause: dict[str, int]
    module: Module
    output_shardings: object


class TooLarge(Exception):
    """A program doesn't fit into a device's memory. Its argument is the number of bytes that it needs."""


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
    if set(re.findall(r"\d+", topology.partition(":")[2])) == {"1"}:  # a host usually has four
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


def compile_for_tpu(lowered: jax.stages.Lowered, dump: str | None = None, rounds: float = 0) -> Compiled:
    """Compile a program that was lowered for such devices.

    Args:
        dump: a folder that keeps all that the compiler writes; None: it is removed.
        rounds: how often loops run on average whose number of rounds is computed.

    Raises:
        TooLarge: if it doesn't fit.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(dump or temporary)
        try:
            compiled = lowered.compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
            raise TooLarge(needed) from None
        texts = [
            max(folder.glob(f"*{name}.txt"), key=os.path.getmtime).read_text()
            for name in ("after_codegen", "after_optimizations-buffer-assignment", "live-range")
        ]
    module, stats = Module(texts[0], rounds), compiled.memory_analysis()
    return Compiled(
        stats.argument_size_in_bytes,
        size_of_temporaries(texts[1]),
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries_by_cause(module, *texts[1:]),
        module,
        compiled.output_shardings,
    )
