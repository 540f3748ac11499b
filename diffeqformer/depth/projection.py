"""kernel(t) = h(t) P + B for all times at once, and its derivatives: the product in which a generator's time goes.

P is stored as [inputs, E, outputs], so that one projection yields the kernels for all times as [T, inputs, outputs]
without a relayout. P is much larger than what it generates, and so is its gradient dP = sum over t of h(t) dW(t). While
T times generate fewer numbers than P has, the pair (h, dW) is a smaller form of the same gradient (`Factors`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KERNELS = ("auto", "pallas", "xla")
"""What computes with P in training (`config.kernels`).

auto: on TPUs the Pallas kernels, in every layer of whole tiles; XLA everywhere else.
pallas: the Pallas kernels in every layer. Without TPUs they are interpreted, which is slow and meant for tests.
xla: XLA alone.
"""

KERNEL, PROJECTION = "T inputs outputs", "inputs E outputs"


def project(
    h: Float[Array, "T E"], projection: Float[Array, PROJECTION], constant: Float[Array, "inputs outputs"]
) -> Float[Array, KERNEL]:
    """kernel(t) = h(t) P + B for all times at once, in fp32, from one read of P.

    Operands stay fp32. At the default precision TPUs and GPUs round them to bf16 or TF32 as they read, and add up in
    fp32. The precision is that of the context (`fields.layers.multiplying`).

    It is a matrix product batched over `inputs`, the order in which P is stored, and so are the derivatives that
    training takes (`project_with_factors`). The automatic ones, which chunks take, transpose P's gradient at the end.
    """
    batched = jnp.broadcast_to(h, (len(projection), *h.shape))
    return (batched @ projection).swapaxes(0, 1) + constant


class Factors(NamedTuple):
    """The gradient of a P as its factors, and the sum of its squares. It has the place of P in a tree of gradients."""

    h: Float[Array, "T E"]
    d_kernel: Float[Array, KERNEL]
    sum_squares: Float[Array, ""]

    def product(self) -> Float[Array, PROJECTION]:
        """dP itself, in fp32."""
        by_input = self.d_kernel.swapaxes(0, 1)  # [inputs, T, outputs]
        return jnp.broadcast_to(self.h.T, (len(by_input), *self.h.T.shape)) @ by_input


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def project_with_factors(
    h: Float[Array, "T E"],
    projection: Float[Array, PROJECTION],
    constant: Float[Array, "inputs outputs"],
    factors: Factors,
    projects: Callable[..., Array],
    gradients: Callable[..., tuple[Array, Array, Array]],
) -> Float[Array, KERNEL]:
    """Like `project`, except that dP is the gradient of `factors`, as factors. For P itself, the gradient is zero.

    Args:
        factors: of the same shapes and types as P's gradient. Their values aren't used.
        projects: (h, P, B) -> kernel. It may round the kernel to a shorter type than that of its gradient in `factors`,
            in which it is returned.
        gradients: (h, P, dW) -> (dH, dB, sum of squares of dP), in fp32.
    """
    return projects(h, projection, constant).astype(factors.d_kernel.dtype)


def _with_factors_forward(h, projection, *others):
    return project_with_factors(h, projection, *others), (h, projection)


def _with_factors_backward(_, gradients, residuals, d_kernel):
    h, projection = residuals
    d_h, d_constant, sum_squares = gradients(h, projection, d_kernel)
    return d_h, None, d_constant, Factors(h, d_kernel, sum_squares)


project_with_factors.defvjp(_with_factors_forward, _with_factors_backward)


def sum_of_squares(h: Float[Array, "T E"], d_kernel: Float[Array, KERNEL]) -> Float[Array, ""]:
    """The sum of the squares of dP without dP, from Gram matrices over time.

    With m the mean of h, and H its deviations: dP = m dB + sum over t of H(t) dW(t). Without this separation, large
    terms would cancel if h hardly varies.
    """
    precise = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    mean, d_constant = h.mean(0), d_kernel.sum(0, dtype=jnp.float32)
    deviations = h - mean
    with_constant = precise("tio,io->t", d_kernel, d_constant)
    gram = precise("tio,sio->ts", d_kernel, d_kernel)
    squares = jnp.sum(mean**2) * jnp.sum(d_constant**2)
    squares += 2 * jnp.sum(precise("te,e->t", deviations, mean) * with_constant)
    squares += jnp.sum(precise("te,se->ts", deviations, deviations) * gram)
    return jnp.maximum(squares, 0.0)
