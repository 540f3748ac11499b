"""How sharp attention is, beside the spectrum of QK from which section 5.1 of the paper infers it.

For a random state x ~ N(0, I), the score x QK x has the variance 2 Σ λ² if QK is symmetric, and the score x QK y of two
such states has Σ σ². So the paper expects sharper attention where the eigenvalues are larger.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.stats import spearmanr

from diffeqformer.analysis.attention_maps import maps
from diffeqformer.analysis.report import Section, in_float32, paragraph, table_of_heads, time_label
from diffeqformer.analysis.spectra import spectra
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures

SIZES = {"eigenvalues": "√(Σ |λ|² / K)", "singular values": "√(Σ σ² / K)"}


def relative_entropy(probabilities: Float[Array, "B H S S"]) -> Float[Array, "H"]:
    """The mean entropy of attention as a share of uniform attention's: 1 if it is uniform, 0 if it has one token.

    The first token, which has no choice, is left out.
    """
    seen = probabilities[..., 1:, :]
    entropy = -(seen * jnp.log(jnp.where(seen > 0, seen, 1))).sum(-1)
    return (entropy / jnp.log(jnp.arange(2, probabilities.shape[-1] + 1))).mean((0, 2))


@in_float32
def section(opened: Checkpoint, ids: Sequence[int], *, num_steps: int | None = None) -> Section:
    """The entropy of each head's attention in a text, beside the size of its QK."""
    model = opened.model
    times = model.grid(num_steps).times[:: len(model.solver.nodes)]  # at which steps first evaluate the attention
    entropy = np.asarray(maps(model, jnp.array([ids]), num_steps, relative_entropy))
    found, width = spectra(model, times, feed_forward=False)["QK"], model.field.head_width
    squares = {"eigenvalues": np.abs(found.eigenvalues) ** 2, "singular values": found.singular_values**2}
    sizes = {name: np.broadcast_to(np.sqrt(each.sum(-1) / width), entropy.shape) for name, each in squares.items()}
    correlations = {name: float(spearmanr(entropy, size, axis=None).statistic) for name, size in sizes.items()}
    figure, [axes] = figures.new_figure(1, 3, (13, 3.6))
    figures.over_time(axes[0], entropy, times, "entropy of attention", "share of uniform attention's")
    figures.time_axis(axes[0], time_label(model), times)
    at = np.broadcast_to(times[:, None], entropy.shape)
    for axis, (name, size) in zip(axes[1:], sizes.items()):
        points = axis.scatter(size, entropy, c=at, s=14, cmap="viridis")
        axis.set(title=f"against the {name} of QK", xlabel=SIZES[name], ylabel="share of uniform attention's")
        figures.log_if_wide(axis, "x")
    figure.colorbar(points, ax=axes[2], label=time_label(model))
    columns = {"entropy": entropy} | {SIZES[name]: size for name, size in sizes.items()}
    shown = [
        paragraph(
            "The entropy of a head's attention in the text, as a share of uniform attention's: 1 is uniform, 0 has one "
            "token. Spearman's correlation over all heads and steps with the size of QK is "
            f"{correlations['eigenvalues']:.2f} for eigenvalues (-1 if larger ones always mean sharper attention), and "
            f"{correlations['singular values']:.2f} for singular values."
        ),
        figures.as_html(figure, "entropy of attention"),
        table_of_heads(time_label(model), times, entropy, columns),
    ]
    print(f"sharpness: correlation with the eigenvalues of QK {correlations['eigenvalues']:.2f}", flush=True)
    numbers = {"entropy": entropy.tolist(), "correlation": correlations}
    numbers |= {name: size.tolist() for name, size in sizes.items()}
    return Section("sharpness", "Sharpness of attention", "".join(shown), numbers, {"entropy": entropy, "times": times})
