"""A model's dynamics during training: spectral radii and the clustering measure (docs/analysis.md)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from threadpoolctl import threadpool_limits

from diffeqformer.analysis.clustering import QUANTILES, directions, relative_distances
from diffeqformer.data.store import Split
from diffeqformer.depth.low_rank import merge
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.parallel.hosts import is_first
from diffeqformer.training.step import Program

WINDOWS, TOKENS = 4, 128  # windows of the validation split, and tokens of each whose distances are measured


def radius(products: Float[np.ndarray, "*T K K"]) -> float:
    """The largest modulus of an eigenvalue; NaN if not all of them are finite."""
    return float(np.abs(np.linalg.eigvals(products)).max()) if np.isfinite(products).all() else np.nan


def product(a: Float[Array, "... M K"], b: Float[Array, "... K N"]) -> Float[Array, "... M N"]:
    """A product of matrices in full precision."""
    return jnp.matmul(a, b, precision="highest")


def first_windows(split: Split, sequence_length: int) -> Int[np.ndarray, "W S"]:
    """The first `WINDOWS` windows of a split, or as many as it has."""
    return split.evaluation_batch(0, min(WINDOWS, split.size // sequence_length), sequence_length)


@functools.partial(jax.jit, static_argnames=("graph", "everywhere"))
def measured(graph, params, weights, tokens, everywhere):
    """Every head's query-key and output-value products, and the first and last states of some tokens of each window.

    Args:
        everywhere: the sharding of the result.
    """
    model, length = nnx.merge(graph, params), tokens.shape[1]
    with multiplying("highest"):
        layers = merge(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights.layers))
    query, key, value, out = model.field.head_matrices(layers)
    states = jnp.stack([model.embed(tokens, Context()), model.last_state(tokens, weights, Context())])
    chosen = np.linspace(0, length - 1, min(TOKENS, length)).astype(int)
    found = product(key.swapaxes(-1, -2), query), product(out, value), states.astype(jnp.float32)[:, :, chosen]
    return jax.lax.with_sharding_constraint(found, everywhere)


class Recorder:
    """Measures the dynamics of parameters on a few windows of a split.

    Args:
        program: the compiled functions of the run.
        tokens: the windows (`first_windows`).
    """

    def __init__(self, program: Program, tokens: Int[np.ndarray, "W S"]):
        self.program, self.tokens = program, tokens

    def __call__(self, params: dict) -> dict[str, float]:
        """Measure the dynamics. Every process must call this. The first gets results, the others an empty dictionary:

        qk_radius, ov_radius: the largest modulus of an eigenvalue of any head at any time
        closest, median_distance: the lowest and the middle quantile of the clustering measure, for the directions
            of tokens' last states
        spread: the root mean square distance between last states, divided by that between first states
        """
        graph, everywhere = self.program.graph, self.program.everywhere
        tokens = jax.device_put(self.tokens, everywhere)
        found = measured(graph, params, self.program.weights(params, None), tokens, everywhere)
        if not is_first():
            return {}
        qk, ov, states = (np.asarray(leaf.addressable_data(0)) for leaf in found)
        with threadpool_limits(1, "blas"):  # threads wait for one another in small products
            qk_radius, ov_radius = radius(qk), radius(ov)
        quantiles, _ = relative_distances(directions(states[1]))
        (_, first), (_, last) = map(relative_distances, states)
        return {
            "qk_radius": qk_radius,
            "ov_radius": ov_radius,
            "closest": float(quantiles[:, 0].mean()),
            "median_distance": float(quantiles[:, len(QUANTILES) // 2].mean()),
            "spread": float((last / np.maximum(first, 1e-30)).mean()),
        }
