"""Eigenvalues and singular values of all heads from each product's small side, compared with the dense D x D product.

    python benchmarks/spectra.py --config=configs/large.py          # 36 times, 20 heads of 64; :gpt has them in layers

Parameters are random. The time for all heads includes generating the weights at all times, and compiling this. The
dense method is timed on a few heads, since all of them would take far too long. Both use one BLAS thread.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from threadpoolctl import threadpool_limits

from diffeqformer.analysis.spectra import pairs_over_time, spectra
from diffeqformer.config import check_overrides, explain
from diffeqformer.console import command_line
from diffeqformer.transformer import Transformer

CONFIG = command_line.define_config()
DENSE = flags.DEFINE_integer("dense", 4, "Heads that the dense method is timed on.")


def main() -> None:
    config, random = CONFIG.value, np.random.default_rng(0)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config.model, nnx.Rngs(0))))

    def fill(leaf):
        return jnp.asarray(np.float32(0.02) * random.standard_normal(leaf.shape, np.float32))

    model = nnx.merge(graph, jax.tree.map(fill, shapes))
    start = time.monotonic()
    found = spectra(model, model.grid().ends, feed_forward=False)["QK"]
    seconds, count = time.monotonic() - start, 2 * found.eigenvalues[..., 0].size
    print(
        f"{config.name}: {count:,} products in {seconds:.1f} s, {1000 * seconds / count:.1f} ms each, weights included",
        flush=True,
    )
    left, right = next(pairs_over_time(model, model.grid().ends, False))["QK"]
    start, differences = time.monotonic(), []
    with threadpool_limits(1, "blas"):
        for head in range(DENSE.value):
            product = left[0, head] @ right[0, head]
            np.linalg.svd(product, compute_uv=False)
            dense, values = np.linalg.eigvals(product), found.eigenvalues[0, head]
            dense = dense[np.argsort(-np.abs(dense))][: len(values)]
            differences.append(np.abs(values[:, None] - dense).min(1).max() / np.abs(dense[0]))
    each = (time.monotonic() - start) / DENSE.value
    print(
        f"dense: {each:.2f} s each, measured on {DENSE.value}: {each * count / seconds:,.0f} times as long; "
        f"eigenvalues differ by at most {max(differences):.1e} of the largest"
    )


if __name__ == "__main__":
    command_line.run(main, check_overrides, explain)
