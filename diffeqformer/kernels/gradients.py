"""What of P's gradient dP = h^T dW is needed before the update: its norm, beside the gradients of h and B."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffeqformer.kernels import blocks


def gradients(
    h: Float[Array, "T E"],
    projection: Float[Array, "inputs E outputs"],
    d_weights: Float[Array, "T inputs outputs"],
    *,
    chip: blocks.Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "T E"], Float[Array, "inputs outputs"], Float[Array, ""]]:
    """The gradient of h, that of B, and the sum of squares of dP, from one read of P and dW. All three are fp32.

    The squares are of the same tiles of dP that the update is made from. From Gram matrices of h and dW, their sum
    would be cheaper, but wrong in fp32 if h hardly varies with t and the gradients of different times cancel.

    Args:
        h, projection: fp32.
        d_weights: dW in any type: converted as it is read.
        chip: what blocks are cut for (`blocks.chip_of`).
        interpret: run on any backend, as in `pallas_call`.
    """
    times, width = h.shape
    _, inputs, outputs = d_weights.shape
    cut = blocks.choose(times, width, inputs, outputs, 4 * width + 4 + d_weights.dtype.itemsize * times, chip)
    halves, float32 = cut.grid[0], jnp.float32
    d_h, d_constant, squares = pl.pallas_call(
        _kernel,
        out_shape=[
            jax.ShapeDtypeStruct((halves, times, width), float32),
            jax.ShapeDtypeStruct((inputs, outputs), float32),
            jax.ShapeDtypeStruct((halves, blocks.EIGHT, blocks.STRIP), float32),
        ],
        grid=cut.grid,
        in_specs=[blocks.whole(width, times), cut.of_projection(width), cut.of_weights(times)],
        out_specs=[blocks.per_half(times, width), cut.of_constant(), blocks.per_half(blocks.EIGHT, blocks.STRIP)],
        scratch_shapes=[cut.strip(times)],
        compiler_params=chip.parameters("parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=(4 * times + 2) * projection.size,
            transcendentals=0,
            bytes_accessed=projection.nbytes + d_weights.nbytes + 4 * inputs * outputs,
        ),
        interpret=interpret,
        name="gradients",
    )(h.T, projection, d_weights)
    return d_h.sum(0), d_constant, squares.sum()


def _kernel(h_transposed, projection, d_weights, d_h, d_constant, squares, strip):
    times, rows, columns = d_weights.shape

    @pl.when(pl.program_id(1) == 0)
    def start():
        d_h[...] = jnp.zeros_like(d_h)
        squares[...] = jnp.zeros_like(squares)

    def add_strip(lanes):
        gradient = d_weights[:, :, lanes].astype(jnp.float32)
        d_constant[:, lanes] = gradient.sum(0)
        for t in range(times):
            blocks.time(strip, t, rows)[...] = gradient[t]
        for_h, for_squares = jnp.zeros(d_h.shape[1:], jnp.float32), jnp.zeros(squares.shape[1:], jnp.float32)
        for i in range(rows):
            d_row = blocks.row(strip, i, rows)[...]  # [T, 128]
            over_outputs = (((1,), (1,)), ((), ()))
            for_h += jax.lax.dot_general(
                d_row, projection[i, :, lanes], over_outputs, preferred_element_type=jnp.float32
            )
            tile = jnp.dot(h_transposed[...], d_row, preferred_element_type=jnp.float32)  # of dP: [E, 128]
            for_squares += (tile * tile).reshape(-1, *for_squares.shape).sum(0)
        d_h[0] += for_h
        squares[0] += for_squares

    blocks.for_strips(columns, add_strip)
