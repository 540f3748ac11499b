"""The largest exponents of the flow of all tokens of a text, equation (8) of the paper, and the flow's dimension."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from threadpoolctl import threadpool_limits

from diffeqformer.analysis import lyapunov
from diffeqformer.analysis.common import in_float32
from diffeqformer.analysis.report import Section, paragraph
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import walk
from diffeqformer.transformer import Transformer, weights_at

CHUNK = 16  # number of tangent vectors that are carried at once
TOLERANCE = 1e-3  # iterations end when none changes an exponent by more


@functools.partial(jax.jit, static_argnames=("solver", "field", "count"))
def _there_and_back(solver, field, weights, x, directions, count):
    """One pass of the iteration: the new directions, and logarithms of the largest singular values of dx(1)/dx(0)."""
    _, push = jax.linearize(lambda x: walk(solver, field, weights, x[None], Context())[0], x)
    pull = jax.linear_transpose(push, x)

    def apply(linear, vectors):
        at_once = lyapunov.rows_at_once(len(x), CHUNK)
        return jax.lax.map(linear, vectors.T.reshape(-1, *x.shape), batch_size=at_once).reshape(-1, x.size).T

    images, triangle = jnp.linalg.qr(apply(push, directions))
    found = jnp.log(jnp.linalg.svd(triangle, compute_uv=False)[:count])
    return jnp.linalg.qr(apply(lambda vector: pull(vector)[0], images))[0], found


def flow_exponents(
    model: Transformer, tokens: Int[Array, "S"], count: int, num_steps: int | None = None, passes: int = 100
) -> tuple[Float[np.ndarray, "k"], float]:
    """The `count` largest exponents of the flow of all tokens over the whole depth, equation (8) at t = 1, in order.

    They are the logarithms of the largest singular values of dx(1)/dx(0), found by subspace iteration. Each pass
    carries tangent vectors forward, pulls their images back and makes them orthogonal. The estimates approach the
    exponents from below.

    Args:
        passes: their maximum number. Usually a pass changes no exponent by more than `TOLERANCE` before.

    Returns:
        the exponents, and by how much the last pass changed them.
    """
    weights, x = weights_at(model, num_steps), model.embed(tokens[None], Context())[0]
    count = min(count, x.size)
    more = min(2 * count + 8, x.size)  # the last vectors of a subspace are the least exact
    directions = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (x.size, more), jnp.float32))[0]
    found, change = np.full(count, np.inf), np.inf
    with threadpool_limits(1, "blas"):
        while change > TOLERANCE and passes:
            directions, new = _there_and_back(model.solver, model.field, weights, x, directions, count)
            new = np.asarray(new, np.float64)
            change = float(np.abs(new - found)[new != found].max(initial=0))
            found, passes = new, passes - 1
    return found, change


def kaplan_yorke(exponents: Float[np.ndarray, "k"]) -> float | None:
    """The Kaplan-Yorke dimension from a flow's largest exponents; None if there are too few to define it, or if NaN.

    @inproceedings{kaplan1979chaotic,
      title={Chaotic behavior of multidimensional difference equations},
      author={Kaplan, James L and Yorke, James A},
      booktitle={Functional Differential Equations and Approximation of Fixed Points},
      year={1979}}
    """
    exponents = np.sort(np.asarray(exponents, np.float64))[::-1]
    sums = np.cumsum(exponents)
    if np.isnan(sums).any() or (sums >= 0).all():
        return None
    whole = int(np.argmax(sums < 0))  # the first sum below zero has one exponent too many
    return whole + (sums[whole - 1] / -exponents[whole] if whole else 0.0)


def picture(exponents: Float[np.ndarray, "k"]):
    """Plot the exponents by rank."""
    figure, [[axis]] = figures.new_figure(1, 1, (7, 3.4))
    axis.plot(range(1, len(exponents) + 1), exponents, "o-", markersize=3)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(title="largest exponents of the flow, over the whole depth", xlabel="rank", ylabel="exponent")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    return figure


@in_float32
def section(opened: Checkpoint, ids: list[int], *, num_steps: int | None = None, flow: int = 32) -> Section:
    """The `flow` largest exponents of the flow of all tokens of a text."""
    model, tokens = opened.model, jnp.asarray(ids)
    largest, change = flow_exponents(model, tokens, flow, num_steps)
    dimension = kaplan_yorke(largest)
    said = "not defined by these" if dimension is None else f"{dimension:.3f}"
    shown = [
        paragraph(
            f"The {len(largest)} largest exponents (equation 8, at the end of the depth) of all {tokens.size} tokens "
            "together: the logarithms of a small change's growth over the whole depth in its fastest directions. "
            f"Kaplan-Yorke dimension: {said}. The last iteration changed the exponents by at most {change:.1g}."
        ),
        figures.as_html(picture(largest), "exponents of the flow"),
    ]
    print(f"flow: largest exponent {largest[0]:.3f}; Kaplan-Yorke dimension {said}", flush=True)
    numbers = {"exponents": largest.tolist(), "last_change": change, "kaplan_yorke_dimension": dimension}
    return Section("flow", "Exponents of the flow", "".join(shown), numbers, {"exponents": largest})
