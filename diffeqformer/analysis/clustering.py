"""Do tokens cluster as they move? The measure of the paper's simulation (section C.8) along a model's trajectory."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.spatial.distance import pdist

from diffeqformer.analysis.report import Section, in_float32, paragraph, time_label
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures
from diffeqformer.transformer import weights_at

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def relative_distances(
    states: Float[np.ndarray, "states N D"],
) -> tuple[Float[np.ndarray, "states quantiles"], Float[np.ndarray, "states"]]:
    """At each time, the `QUANTILES` of all pairwise distances, divided by their root mean square, and the latter.

    A swarm that only spreads or shrinks keeps its quantiles. If most particles are in a few clusters, the lower
    quantiles fall to 0. If all particles are in one place, all quantiles are 0.
    """
    distances = np.stack([pdist(x) for x in states.astype(np.float64)])
    sizes = np.sqrt((distances**2).mean(-1))
    return np.quantile(distances, QUANTILES, axis=-1).T / np.where(sizes > 0, sizes, 1)[:, None], sizes


def directions(states: Float[np.ndarray, "states N D"]) -> Float[np.ndarray, "states N D"]:
    """The states scaled to length 1. A block's norms see little else, and one distant token doesn't hide the others."""
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    return states / np.where(lengths > 0, lengths, 1)


def quantile_bands(axis, times: np.ndarray, quantiles: np.ndarray, marker: str = "") -> None:
    """Quantiles [T, q] of relative distances over time."""
    for index, share in enumerate(QUANTILES):
        style = {"color": figures.COLOURS[index], "label": f"{share:.0%} are closer", "marker": marker, "markersize": 3}
        axis.plot(times, quantiles[:, index], **style)
    axis.set(ylim=(0, None))


@in_float32
def section(opened: Checkpoint, ids: list[int], *, num_steps: int | None = None) -> Section:
    """Whether the tokens of a text cluster along the model's trajectory."""
    model, tokens = opened.model, jnp.asarray(ids)
    states = np.asarray(model.trajectory(tokens[None], weights_at(model, num_steps)))[:, 0]
    found, sizes = relative_distances(states)
    measures = {"states": found, "directions": relative_distances(directions(states))[0]}
    times = np.concatenate([[0.0], model.grid(num_steps).ends])
    figure, [axes] = figures.new_figure(1, len(measures) + 1, (13, 3.6))
    for axis, (name, quantiles) in zip(axes, measures.items(), strict=False):
        quantile_bands(axis, times, quantiles, "o")
        axis.set(title=f"pairwise distance of {name} / its rms", ylabel="distance / its rms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    axes[-1].plot(times, sizes, "o-", markersize=3)
    axes[-1].set(title="rms of the pairwise distances of states", ylabel="distance")
    for axis in axes:
        figures.time_axis(axis, time_label(model), times)
    shown = [
        paragraph(
            "Pairwise distances of the text's tokens, divided by their root mean square, for the states and for their "
            "directions x / |x|. Clusters would bring the lower quantiles to 0."
        ),
        figures.as_html(figure, "clustering of tokens"),
    ]
    numbers = {"quantiles": QUANTILES, "rms_distance": sizes.tolist()}
    numbers |= {name: quantiles.tolist() for name, quantiles in measures.items()}
    arrays = {**measures, "rms_distance": sizes, "times": times}
    return Section("clustering", "Clustering", "".join(shown), numbers, arrays)
