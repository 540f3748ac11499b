"""What TPU chips can do, by their data sheets."""

from typing import NamedTuple

from diffeqformer.errors import UserError


class Chip(NamedTuple):
    """A kind of chip.

    clock: cycles in a second. They make the largest matrix products that the compiler expects reach `peak`.
    peak: dense bfloat16 FLOP/s.
    memory_rate: bytes of memory in a second.
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


CHIPS = {
    "v5e": Chip(1.5e9, 197e12, 820e9, int(15.75 * 2**30), 50e9, 3.125e9),
    "v5p": Chip(1.75e9, 459e12, 2460e9, int(95.74 * 2**30), 100e9, 6.25e9),
    "v6e": Chip(1.75e9, 918e12, 1640e9, int(31.25 * 2**30), 100e9, 12.5e9),
}


def chip_of(topology: str) -> Chip:
    """The kind of chip of a topology such as v5e:8x8.

    Raises:
        UserError: if it isn't known.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise UserError(f"--topology: must begin with {', '.join(CHIPS)}, such as v5e:8x8, but it is {topology!r}")
    return CHIPS[kind]
