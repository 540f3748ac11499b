"""A grid of depth that a tolerance determines once, on calibration text.

The grid is the same for every text. So a token's probability depends on earlier tokens only, not on the rest of the
batch.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from diffeqformer.data.files import Layout, read_texts
from diffeqformer.data.local_files import matching_files
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import in_type
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.solvers.heun import HEUN
from diffeqformer.transformer import Transformer, split_model, weights_at

MOST = 16  # no grid has more than this times the trained number of steps


def calibration_tokens(
    patterns: str, tokenizer: Tokenizer, window: int, count: int = 8, layout: Layout = Layout()
) -> Int[Array, "count window"]:
    """The first windows of local text files.

    Raises:
        UserError: if no file matches, or there is less than one window of text.
    """
    ids, files = [], matching_files(patterns, "--calibration_files")
    for text in itertools.chain.from_iterable(read_texts(path, layout) for path in files):
        ids += [*tokenizer.encode(text), tokenizer.end_of_text]
        if len(ids) >= window * count:
            break
    count = min(count, len(ids) // window)
    if not count:
        raise UserError(
            f"--calibration_files: must have at least one window of {window} tokens, but they have {len(ids)}"
        )
    return jnp.asarray(ids[: window * count], jnp.int32).reshape(count, window)


@functools.partial(jax.jit, static_argnames=("graph",))
def _try(graph, params, features, dt, x):
    """Heun's step of length dt, and the root mean square of its difference from Euler's step."""
    model = nnx.merge(graph, params)
    layers = in_type(model.depth.from_features(features), model.dtype)
    start, end = (jax.tree.map(lambda leaf, node=node: leaf[node], layers) for node in (0, 1))
    with multiplying(model.precision):
        following = HEUN.step(model.field, [start, end], x, dt, Context())
        embedded = x + dt * model.field(start, x, Context())  # also Heun's first evaluation, which is computed once
    return following, jnp.sqrt(jnp.mean((following - embedded) ** 2))


@functools.partial(jax.jit, static_argnames=("graph",))
def _last_state(graph, params, tokens, weights):
    return nnx.merge(graph, params).last_state(tokens, weights, Context())


def choose_times(model: Transformer, tokens: Int[Array, "B S"], tolerance: float) -> tuple[float, ...]:
    """The ends of steps of different lengths, chosen so that Heun's method meets a tolerance.

    The error of a step is its distance from the embedded Euler step. Its root mean square over all tokens is at most
    the tolerance times the root mean square of the last state on the trained grid. The next step's length follows from
    the square root of the error.

    @book{hairer1993solving,
      title={Solving Ordinary Differential Equations {I}: Nonstiff Problems},
      author={Hairer, Ernst and N{\\o}rsett, Syvert P. and Wanner, Gerhard},
      edition={2nd}, publisher={Springer}, year={1993}}

    Args:
        model: with generated weights.
        tokens: calibration text.
        tolerance: positive.

    Raises:
        UserError: if this takes more than `MOST` times the trained number of steps.
    """
    (graph, params), depth = split_model(model), model.depth
    last_state = _last_state(graph, params, tokens, weights_at(model))
    x = model.embed(tokens, Context()).astype(jnp.float32)
    scale, t, dt, ends = jnp.sqrt(jnp.mean(last_state.astype(jnp.float32) ** 2)), 0.0, 1 / model.num_steps, []
    shortest = 1 / (MOST * model.num_steps)
    while t < 1:
        last = dt > (1 - t) * (1 - 1e-6)  # rounding leaves no step of its own
        dt = 1 - t if last else dt
        features = depth.features(Grid.of(np.array([t, t + dt])))
        following, error = _try(graph, params, features, jnp.float32(dt), x)
        error = float(error / scale)
        if error <= tolerance:
            x, t = following, 1.0 if last else t + dt
            ends.append(t)
        elif dt <= shortest:
            raise UserError(
                f"--tolerance: {tolerance:g} can't be met with {MOST * model.num_steps} steps: at t = {t:.3f} steps of "
                f"{dt:.2g} still have an error of {error:.1g}; take a larger one"
            )
        growth = 0.9 * (tolerance / error) ** 0.5 if error else 5.0
        dt = max(shortest, dt * min(5.0, max(0.2, growth)))
    return tuple(ends)
