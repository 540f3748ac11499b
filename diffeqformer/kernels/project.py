"""kernel(t) = h(t) P + B for all times, from one read of P, in the type and the order that it is used in."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffeqformer.kernels import blocks


def project(
    h: Float[Array, "T E"],
    projection: Float[Array, "inputs E outputs"],
    constant: Float[Array, "inputs outputs"],
    dtype: jax.typing.DTypeLike,
    *,
    chip: blocks.Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "T inputs outputs"]:
    """The kernels of a layer at all times: [T, inputs, outputs] in `dtype`, fp32 or bf16.

    Everything else is fp32. The result is rounded once, at the end. Not to be differentiated.

    Args:
        chip: what blocks are cut for (`blocks.chip_of`).
        interpret: run on any backend, as in `pallas_call`.
    """
    times, width = h.shape
    inputs, outputs = constant.shape
    size = jnp.dtype(dtype).itemsize
    cut = blocks.choose(times, width, inputs, outputs, 4 * width + 4 + size * times, chip)
    weights = jax.ShapeDtypeStruct((times, inputs, outputs), dtype)
    return pl.pallas_call(
        _kernel,
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


def _kernel(h, projection, constant, weights, strip):
    times, rows, columns = weights.shape

    def project_strip(lanes):
        for i in range(rows):
            blocks.row(strip, i, rows)[...] = jnp.dot(
                h[...], projection[i, :, lanes], preferred_element_type=jnp.float32
            )
        for t in range(times):
            weights[t, :, lanes] = (blocks.time(strip, t, rows)[...] + constant[:, lanes]).astype(weights.dtype)

    blocks.for_strips(columns, project_strip)
