"""How a generated layer is cut into blocks, which a kernel works on one after the other.

TPUs lay out the last two axes of an array in tiles of 8 x 128. A block is a rectangle of a layer's weights: some
inputs (rows, in eights) and some outputs (columns, in multiples of 128), with all of E and all times. A kernel walks
through a block in strips of 128 columns.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

EIGHT, STRIP = 8, 128
MEBIBYTE = 2**20
MOST_TIMES, MOST_ROWS = 256, 16  # both are unrolled, so that programs of more take long to compile


@dataclasses.dataclass(frozen=True)
class Chip:
    """What blocks depend on.

    limit: the bytes of VMEM that a kernel gets.
    cores: how many of a device share a grid.
    tile: rows of a tile of bfloat16, where an array's rows are a multiple of them.
    """

    limit: int
    cores: int
    tile: int = EIGHT

    @property
    def budget(self) -> int:
        """The bytes for blocks, or fewer: what is left holds a strip and the stack, in proportion to T."""
        return self.limit * 7 // 8

    def parameters(self, *semantics: str) -> pltpu.CompilerParams:
        """The compiler's parameters for a kernel whose grid has these dimension semantics."""
        return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=self.limit)


def chip_of(device: jax.Device) -> Chip:
    """What a device gives to a kernel.

    The limit is what the compiler grants by default: 16 MiB, which is all that a core of v4 has; of the 128 of v5e and
    the 64 of v5p, XLA keeps other arrays in the rest. v6e and tpu7x, with twice and more of v5e's bandwidth, grant 32.
    """
    kind = device.device_kind
    limit = 32 * MEBIBYTE if kind.startswith(("TPU v6", "TPU7")) else 16 * MEBIBYTE
    return Chip(limit, getattr(device, "num_cores", 1), 2 * EIGHT if kind.startswith("TPU7") else EIGHT)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of rows x columns, numbered along the columns first, and the grid in which a kernel goes through them.

    The grid is [halves, blocks in each]: a half for each core, or one if they can't share the blocks equally.
    """

    rows: int
    columns: int
    across: int  # blocks beside each other
    grid: tuple[int, int]

    def of_weights(self, times: int) -> pl.BlockSpec:
        """Blocks of an array [times, inputs, outputs]."""
        return pl.BlockSpec((times, self.rows, self.columns), lambda half, step: (0, *self._place(half, step)))

    def of_projection(self, width: int) -> pl.BlockSpec:
        """Blocks of an array [inputs, E, outputs]."""

        def place(half, step):
            row, column = self._place(half, step)
            return row, 0, column

        return pl.BlockSpec((self.rows, width, self.columns), place)

    def of_constant(self) -> pl.BlockSpec:
        """Blocks of an array [inputs, outputs]."""
        return pl.BlockSpec((self.rows, self.columns), self._place)

    def strip(self, times: int):
        """Scratch memory for one strip of [times, rows, columns], with all rows of a time beside each other.

        One row more than needed stays empty: with a stride that is a power of two, all times of one row would lie in
        the same few banks of VMEM, which are read one after the other.
        """
        return pltpu.VMEM((times * (self.rows + 1), STRIP), jnp.float32)

    def _place(self, half, step) -> tuple:
        block = half * self.grid[1] + step
        return jax.lax.div(block, self.across), jax.lax.rem(block, self.across)


def whole(*shape: int) -> pl.BlockSpec:
    """A small array that every block sees whole."""
    return pl.BlockSpec(shape, lambda half, step: (0,) * len(shape))


def per_half(*shape: int) -> pl.BlockSpec:
    """One part of an array [halves, ...] for each half of the grid."""
    return pl.BlockSpec((1, *shape), lambda half, step: (half, *[0] * len(shape)))


def for_strips(columns: int, body: Callable) -> None:
    """Call `body` with the slice of each strip of `columns`, two at a time to hide the latency of matrix products."""

    def strip(index, _):
        body(pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP))

    jax.lax.fori_loop(0, columns // STRIP, strip, None, unroll=2)


def row(strip, index: int, rows: int):
    """All times of one row of a strip: [T, 128]."""
    return strip.at[pl.ds(index, len(strip) // (rows + 1), stride=rows + 1), :]


def time(strip, index: int, rows: int):
    """All rows of one time of a strip: [rows, 128]."""
    return strip.at[pl.ds(index * (rows + 1), rows), :]


def bytes_beside(times: int, width: int, rows: int) -> int:
    """The bytes of VMEM beside blocks with so many rows: of a strip, and of the compiler's stack.

    The stack holds h, its gradient and the products of a strip. Of all kernels `gradients` in fp32 took most.
    """
    return 4 * times * (rows + 1) * STRIP + 80 * times * pl.cdiv(width, STRIP) * STRIP


def choose(times: int, width: int, inputs: int, outputs: int, bytes_per_weight: int, chip: Chip) -> Blocks | None:
    """The largest blocks that fit twice, as one is computed while the next is on its way; None if none fits.

    The same number for each core goes before size. Wide ones go before high ones.

    Args:
        bytes_per_weight: what a kernel keeps in VMEM for a pair of an input and an output.
    """

    def fits(rows: int, columns: int) -> bool:
        both = 2 * bytes_per_weight * rows * columns
        return both <= chip.budget and both + bytes_beside(times, width, rows) <= chip.limit

    found = [
        (inputs * outputs // (rows * columns) % chip.cores == 0, rows * columns, columns)
        for rows in range(EIGHT if inputs % chip.tile else chip.tile, min(inputs, MOST_ROWS) + 1, EIGHT)
        for columns in range(STRIP, outputs + 1, STRIP)
        if inputs % rows == outputs % columns == 0 and fits(rows, columns)
    ]
    if not found:
        return None
    shared, size, columns = max(found)
    halves, number = chip.cores if shared else 1, inputs * outputs // size
    return Blocks(size // columns, columns, outputs // columns, (halves, number // halves))


def reason_against(times: int, width: int, inputs: int, outputs: int, chip: Chip) -> str | None:
    """Why the kernels can't be used for a layer (the part of it on one device), or None if they can.

    With E, inputs or outputs off the tiles, an array in its usual layout would have to be copied for a kernel.
    """
    for name, size, of in (("E", width, EIGHT), ("inputs", inputs, EIGHT), ("outputs", outputs, STRIP)):
        if size % of:
            return f"{name} = {size} isn't a multiple of {of}"
    if times > MOST_TIMES:
        return f"T = {times} is more than {MOST_TIMES}"
    bytes_of_update = 6 * 4 * width + 4 * times  # the kernel that needs most
    if choose(times, width, inputs, outputs, bytes_of_update, chip) is None:
        return f"blocks of E = {width} and T = {times} don't fit in VMEM"
    return None
