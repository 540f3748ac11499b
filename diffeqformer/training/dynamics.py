"""What is recorded of a model's dynamics while it trains: spectral radii and the clustering measure (docs/analysis.md)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from diffeqformer.analysis.clustering import QUANTILES, directions, relative_distances
from diffeqformer.data.store import Split
from diffeqformer.fields.layers import Context
from diffeqformer.parallel.hosts import is_first
from diffeqformer.training.step import Program

WINDOWS, TOKENS = 4, 128  # of the validation split, and of each of them, whose distances are measured


def radius(products: Float[np.ndarray, "*T K K"]) -> float:
    """The largest modulus of an eigenvalue; NaN if not all of them are finite."""
    return float(np.abs(np.linalg.eigvals(products)).max()) if np.isfinite(products).all() else np.nan


def recorder(program: Program, split: Split, sequence_length: int) -> Callable[[dict], dict[str, float]]:
    """A function of the parameters, that every process has to call, which gives

    qk_radius, ov_radius: the largest modulus of an eigenvalue of any head at any time;
    closest, median_distance: the lowest and the middle one of the clustering measure's quantiles, of the directions of tokens' last states;
    spread: by how much the root mean square of the distances between states has grown from the first to the last one.

    Other processes than the first get an empty dictionary.
    """
    replicated = NamedSharding(program.batch_sharding.mesh, PartitionSpec())
    count = min(WINDOWS, split.size // sequence_length)
    tokens = split.evaluation_batch(0, count, sequence_length)[0]
    chosen = np.linspace(0, sequence_length - 1, min(TOKENS, sequence_length)).astype(int)

    def measure(params, weights, tokens):
        model = nnx.merge(program.graph, params)
        layers = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights.layers)
        query, key, value, out = model.field.head_matrices(layers)
        states = [model.embed(tokens, Context()), model.last_state(tokens, weights, Context())]
        exact = lambda a, b: jnp.matmul(a, b, precision="highest")  # noqa: E731
        return (
            exact(key.swapaxes(-1, -2), query),
            exact(out, value),
            jnp.stack(states).astype(jnp.float32)[:, :, chosen],
        )

    measure = jax.jit(measure, out_shardings=replicated)

    def record(params: dict) -> dict[str, float]:
        found = measure(params, program.weights(params, None), jax.device_put(tokens, replicated))
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

    return record
