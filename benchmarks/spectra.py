"""Eigenvalues of all heads from the small side of each product, against the dense D x D product.

    python benchmarks/spectra.py            # GPT-large: 36 steps, 20 heads of 64, width 1280

The weights are random. The dense way is timed on a few heads, for on all it would take far too long.
"""

import time

import numpy as np
from absl import app, flags

from diffeqformer.analysis.spectra import spectrum

STEPS = flags.DEFINE_integer("steps", 36, "Times, or layers.")
HEADS = flags.DEFINE_integer("heads", 20, "Heads.")
WIDTH = flags.DEFINE_integer("width", 1280, "Model width D.")
DENSE = flags.DEFINE_integer("dense", 4, "Heads of the first step that the dense way takes.")


def main(_) -> None:
    random, size = np.random.RandomState(0), WIDTH.value // HEADS.value
    shape = (1, HEADS.value, WIDTH.value, size)
    seconds, first = 0.0, None
    for _ in range(STEPS.value):
        for _ in ("QK", "OV"):
            left, right = (random.randn(*shape).astype(np.float32) * WIDTH.value**-0.5 for _ in range(2))
            start = time.monotonic()
            found = spectrum(left, right.swapaxes(-1, -2))
            seconds += time.monotonic() - start
            first = first or (left, right, found)
    count = 2 * STEPS.value * HEADS.value
    print(
        f"small side: {count} products in {seconds:.1f} s, {1000 * seconds / count:.1f} ms each, with singular values"
    )
    left, right, found = first
    start, differences = time.monotonic(), []
    for head in range(DENSE.value):
        dense = np.linalg.eigvals(left[0, head] @ right[0, head].T)
        np.linalg.svd(left[0, head] @ right[0, head].T, compute_uv=False)
        values, dense = found.eigenvalues[0, head], dense[np.argsort(-np.abs(dense))][:size]
        differences.append(np.abs(values[:, None] - dense).min(1).max() / np.abs(dense[0]))
    each = (time.monotonic() - start) / DENSE.value
    print(
        f"dense: {each:.2f} s each, measured on {DENSE.value}; {each * count / seconds:,.0f} times as long; eigenvalues differ by "
        f"at most {max(differences):.1e} of the largest"
    )


if __name__ == "__main__":
    app.run(main)
