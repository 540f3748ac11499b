"""Do particles cluster under attention alone? The paper's simulation (sections 5.1 and C.8), without any model.

    python experiments/simulation.py      # a table and two pictures, in runs/simulation; a minute

Attention alone, of one head, moves particles in space:

    dx_i/dt = sum_j softmax_j(<Q(t) x_i, K(t) x_j>) V(t) x_j,   Q(t) = s(t) Q, and so K and V

with random Q, K and V and a polynomial s. The paper gives the degrees, 0 to 4, the numbers of particles, dimensions and
steps, and a uniform start. Coefficients, horizon and the start's range are our choice. s(t) = (t / horizon)^degree ends
at the same size for every degree, but the higher the degree, the smaller its sum over the steps. As a control, V and
the scores, which grow with s^2, can be scaled so that every degree has the sums of degree 0.
"""

import pathlib

import numpy as np
from absl import app, flags
from scipy.special import softmax
from scipy.stats import sem

from diffeqformer.analysis.clustering import QUANTILES, quantile_bands, relative_distances
from diffeqformer.console import figures
from diffeqformer.console.results import markdown_table

OUTPUT = flags.DEFINE_string("output", "runs/simulation", "Folder of the results.")
DRAWS = flags.DEFINE_integer("draws", 400, "Draws of starts and weights in the table.", lower_bound=2)

HORIZON = 10.0  # end of the simulated time
DEGREES = range(5)
DRAWN, SHOWN_EVERY = 20, 4  # in the pictures: draws, and steps between measurements
KINDS = {  # of weights: whether their totals are equal, by the name of the picture
    "clustering": ("with the same last size", False),
    "clustering_equal_total": ("with the same integral over time of V and of the scores", True),
}


def simulate(
    degree: int,
    *,
    equal_total: bool = False,
    draws: int = 1,
    particles: int = 40,
    dimensions: int = 3,
    steps: int = 200,
    horizon: float = HORIZON,
) -> np.ndarray:
    """The positions of particles at time 0 and after each Euler step, [draws, states, particles, dimensions], float64.

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


def name_of(degree: int) -> str:
    return f"degree {degree}" if degree else "constant"


def closest_quarter(degree: int, equal_total: bool, draws: int) -> tuple[float, float]:
    """The lower quartile of the last distances / their root mean square: the mean over draws, and its error."""
    last = simulate(degree, equal_total=equal_total, draws=draws)[:, -1]
    quartiles = relative_distances(last)[0][:, 1]
    return float(quartiles.mean()), float(sem(quartiles))


def picture(equal_total: bool):
    """Draw the particles' paths of the draw that clusters most, and the mean over all draws of their distances."""
    columns = len(DEGREES)
    figure, axes = figures.new_figure(2, columns, (3.1 * columns, 6.6), sharey="row")
    for degree in DEGREES:
        draws = simulate(degree, equal_total=equal_total, draws=DRAWN)
        quantiles = np.stack([relative_distances(draw[::SHOWN_EVERY])[0] for draw in draws])
        axes[0, degree].remove()
        draw_paths(
            figure.add_subplot(2, columns, degree + 1, projection="3d"), draws[quantiles[:, -1, 1].argmin()], degree
        )
        times = np.linspace(0, HORIZON, quantiles.shape[1])
        quantile_bands(axes[1, degree], times, quantiles.mean(0))
        axes[1, degree].set(xlabel="simulated time")
    axes[1, 0].set_ylabel("pairwise distance / its rms")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    return figure


def draw_paths(axis, path: np.ndarray, degree: int) -> None:
    """Draw particles [states, particles, 3], centred and divided by their spread at every time."""
    path = path - path.mean(1, keepdims=True)
    path = path / np.sqrt((path**2).sum(-1).mean(-1))[:, None, None]
    for particle in range(path.shape[1]):
        axis.plot(*path[:, particle].T, linewidth=0.5, alpha=0.5)
    axis.scatter(*path[-1].T, color="black", s=8, depthshade=False)
    axis.set_title(name_of(degree), fontsize=10)
    axis.set(xticklabels=[], yticklabels=[], zticklabels=[])


def main(_) -> None:
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, (title, equal_total) in KINDS.items():
        figure = picture(equal_total)
        figure.suptitle(f"weights {title}")
        figure.savefig(folder / f"{name}.png", dpi=110)
        found = [closest_quarter(degree, equal_total, DRAWS.value) for degree in DEGREES]
        rows.append([title, *(f"{mean:.2f} ± {error:.3f}" for mean, error in found)])
    table = markdown_table(["weights", *map(name_of, DEGREES)], rows)
    (folder / "table.md").write_text(f"{table}\n")
    print(f"{table}\n\nThe table and the pictures are in {folder}")


if __name__ == "__main__":
    app.run(main)
