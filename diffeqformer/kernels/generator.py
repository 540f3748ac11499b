"""Pallas kernels for TPUs that read and update the hypernetwork's P, [inputs, E, outputs], where it lies.

A generator's P is much larger than the weights that it generates, so its time is that of moving P. XLA moves it more
often than needed. Three kernels take its place for one generated layer, and each reads P once:

    project      kernel(t) = h(t) P + B for all times, in the compute type and in the order that it is used in
    gradients    the gradients of h and B, and the norm of P's gradient
    update       AdamW on P

P's gradient dP = h^T dW never exists: the pair (h, dW) stands for it, and tiles of dP come and go in VMEM.

They work on one device's part of a layer, unless `blocks.reason_against` has something against it. Blocks are cut for a
`chip` (`blocks.chip_of`). With `interpret`, as in `pallas_call`, they run on any backend. Matrix products have fp32
operands, which TPUs round to bf16 as they read them, as they do for XLA.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffeqformer.kernels import blocks

Projection, Weights = Float[Array, "inputs E outputs"], Float[Array, "T inputs outputs"]


def project(
    h: Float[Array, "T E"],
    projection: Projection,
    constant: Float[Array, "inputs outputs"],
    dtype: jax.typing.DTypeLike,
    *,
    chip: blocks.Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> Weights:
    """The kernels of a layer at all times: [T, inputs, outputs] in `dtype`, fp32 or bf16.

    Everything else is fp32. The result is rounded once, at the end. Not to be differentiated.
    """
    times, width = h.shape
    inputs, outputs = constant.shape
    size = jnp.dtype(dtype).itemsize
    cut = blocks.choose(times, width, inputs, outputs, 4 * width + 4 + size * times, chip)
    weights = jax.ShapeDtypeStruct((times, inputs, outputs), dtype)
    return pl.pallas_call(
        _project,
        out_shape=weights,
        grid=cut.grid,
        in_specs=[blocks.whole(times, width), cut.of_projection(width), cut.of_constant()],
        out_specs=cut.of_weights(times),
        scratch_shapes=[cut.strip(times)],
        compiler_params=chip.parameters("parallel", "parallel"),
        cost_estimate=pl.CostEstimate(
            flops=2 * times * projection.size,
            transcendentals=0,
            bytes_accessed=projection.nbytes + constant.nbytes + weights.size * size,
        ),
        interpret=interpret,
        name="project",
    )(h, projection, constant)


def _project(h, projection, constant, weights, strip):
    times, rows, columns = weights.shape

    def project_strip(lanes):
        for i in range(rows):
            blocks.row(strip, i, rows)[...] = jnp.dot(
                h[...], projection[i, :, lanes], preferred_element_type=jnp.float32
            )
        for t in range(times):
            weights[t, :, lanes] = (blocks.time(strip, t, rows)[...] + constant[:, lanes]).astype(weights.dtype)

    blocks.for_strips(columns, project_strip)


def gradients(
    h: Float[Array, "T E"],
    projection: Projection,
    d_weights: Weights,
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
    """
    times, width = h.shape
    _, inputs, outputs = d_weights.shape
    cut = blocks.choose(times, width, inputs, outputs, 4 * width + 4 + d_weights.dtype.itemsize * times, chip)
    halves, float32 = cut.grid[0], jnp.float32
    d_h, d_constant, squares = pl.pallas_call(
        _gradients,
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


def _gradients(h_transposed, projection, d_weights, d_h, d_constant, squares, strip):
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


def update(
    h: Float[Array, "T E"],
    d_weights: Weights,
    projection: Projection,
    mean: Projection,
    variance: Projection,
    scalars: Float[Array, "4"],
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    chip: blocks.Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Projection, Projection, Projection]:
    """P and its moments after one step of `optax.adamw` on clip * dP. They take the old ones' memory, if donated.

    Args:
        h, projection, mean, variance: fp32.
        d_weights: dW in any type: converted as it is read.
        scalars: fp32: the clip factor, the learning rate, 1 - b1^count and 1 - b2^count, where count is 1 in the first
            step.
    """
    times, width = h.shape
    _, inputs, outputs = d_weights.shape
    state = (projection, mean, variance)
    cut = blocks.choose(
        times, width, inputs, outputs, 6 * 4 * width + d_weights.dtype.itemsize * times, chip
    )  # P, moments
    return pl.pallas_call(
        functools.partial(_update, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
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


def _update(scalars, h_transposed, d_weights, p, m, v, new_p, new_m, new_v, strip, *, b1, b2, eps, weight_decay):
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
