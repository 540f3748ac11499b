"""The largest exponents of the flow of all tokens of a text, equation (8) of the paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, svds

from diffeqformer.analysis.report import Section, in_float32, paragraph
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.console import figures
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import walk
from diffeqformer.transformer import Transformer, weights_at


@functools.partial(jax.jit, static_argnames=("solver", "field"))
def push_forward(solver, field, weights, x, vector):
    """Where the flow carries a tangent vector at x(0)."""
    return jax.jvp(lambda x: walk(solver, field, weights, x[None], Context())[0], (x,), (vector,))[1]


@functools.partial(jax.jit, static_argnames=("solver", "field"))
def pull_back(solver, field, weights, x, vector):
    """What a cotangent vector at x(1) is pulled back to."""
    return jax.vjp(lambda x: walk(solver, field, weights, x[None], Context())[0], x)[1](vector)[0]


def flow_exponents(
    model: Transformer, tokens: Int[Array, "S"], count: int, num_steps: int | None = None
) -> Float[np.ndarray, "k"]:
    """The `count` largest exponents of the flow of all tokens over the whole depth, equation (8) at t = 1, in order.

    They are the logarithms of the largest singular values of dx(1)/dx(0), found by Lanczos iterations (ARPACK), each of
    which carries a tangent vector forward and pulls its image back. A UserError says if they don't converge.
    """
    weights, x = weights_at(model, num_steps), model.embed(tokens[None], Context())[0]

    def product(derivative, vector):
        found = derivative(model.solver, model.field, weights, x, jnp.asarray(vector, jnp.float32).reshape(x.shape))
        if not jnp.isfinite(found).all():
            raise NotFinite
        return np.asarray(found).ravel()

    forward, back = (functools.partial(product, derivative) for derivative in (push_forward, pull_back))
    jacobian = LinearOperator((x.size, x.size), forward, rmatvec=back, dtype=np.float32)
    start = np.random.RandomState(0).standard_normal(x.size).astype(np.float32)
    try:
        found = svds(jacobian, min(count, x.size - 1), v0=start, return_singular_vectors=False)
    except ArpackNoConvergence:
        raise UserError(f"--flow: the iterations for {count} exponents don't converge; take fewer") from None
    return np.log(np.sort(found.astype(np.float64))[::-1])


@in_float32
def section(opened: Checkpoint, ids: list[int], *, num_steps: int | None = None, flow: int = 32) -> Section:
    """The `flow` largest exponents of the flow of all tokens of a text."""
    model, tokens = opened.model, jnp.asarray(ids)
    largest = flow_exponents(model, tokens, flow, num_steps)
    figure, [[axis]] = figures.new_figure(1, 1, (7, 3.4))
    axis.plot(range(1, len(largest) + 1), largest, "o-", markersize=3)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(title="largest exponents of the flow, over the whole depth", xlabel="rank", ylabel="exponent")
    axis.xaxis.get_major_locator().set_params(integer=True)
    shown = [
        paragraph(
            f"The {len(largest)} largest exponents (equation 8, at the end of the depth) of all {tokens.size} tokens "
            "together: the logarithms of a small change's growth over the whole depth in its fastest directions."
        ),
        figures.as_html(figure, "exponents of the flow"),
    ]
    print(f"flow: largest exponent {largest[0]:.3f}", flush=True)
    numbers = {"exponents": largest.tolist()}
    return Section("flow", "Exponents of the flow", "".join(shown), numbers, {"exponents": largest})
