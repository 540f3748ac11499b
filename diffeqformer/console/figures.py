"""Figures in one style: colours that colour-blind readers can distinguish, and labelled axes."""

import base64
import functools
import io
import warnings

import numpy as np

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#000000")  # of Okabe and Ito
FEW = 7  # ticks that fit below a panel of a report
MANY = 100  # times; more are a line, and have no ticks of their own
SHARES = {"cmap": "PuOr", "vmin": 0, "vmax": 1}  # for heat maps with a meaningful middle


def new_figure(rows: int, columns: int, size: tuple, **options):
    """A figure of the given size in inches, with its axes [rows, columns], which have a grid.

    It is made without pyplot, so a notebook's own figures and settings aren't affected.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {"axes.prop_cycle": matplotlib.cycler(color=COLOURS), "axes.labelsize": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.tick_params(labelsize=9)
        axis.grid(alpha=0.3)
        axis.set_title = functools.partial(axis.set_title, fontsize=10)  # it takes no size from the style above
    return figure, axes


def as_html(figure, what: str) -> str:
    """The figure as an HTML image."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # in a text's tokens: drawn as a box
        figure.savefig(file, format="png", dpi=110)
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def as_pixels(figure) -> np.ndarray:
    """The figure as an image, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def log_if_wide(axis, name: str = "y") -> None:
    """Make an axis, x or y, logarithmic, with plain numbers, if the values span more than a factor of three."""
    from matplotlib import ticker

    low, high = getattr(axis.dataLim, f"interval{name}")
    if 0 < 3 * low < high:
        axis.set(**{f"{name}scale": "log"})
        numbers = getattr(axis, f"{name}axis")
        numbers.set_minor_locator(ticker.LogLocator(subs=(2, 5) if high > 30 * low else (1.5, 2, 3, 4, 5, 7)))
        for level in ("major", "minor"):
            getattr(numbers, f"set_{level}_formatter")(ticker.StrMethodFormatter("{x:g}"))


def time_axis(axis, label: str, times: np.ndarray) -> None:
    """Label a horizontal axis of times or layers. Up to `FEW` of these, the last included, are its ticks."""
    axis.set_xlabel(label)
    if len(times) <= MANY:
        every = -(-len(times) // FEW)
        ticks = times[::-every][::-1]
        axis.set_xticks(ticks, [f"{time:.3g}" for time in ticks])


def column_edges(times: np.ndarray) -> np.ndarray:
    """The edges [T + 1] of columns that are centred on their times."""
    half = np.diff(times) / 2 if len(times) > 1 else np.full(1, 0.5)
    return np.concatenate([times[:1] - half[:1], times[:-1] + half[: len(times) - 1], times[-1:] + half[-1:]])


def heat_map(axis, values: np.ndarray, times: np.ndarray, title: str, quantity: str, **colours) -> None:
    """Draw values [T, H] of a quantity over time and head."""
    edges = column_edges(times)
    image = axis.pcolormesh(edges, np.arange(values.shape[1] + 1) - 0.5, values.T, rasterized=True, **colours)
    axis.figure.colorbar(image, ax=axis, label=quantity)
    axis.grid(False)
    axis.set(title=title, ylabel="head", xlim=(edges[0], edges[-1]))
    axis.yaxis.get_major_locator().set_params(integer=True)


def over_time(axis, values: np.ndarray, times: np.ndarray, title: str, quantity: str, **colours) -> None:
    """Draw values [T, H] as a heat map, or as a line between the same limits if there is a single head."""
    if values.shape[1] > 1:
        heat_map(axis, values, times, title, quantity, **colours)
    else:
        axis.plot(times, values[:, 0], "o-", markersize=3)
        axis.set(title=title, ylabel=quantity, ylim=(colours.get("vmin"), colours.get("vmax")))
