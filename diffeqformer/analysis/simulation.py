"""Do particles cluster under attention alone? The paper's simulation (sections 5.1 and C.8).

Attention alone, of one head, moves particles in space:

    dx_i/dt = sum_j softmax_j(<Q(t) x_i, K(t) x_j>) V(t) x_j,   Q(t) = s(t) Q, and so K and V

with random Q, K and V and a polynomial s. The paper gives the degrees, 0 to 4, the numbers of particles, dimensions and
steps, and a uniform start. Coefficients, horizon and the start's range are our choice. s(t) = (t / horizon)^degree ends
at the same size for every degree, but the higher the degree, the smaller its sum over the steps. As a control, V and
the scores, which grow with s^2, can be scaled so that every degree has the sums of degree 0.
"""

import numpy as np
from jaxtyping import Float
from scipy.special import softmax

from diffeqformer.analysis.clustering import QUANTILES, quantile_bands, relative_distances
from diffeqformer.analysis.report import Section, paragraph
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures

HORIZON = 10.0  # end of the simulated time
DRAWS, SHOWN_EVERY = 20, 4  # in the report: draws, and steps between measurements


def simulate(
    degree: int,
    *,
    equal_total: bool = False,
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
        equal_total: V and the scores have the same sums over the steps for every degree, instead of the same final
            size.
        draws: of starts and weights, which don't depend on the degree.
    """
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (draws, particles, dimensions))
    query, key, value = random.randn(3, draws, dimensions, dimensions) / dimensions**0.5
    states, sizes = [x], (np.arange(1, steps + 1) / steps) ** degree
    for size in sizes:
        sharpness = size**2 / (np.mean(sizes**2) if equal_total else 1)
        strength = size / (np.mean(sizes) if equal_total else 1)
        scores = sharpness * (x @ query) @ (x @ key).swapaxes(-1, -2)
        x = x + horizon / steps * strength * softmax(scores, axis=-1) @ x @ value
        states.append(x)
    return np.stack(states, axis=1)


def simulations(equal_total: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each power of the paper, the particles [T, N, 3] of one draw, and the clustering measure [T, q].

    The draw shown is the one of `DRAWS` that clusters most; the measure is the mean over all draws.
    """
    names = ["constant", *(f"degree {degree}" for degree in range(1, 5))]
    paths, means = {}, {}
    for degree, name in enumerate(names):
        draws = simulate(degree, equal_total=equal_total, draws=DRAWS)
        quantiles = np.stack([relative_distances(draw[::SHOWN_EVERY])[0] for draw in draws])
        paths[name], means[name] = draws[quantiles[:, -1, 1].argmin()], quantiles.mean(0)
    return paths, means


def picture(states: dict[str, np.ndarray], quantiles: dict[str, np.ndarray], times: np.ndarray, title: str):
    """Draw the paths of each simulation's particles [T, N, 3] in 3-D, divided by their spread, above the measure."""
    figure, axes = figures.new_figure(2, len(states), (3.1 * len(states), 6.6), sharey="row")
    for column, (name, path) in enumerate(states.items()):
        axes[0, column].remove()
        axis = figure.add_subplot(2, len(states), column + 1, projection="3d")
        path = path - path.mean(1, keepdims=True)
        path = path / np.sqrt((path**2).sum(-1).mean(-1))[:, None, None]
        for particle in range(path.shape[1]):
            axis.plot(*path[:, particle].T, linewidth=0.5, alpha=0.5)
        axis.scatter(*path[-1].T, color="black", s=8, depthshade=False)
        axis.set_title(name, fontsize=10)
        axis.set(xticklabels=[], yticklabels=[], zticklabels=[])
        quantile_bands(axes[1, column], times, quantiles[name])
        axes[1, column].set(xlabel="simulated time")
    axes[1, 0].set_ylabel("pairwise distance / its rms")
    figure.suptitle(title)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    return figure


def section(opened: Checkpoint, *, num_steps: int | None = None) -> Section:
    """Whether particles cluster in the paper's simulation, which is the same for every checkpoint."""
    shown = [
        paragraph(
            "The paper's simulation, which is the same for every checkpoint: particles under attention alone, with "
            f"weights that are constant or grow as a power of t. The upper row shows the draw of {DRAWS} that clusters "
            "most, centred and divided by its spread at every time; the lower row shows the mean of all draws."
        )
    ]
    numbers, arrays = {"quantiles": QUANTILES}, {}
    for kind, equal_total, title in (
        ("equal_end", False, "weights that end at the same size"),
        ("equal_total", True, "the same integrals of V and of the scores over time"),
    ):
        paths, means = simulations(equal_total)
        of = np.linspace(0, HORIZON, len(means["constant"]))
        shown.append(figures.as_html(picture(paths, means, of, title), "simulated particles"))
        numbers[kind] = {name: one[-1].tolist() for name, one in means.items()}
        arrays |= {f"{kind}/{name}": one for name, one in means.items()}
        arrays |= {f"{kind}/{name}/paths": path for name, path in paths.items()}
    return Section("simulation", "Simulated clustering", "".join(shown), numbers, arrays)
