"""What chips can do, by their data sheets."""

import re
from typing import NamedTuple

from diffeqformer.errors import UserError


class Tpu(NamedTuple):
    """A kind of TPU. Rates and bytes are those of one of JAX's devices: a chip, or for tpu7x one of its two cores."""

    name: str  # JAX's `device_kind`
    clock: float  # cycles in a second, with which the largest matrix products that the compiler expects reach `peak`
    peak: float  # dense bfloat16 FLOP/s
    memory_rate: float  # bytes of memory in a second; of v5p as JAX states it (`jax.experimental.pallas.tpu`)
    memory: int  # bytes that the compiler gives a program
    link_rate: float  # bytes in a second to one neighbour
    network_rate: float  # bytes in a second to other slices
    devices: int = 1  # of a chip


class Gpu(NamedTuple):
    """A kind of GPU."""

    name: str  # the beginning of JAX's `device_kind`
    capability: str  # its compute capability
    memory: int  # bytes that JAX takes by default, three quarters; XLA_CLIENT_MEM_FRACTION can be another share


TPUS = {
    "v5e": Tpu("TPU v5 lite", 1.5e9, 197e12, 820e9, int(15.75 * 2**30), 50e9, 3.125e9),
    "v5p": Tpu("TPU v5", 1.75e9, 459e12, 2460e9, int(95.74 * 2**30), 100e9, 6.25e9),
    "v6e": Tpu("TPU v6 lite", 1.75e9, 918e12, 1640e9, int(31.25 * 2**30), 100e9, 12.5e9),
    "tpu7x": Tpu("TPU7x", 2.2e9, 2307e12 / 2, 7380e9 / 2, int(94.75 * 2**30), 100e9, 12.5e9 / 2, devices=2),
}
GPUS = {
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 3 * 24_564 * 2**20 // 4),
    "a100": Gpu("NVIDIA A100", "8.0", 3 * 81_920 * 2**20 // 4),
    "h100": Gpu("NVIDIA H100", "9.0", 3 * 81_559 * 2**20 // 4),
    "h200": Gpu("NVIDIA H200", "9.0", 3 * 143_771 * 2**20 // 4),
}


def chip_of(topology: str) -> Tpu | Gpu:
    """The chip of a slice of TPUs such as v5e:8x8, whose shape isn't checked, or of GPUs such as h100:8.

    Raises a UserError if it is neither.
    """
    kind, _, number = topology.partition(":")
    if kind not in TPUS and (kind not in GPUS or not re.fullmatch("[1-9][0-9]*", number)):
        raise UserError(
            f"--topology: must be a slice of {', '.join(TPUS)}, such as v5e:8x8, or a number of {', '.join(GPUS)}, "
            f"such as h100:8, but it is {topology!r}"
        )
    return (TPUS | GPUS)[kind]
