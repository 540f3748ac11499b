"""AdamW on P in place, from tiles of its gradient dP = h^T dW that exist in VMEM only."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffeqformer.kernels import blocks


def update(
    h: Float[Array, "T E"],
    d_weights: Float[Array, "T inputs outputs"],
    projection: Float[Array, "inputs E outputs"],
    mean: Float[Array, "inputs E outputs"],
    variance: Float[Array, "inputs E outputs"],
    scalars: Float[Array, "4"],
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    chip: blocks.Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[
    Float[Array, "inputs E outputs"],
    Float[Array, "inputs E outputs"],
    Float[Array, "inputs E outputs"],
]:
    """P and its moments after one step of `optax.adamw` on clip * dP. They take the old ones' memory, if donated.

    Args:
        h, projection, mean, variance: fp32.
        d_weights: dW in any type: converted as it is read.
        scalars: fp32: the clip factor, the learning rate, 1 - b1^count and 1 - b2^count, where count is 1 in the first
            step.
        chip: what blocks are cut for (`blocks.chip_of`).
        interpret: run on any backend, as in `pallas_call`.
    """
    times, width = h.shape
    _, inputs, outputs = d_weights.shape
    state = (projection, mean, variance)
    state_bytes = 2 * sum(leaf.dtype.itemsize for leaf in state)
    cut = blocks.choose(times, width, inputs, outputs, state_bytes * width + d_weights.dtype.itemsize * times, chip)
    return pl.pallas_call(
        functools.partial(_kernel, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in state],
        grid=cut.grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            blocks.whole(width, times),
            cut.of_weights(times),
            *[cut.of_projection(width)] * 3,
        ],
        out_specs=[cut.of_projection(width)] * 3,
        input_output_aliases={3: 0, 4: 1, 5: 2},
        scratch_shapes=[cut.strip(times)],
        compiler_params=chip.parameters("parallel", "parallel"),
        cost_estimate=pl.CostEstimate(
            flops=(2 * times + 16) * projection.size,
            transcendentals=projection.size,
            bytes_accessed=d_weights.nbytes + 2 * sum(leaf.nbytes for leaf in state),
        ),
        interpret=interpret,
        name="update",
    )(scalars, h.T, d_weights, *state)


def _kernel(scalars, h_transposed, d_weights, p, m, v, new_p, new_m, new_v, strip, *, b1, b2, eps, weight_decay):
    times, rows, columns = d_weights.shape
    clip, rate, correction1, correction2 = (scalars[i] for i in range(4))

    def update_strip(lanes):
        for t in range(times):
            blocks.time(strip, t, rows)[...] = d_weights[t, :, lanes].astype(jnp.float32)
        for i in range(rows):
            d_row = blocks.row(strip, i, rows)[...]  # [T, 128]
            g = clip * jnp.dot(h_transposed[...], d_row, preferred_element_type=jnp.float32)  # [E, 128]
            old_p = p[i, :, lanes]
            mean = (1 - b1) * g + b1 * m[i, :, lanes]
            variance = (1 - b2) * (g * g) + b2 * v[i, :, lanes]
            step = (mean / correction1) / (jnp.sqrt(variance / correction2) + eps) + weight_decay * old_p
            new_p[i, :, lanes] = old_p - rate * step
            new_m[i, :, lanes] = mean
            new_v[i, :, lanes] = variance

    blocks.for_strips(columns, update_strip)
