"""What chips can do, by their data sheets."""

from typing import NamedTuple

from diffeqformer.errors import UserError


class Tpu(NamedTuple):
    """A kind of TPU.

    clock: cycles in a second. They make the largest matrix products that the compiler expects reach `peak`.
    peak: dense bfloat16 FLOP/s.
    memory_rate: bytes of memory in a second; that of v5p as JAX states it (`jax.experimental.pallas.tpu`).
    memory: bytes that the compiler gives a program.
    link_rate: bytes in a second to one neighbour.
    network_rate: bytes in a second to other slices.
    """

    clock: float
    peak: float
    memory_rate: float
    memory: int
    link_rate: float
    network_rate: float


TPUS = {
    "v5e": Tpu(1.5e9, 197e12, 820e9, int(15.75 * 2**30), 50e9, 3.125e9),
    "v5p": Tpu(1.75e9, 459e12, 2460e9, int(95.74 * 2**30), 100e9, 6.25e9),
    "v6e": Tpu(1.75e9, 918e12, 1640e9, int(31.25 * 2**30), 100e9, 12.5e9),
}


class Gpu(NamedTuple):
    """A kind of GPU.

    name: the beginning of JAX's `device_kind`.
    capability: its compute capability.
    memory: bytes, as its driver states them.
    """

    name: str
    capability: str
    memory: int

    @property
    def capacity(self) -> int:
        """The bytes of it that JAX takes by default; XLA_CLIENT_MEM_FRACTION can be another share."""
        return 3 * self.memory // 4


GPUS = {
    "a100": Gpu("NVIDIA A100", "8.0", 81_920 * 2**20),
    "h100": Gpu("NVIDIA H100", "9.0", 81_559 * 2**20),
    "h200": Gpu("NVIDIA H200", "9.0", 143_771 * 2**20),
}


def tpu_of(topology: str) -> Tpu:
    """The kind of TPU of a topology such as v5e:8x8.

    Raises:
        UserError: if it isn't known.
    """
    kind = topology.partition(":")[0]
    if kind not in TPUS:
        raise UserError(
            f"--topology: must be a slice of {', '.join(TPUS)}, such as v5e:8x8, or a number of {', '.join(GPUS)}, "
            f"such as h100:8, but it is {topology!r}"
        )
    return TPUS[kind]


def gpus_of(topology: str) -> tuple[Gpu, int] | None:
    """The kind and the number of GPUs of a topology such as h100:8; None for other kinds of chips.

    Raises:
        UserError: if the number is none.
    """
    kind, _, number = topology.partition(":")
    if kind not in GPUS:
        return None
    if not number.isdecimal() or not int(number):
        raise UserError(f"--topology: must give a number of GPUs, such as {kind}:8, but it is {topology!r}")
    return GPUS[kind], int(number)
