"""The figures of an analysis, all in one style: colours that colour-blind readers can tell apart, axes with names."""

import base64
import io
import warnings

import numpy as np

from diffeqformer.analysis.clustering import QUANTILES
from diffeqformer.analysis.spectra import Spectrum

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#000000")
"""Okabe and Ito's colours."""
LABELS = 130  # of tokens that can be read side by side
SHARES = {"cmap": "PuOr", "vmin": 0, "vmax": 1}  # of heat maps whose middle means something


def new_figure(rows: int, columns: int, size: tuple, **options):
    """A figure of that size in inches with its axes [rows, columns]; without pyplot, so that a notebook's own stay as they were."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"axes.prop_cycle": matplotlib.cycler(color=COLOURS), "axes.titlesize": 10, "axes.labelsize": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.tick_params(labelsize=9)
    return figure, axes


def as_html(figure, what: str) -> str:
    """The figure inside of HTML."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a text's token: drawn as a box
        figure.savefig(file, format="png", dpi=110)
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def log_if_wide(axis) -> None:
    """A logarithmic vertical axis with numbers as one writes them, if what is drawn spans more than a factor of three."""
    from matplotlib import ticker

    low, high = axis.dataLim.intervaly
    if 0 < 3 * low < high:
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
        for level in ("major", "minor"):
            getattr(axis.yaxis, f"set_{level}_formatter")(ticker.StrMethodFormatter("{x:g}"))


def time_axis(axis, label: str) -> None:
    """Name a horizontal axis of times; layers are whole numbers."""
    axis.set_xlabel(label)
    axis.xaxis.get_major_locator().set_params(integer=label == "layer")


def column_edges(times: np.ndarray) -> np.ndarray:
    """Where columns [T + 1] begin and end that lie around their times."""
    half = np.diff(times) / 2 if len(times) > 1 else np.full(1, 0.5)
    return np.concatenate([times[:1] - half[:1], times[:-1] + half[: len(times) - 1], times[-1:] + half[-1:]])


def heat_map(figure, axis, values: np.ndarray, times: np.ndarray, title: str, **colours) -> None:
    """Values [T, H] over time and head."""
    edges = column_edges(times)
    image = axis.pcolormesh(edges, np.arange(values.shape[1] + 1) - 0.5, values.T, rasterized=True, **colours)
    figure.colorbar(image, ax=axis)
    axis.set(title=title, ylabel="head", xlim=(edges[0], edges[-1]))
    axis.yaxis.get_major_locator().set_params(integer=True)


def over_time(figure, axis, values: np.ndarray, times: np.ndarray, title: str, **colours) -> None:
    """Values [T, H] as a heat map; of a single head as a line."""
    if values.shape[1] > 1:
        heat_map(figure, axis, values, times, title, **colours)
    else:
        axis.plot(times, values[:, 0], "o-", markersize=3)
        axis.set(title=title)
        axis.grid(alpha=0.3)


def spectrum(name: str, found: Spectrum, times: np.ndarray, time_label: str, heads: list[int]):
    """One product's spectrum over time: real parts, moduli and the complex plane; and three numbers of each head."""
    figure, axes = new_figure(2, 3, (13, 7))
    (real, modulus, plane), (positive, radius, rank) = axes
    values, only = found.eigenvalues, found.eigenvalues.shape[1] == 1
    for place, head in enumerate(heads):
        shown = values[:, head].real
        label = None if only else f"head {head}"
        real.plot(times, shown, ".", markersize=2.5, color=COLOURS[place % len(COLOURS)])
        real.plot([], [], "o", color=COLOURS[place % len(COLOURS)], label=label)
    if not only:
        real.legend(fontsize=8)
    real.axhline(0, color="grey", linewidth=0.8)
    real.set(title=f"{name}: real parts of eigenvalues", ylabel="real part")
    sizes = np.abs(values).reshape(len(values), -1)
    for share, label in ((1.0, "largest"), (0.9, "90 % are below"), (0.5, "median")):
        modulus.plot(times, np.quantile(sizes, share, axis=1), "o-", markersize=3, label=label)
    log_if_wide(modulus)
    modulus.legend(fontsize=8)
    modulus.set(title=f"{name}: moduli" + ("" if only else " of all heads"), ylabel="modulus")
    chosen = values[:, heads]
    at = np.broadcast_to(times[:, None, None], chosen.shape)
    points = plane.scatter(chosen.real, chosen.imag, c=at, s=4, cmap="viridis")
    figure.colorbar(points, ax=plane, label=time_label)
    plane.axvline(0, color="grey", linewidth=0.8)
    plane.set(title="the same in the complex plane", xlabel="real part", ylabel="imaginary part")
    over_time(figure, positive, found.positive_share(), times, "share with a positive real part", **SHARES)
    over_time(figure, radius, found.radius(), times, "spectral radius", **colours_of(found.radius()))
    over_time(figure, rank, found.effective_rank(), times, f"effective rank (of {values.shape[-1]})")
    edges = column_edges(times)
    for axis in (real, modulus, positive, radius, rank):
        axis.set_xlim(edges[0], edges[-1])
        time_axis(axis, time_label)
    for axis in (real, modulus, plane):
        axis.grid(alpha=0.3)
    return figure


def colours_of(values: np.ndarray) -> dict:
    """Logarithmic colours where values span more than a factor of ten."""
    from matplotlib import colors

    low, high = values.min(), values.max()
    return {"norm": colors.LogNorm(low, high)} if 0 < 10 * low < high else {}


def induction(scores: np.ndarray, qk: Spectrum, ov: Spectrum, times: np.ndarray, time_label: str):
    """Induction scores of all heads beside the signs of the spectra from which the paper reads induction heads."""
    figure, [axes] = new_figure(1, 3, (13, 3.6))
    heat_map(figure, axes[0], scores, times, "induction score", vmin=0)
    for axis, name, found in ((axes[1], "QK", qk), (axes[2], "OV", ov)):
        share = np.broadcast_to(found.positive_share(), scores.shape)
        heat_map(figure, axis, share, times, f"{name}: share with a positive real part", **SHARES)
    for axis in axes:
        time_axis(axis, time_label)
    return figure


def sensitivity(labels: list[str], measures: dict[str, np.ndarray]):
    """Each measure [S] of how the last token depends on the tokens before it, one panel below the other; what is infinite is left out."""
    labels = [label.replace(" ", "\u2423") for label in labels[:-1]]
    figure, axes = new_figure(len(measures), 1, (13, 1.9 * len(measures)), sharex=True)
    for (name, values), [axis] in zip(measures.items(), axes, strict=True):
        axis.plot(np.where(np.isfinite(values), values, np.nan)[:-1], "o", markersize=4)
        axis.set(title=name)
        axis.grid(alpha=0.3)
        axis.margins(x=0.01)
    every = -(-len(labels) // LABELS)
    axes[-1][0].set_xlabel("tokens before the last" + (f"; one in {every} is named" if every > 1 else ""))
    shown = range(0, len(labels), every)
    names = [labels[i].replace("$", r"\$") for i in shown]  # which would begin a formula
    size = min(9, 800 / len(names))  # points, of the 900 or so below the panels
    axes[-1][0].set_xticks(shown, names, rotation=90 if len(names) > 20 else 45, fontsize=size)
    return figure


def quantile_bands(axis, times: np.ndarray, quantiles: np.ndarray, title: str, label: str, marker: str = "") -> None:
    """Quantiles [T, q] of relative distances over time."""
    for index, share in enumerate(QUANTILES):
        style = {"color": COLOURS[index], "label": f"{share:.0%} are closer", "marker": marker, "markersize": 3}
        axis.plot(times, quantiles[:, index], **style)
    axis.set(title=title, ylim=(0, None))
    time_axis(axis, label)
    axis.grid(alpha=0.3)


def trajectories(states: dict[str, np.ndarray], quantiles: dict[str, np.ndarray], times: np.ndarray, title: str):
    """Of each simulation [T, N, 3], the paths of its particles in 3-D as shares of their spread, and the clustering measure below."""
    figure, axes = new_figure(2, len(states), (3.1 * len(states), 6.6), sharey="row")
    for column, (name, path) in enumerate(states.items()):
        axes[0, column].remove()
        axis = figure.add_subplot(2, len(states), column + 1, projection="3d")
        path = path - path.mean(1, keepdims=True)
        path = path / np.sqrt((path**2).sum(-1).mean(-1))[:, None, None]
        for particle in range(path.shape[1]):
            axis.plot(*path[:, particle].T, color=COLOURS[particle % len(COLOURS)], linewidth=0.5, alpha=0.5)
        axis.scatter(*path[-1].T, color="black", s=8, depthshade=False)
        axis.set_title(name)
        axis.set(xticklabels=[], yticklabels=[], zticklabels=[])
        quantile_bands(axes[1, column], times, quantiles[name], "", "t")
    axes[1, 0].set_ylabel("pairwise distance / its rms")
    figure.suptitle(title)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    return figure


def real_clustering(measures: dict[str, np.ndarray], sizes: np.ndarray, times: np.ndarray, time_label: str):
    """The clustering measures [T + 1, q] along a model's own trajectory, and how far apart its tokens are."""
    figure, [axes] = new_figure(1, len(measures) + 1, (13, 3.6))
    for axis, (name, quantiles) in zip(axes, measures.items(), strict=False):
        quantile_bands(axis, times, quantiles, f"pairwise distance of {name} / its rms", time_label, "o")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(QUANTILES))
    axes[-1].plot(times, sizes, "o-", markersize=3)
    axes[-1].set(title="rms of the pairwise distances of states")
    time_axis(axes[-1], time_label)
    axes[-1].grid(alpha=0.3)
    return figure
