"""Do tokens cluster as they move? The paper's simulation (sections 5.1 and C.8), and its measure of a trained model.

Attention alone, of one head, moves particles in space:

    dx_i/dt = sum_j softmax_j(<Q(t) x_i, K(t) x_j>) V(t) x_j,   Q(t) = s(t) Q, and so K and V

with random Q, K and V and a polynomial s. The paper gives the degrees, 0 to 4, and the numbers of particles and steps.
Coefficients, horizon and start are our choice. s(t) = (t / horizon)^degree ends at the same size for every degree, but
the higher the degree, the smaller its integral over time. As controls, V and the scores, which grow with s^2, can be
scaled so that every degree has the integral over time of degree 0.
"""

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffeqformer.analysis.common import check_text, in_float32, time_label
from diffeqformer.analysis.report import Section, paragraph
from diffeqformer.checkpoint import Checkpoint
from diffeqformer.console import figures
from diffeqformer.transformer import weights_at

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HORIZON = 10.0  # end of the simulated time
DRAWS, SHOWN_EVERY = 20, 4  # in the report: draws, and steps between measurements


def simulate(
    degree: int,
    *,
    equal_total: Collection[str] = (),
    seed: int = 0,
    draws: int = 1,
    particles: int = 40,
    dimensions: int = 3,
    steps: int = 200,
    horizon: float = HORIZON,
) -> Float[np.ndarray, "draws states particles dimensions"]:
    """The positions of particles at time 0 and after every step of Euler's method, in float64.

    The start is uniform in [-1, 1].

    Args:
        degree: degree of the polynomial with which the weights grow; 0 keeps them constant.
        equal_total: "V" or "scores" or both. These have the same integral over time for every degree, instead of the
            same final size.
        seed, draws: of starts and weights, which don't depend on the degree.
    """
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (draws, particles, dimensions))
    query, key, value = random.randn(3, draws, dimensions, dimensions) / dimensions**0.5
    states = [x]
    for step in range(1, steps + 1):
        size = (step / steps) ** degree
        sharpness = size**2 * (2 * degree + 1 if "scores" in equal_total else 1)
        strength = size * (degree + 1 if "V" in equal_total else 1)
        scores = sharpness * (x @ query) @ (x @ key).swapaxes(-1, -2)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + horizon / steps * strength * (share / share.sum(-1, keepdims=True)) @ x @ value
        states.append(x)
    return np.stack(states, axis=1)


def relative_distances(
    states: Float[np.ndarray, "states *draws N D"],
) -> tuple[Float[np.ndarray, "states *draws quantiles"], Float[np.ndarray, "states *draws"]]:
    """At each time, the `QUANTILES` of all pairwise distances, divided by their root mean square, and the latter.

    A swarm that only spreads or shrinks keeps its quantiles. If most particles are in a few clusters, the lower
    quantiles fall to 0. If all particles are in one place, all quantiles are 0.
    """
    above = np.triu_indices(states.shape[-2], 1)
    quantiles, sizes = [], []
    for x in states.astype(np.float64):
        x = x - x.mean(-2, keepdims=True)
        squares = (x**2).sum(-1)
        squares = squares[..., :, None] + squares[..., None, :] - 2 * x @ x.swapaxes(-1, -2)
        distances = np.sqrt(np.maximum(squares, 0)[..., *above])
        sizes.append(np.sqrt((distances**2).mean(-1)))
        found = np.quantile(distances, QUANTILES, axis=-1) / np.where(sizes[-1] > 0, sizes[-1], 1)
        quantiles.append(np.moveaxis(found, 0, -1))
    return np.stack(quantiles), np.stack(sizes)


def directions(states: Float[np.ndarray, "states N D"]) -> Float[np.ndarray, "states N D"]:
    """The states scaled to length 1. A block's norms see little else, and one distant token doesn't hide the others."""
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    return states / np.where(lengths > 0, lengths, 1)


def simulations(equal_total: Collection[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each power of the paper, the particles [T, N, 3] of one draw, and the clustering measure [T, q].

    The draw shown is the one of `DRAWS` that clusters most; the measure is the mean over all draws.
    """
    names = ["constant", *(f"degree {degree}" for degree in range(1, 5))]
    paths, means = {}, {}
    for degree, name in enumerate(names):
        draws = simulate(degree, equal_total=equal_total, draws=DRAWS)
        quantiles, _ = relative_distances(draws[:, ::SHOWN_EVERY].swapaxes(0, 1))
        paths[name], means[name] = draws[quantiles[-1, :, 1].argmin()], quantiles.mean(1)
    return paths, means


def quantile_bands(axis, times: np.ndarray, quantiles: np.ndarray, title: str, label: str, marker: str = "") -> None:
    """Quantiles [T, q] of relative distances over time."""
    for index, share in enumerate(QUANTILES):
        style = {"color": figures.COLOURS[index], "label": f"{share:.0%} are closer", "marker": marker, "markersize": 3}
        axis.plot(times, quantiles[:, index], **style)
    axis.set(title=title, ylim=(0, None))
    figures.time_axis(axis, label)
    axis.grid(alpha=0.3)


def picture_of_distances(measures: dict[str, np.ndarray], sizes: np.ndarray, times: np.ndarray, axis_label: str):
    """The clustering measures [T + 1, q] along a model's own trajectory, and the spread of its tokens."""
    figure, [axes] = figures.new_figure(1, len(measures) + 1, (13, 3.6))
    for axis, (name, quantiles) in zip(axes, measures.items(), strict=False):
        quantile_bands(axis, times, quantiles, f"pairwise distance of {name} / its rms", axis_label, "o")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    axes[-1].plot(times, sizes, "o-", markersize=3)
    axes[-1].set(title="rms of the pairwise distances of states")
    figures.time_axis(axes[-1], axis_label)
    axes[-1].grid(alpha=0.3)
    return figure


def picture_of_simulations(
    states: dict[str, np.ndarray], quantiles: dict[str, np.ndarray], times: np.ndarray, title: str
):
    """Draw the paths of each simulation's particles [T, N, 3] in 3-D, divided by their spread, above the measure."""
    figure, axes = figures.new_figure(2, len(states), (3.1 * len(states), 6.6), sharey="row")
    for column, (name, path) in enumerate(states.items()):
        axes[0, column].remove()
        axis = figure.add_subplot(2, len(states), column + 1, projection="3d")
        path = path - path.mean(1, keepdims=True)
        path = path / np.sqrt((path**2).sum(-1).mean(-1))[:, None, None]
        for particle in range(path.shape[1]):
            axis.plot(
                *path[:, particle].T, color=figures.COLOURS[particle % len(figures.COLOURS)], linewidth=0.5, alpha=0.5
            )
        axis.scatter(*path[-1].T, color="black", s=8, depthshade=False)
        axis.set_title(name)
        axis.set(xticklabels=[], yticklabels=[], zticklabels=[])
        quantile_bands(axes[1, column], times, quantiles[name], "", "t")
    axes[1, 0].set_ylabel("pairwise distance / its rms")
    figure.suptitle(title)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    return figure


@in_float32
def section(opened: Checkpoint, ids: list[int], *, num_steps: int | None = None) -> Section:
    """Whether tokens cluster along the model's trajectory, and particles in the paper's simulation."""
    model, tokens = opened.model, jnp.asarray(ids)
    check_text(model, ids)
    states = np.asarray(model.trajectory(tokens[None], weights_at(model, num_steps)))[:, 0]
    found, sizes = relative_distances(states)
    measures = {"states": found, "directions": relative_distances(directions(states))[0]}
    times = np.concatenate([[0.0], model.grid(num_steps).ends])
    shown = [
        paragraph(
            "Pairwise distances of the text's tokens, divided by their root mean square, from the embedding to the "
            "last state. They are shown for the states and for their directions x / |x|, which a single token far from "
            "all others doesn't affect. Clusters would bring the lower quantiles to 0."
        ),
        figures.as_html(picture_of_distances(measures, sizes, times, time_label(model)), "clustering of tokens"),
        paragraph(
            "The paper's simulation, which is the same for every checkpoint: 40 particles under attention alone, 200 "
            "steps, with weights that are constant or grow as a power of t. Coefficients, horizon and start are our "
            "choice. The "
            f"upper row shows for each degree the draw of {DRAWS} that clusters most, centred and divided by its "
            "spread at every time; the lower row shows the mean of all draws."
        ),
    ]
    numbers = {"quantiles": QUANTILES, "rms_distance": sizes.tolist()}
    numbers |= {name: quantiles.tolist() for name, quantiles in measures.items()}
    arrays = {**measures, "rms_distance": sizes, "times": times}
    for kind, equal_total, title in (
        ("equal_end", (), "weights that end at the same size"),
        ("equal_total_of_v", ("V",), "the same integral of V over time, Q and K that end at the same size"),
        ("equal_total", ("V", "scores"), "the same integrals of V and of the scores over time"),
    ):
        paths, means = simulations(equal_total)
        of = np.linspace(0, HORIZON, len(means["constant"]))
        shown.append(figures.as_html(picture_of_simulations(paths, means, of, title), "simulated particles"))
        numbers[f"simulated_{kind}"] = {name: one[-1].tolist() for name, one in means.items()}
        arrays |= {f"simulated_{kind}/{name}": one for name, one in means.items()}
        arrays |= {f"simulated_{kind}/{name}/paths": path for name, path in paths.items()}
    return Section("clustering", "Clustering", "".join(shown), numbers, arrays)
