"""Spectra over time of the products of weights that move a state: sections 5.1 and E of the paper.

    QK = W_Q W_K^T of a head: x_i QK x_j is the attention score of token i for token j (before 1 / sqrt(K))
    OV = W_V W_O of a head: x_j OV is the value that token i receives from token j
    up·down, gate·down: the products of the feed-forward's matrices, as if its activation were linear

Biases and norms are ignored. So are rotary positions, which have no effect between a token and itself. A product of a
D x n and an n x D matrix has the same nonzero eigenvalues as the n x n product in the opposite order, so a head's
eigenvalues are computed from K x K matrices. Eigenvalues are kept complex.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Complex, Float
from threadpoolctl import threadpool_limits

from diffeqformer.analysis.report import Section, in_float32, paragraph, table, time_label
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import figures
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import merge
from diffeqformer.depth.weights import in_type
from diffeqformer.transformer import Transformer, split_model

CHUNK = 12  # number of times whose weights exist at once
PRODUCTS = ("QK", "OV", "up·down", "gate·down")  # in the order in which they are shown


class Spectrum(NamedTuple):
    """The spectrum of one product at T times, sorted by size. A product of the feed-forward counts as one head.

    eigenvalues: the n largest by modulus, complex64, where n is the smaller side of the two matrices; the others are 0.
    singular_values: the n largest, fp32.
    """

    eigenvalues: Complex[np.ndarray, "T H n"]
    singular_values: Float[np.ndarray, "T H n"]

    def radius(self) -> Float[np.ndarray, "T H"]:
        """The largest modulus of an eigenvalue."""
        return np.abs(self.eigenvalues[..., 0])

    def positive_share(self) -> Float[np.ndarray, "T H"]:
        """The share of the eigenvalues with a positive real part."""
        return (self.eigenvalues.real > 0).mean(-1)

    def effective_rank(self) -> Float[np.ndarray, "T H"]:
        """The effective rank: the exponential of the entropy of the singular values' shares of their sum, from 1 to n.

        @inproceedings{roy2007effective,
          title={The effective rank: A measure of effective dimensionality},
          author={Roy, Olivier and Vetterli, Martin},
          booktitle={15th European Signal Processing Conference},
          year={2007}}
        """
        sums = self.singular_values.sum(-1, keepdims=True)
        shares = self.singular_values / np.where(sums > 0, sums, 1)
        return np.exp(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1))


def spectrum(left: Float[np.ndarray, "T H D n"], right: Float[np.ndarray, "T H n D"]) -> Spectrum:
    """The spectrum of each product left @ right [D, D], in float64 and from its smaller side if n < D."""
    if left.shape[-1] < left.shape[-2]:
        left, right = left.astype(np.float64), right.astype(np.float64)
        small = right @ left
        thin, wide = (np.linalg.qr(side, mode="r") for side in (left, right.swapaxes(-1, -2)))
        singular = np.linalg.svd(thin @ wide.swapaxes(-1, -2), compute_uv=False).astype(np.float32)
    else:
        small = left @ right
        singular = np.linalg.svd(small, compute_uv=False)
    values = np.linalg.eigvals(small).astype(np.complex64)
    order = np.argsort(-np.abs(values), axis=-1, kind="stable")
    return Spectrum(np.take_along_axis(values, order, -1), singular)


@functools.partial(jax.jit, static_argnames=("graph", "feed_forward"))  # which makes no kernel that isn't asked for
def _pairs(graph, params, found, feed_forward):
    model = nnx.merge(graph, params)
    layers = model.depth.from_features(found) if model.depth.continuous else found
    layers = in_type(merge(layers), jnp.float32)
    query, key, value, out = model.field.head_matrices(layers)
    pairs = {"QK": (query, key.swapaxes(-1, -2)), "OV": (value, out)}
    if feed_forward:
        for name, pair in model.field.feed_forward_matrices(layers).items():
            pairs[name] = tuple(matrix[:, None] for matrix in pair)
    return pairs


def pairs_over_time(
    model: Transformer, times: Float[np.ndarray, "T"], feed_forward: bool
) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The two matrices [T, H, D, n] and [T, H, n, D], fp32, of every product by name, for a few times after another."""
    depth = model.depth
    found = depth.features(times) if depth.continuous else depth(Grid.of(times))  # features of times, or weights
    if depth.constant:
        found, times = jax.tree.map(lambda leaf: leaf[None], found), times[-1:]
    for start in range(0, len(times), CHUNK):
        part = jax.tree.map(lambda leaf: leaf[start : start + CHUNK], found)
        yield jax.tree.map(np.asarray, _pairs(*split_model(model), part, feed_forward))


def spectra(model: Transformer, times: Float[np.ndarray, "T"], feed_forward: bool = True) -> dict[str, Spectrum]:
    """The spectra of a model's products at some times. Weights shared by all times count as one time."""
    # under load, threads of BLAS wait for one another
    with jax.default_matmul_precision("highest"), threadpool_limits(1, "blas"):
        parts = [
            {name: spectrum(*pair) for name, pair in pairs.items()}
            for pairs in pairs_over_time(model, times, feed_forward)
        ]
    found = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return {name: found[name] for name in PRODUCTS if name in found}


def picture(name: str, found: Spectrum, times: np.ndarray, axis_label: str):
    """Plot one product's spectrum over time: real parts, moduli, the complex plane, and three numbers of each head.

    Eigenvalues are drawn of the four heads with the largest ones.
    """
    heads = sorted(np.argsort(-found.radius().max(0))[:4].tolist())
    figure, axes = figures.new_figure(2, 3, (13, 7))
    (real, modulus, plane), (positive, radius, rank) = axes
    values, only = found.eigenvalues, found.eigenvalues.shape[1] == 1
    edges = figures.column_edges(times)
    for place, head in enumerate(heads):
        beside = (place - (len(heads) - 1) / 2) * 0.6 / len(heads) * np.diff(edges)  # heads would cover one another
        label, colour = None if only else f"head {head}", figures.COLOURS[place % len(figures.COLOURS)]
        real.plot(times + beside, values[:, head].real, ".", markersize=2.5, color=colour)
        real.plot([], [], "o", color=colour, label=label)
    if not only:
        real.legend(fontsize=8)
    real.axhline(0, color="grey", linewidth=0.8)
    real.set(title=f"{name}: real parts of eigenvalues", ylabel="real part")
    sizes = np.abs(values).reshape(len(values), -1)
    for share, label in ((1.0, "largest"), (0.9, "90 % are below"), (0.5, "median")):
        modulus.plot(times, np.quantile(sizes, share, axis=1), "o-", markersize=3, label=label)
    figures.log_if_wide(modulus)
    modulus.margins(y=0.15)  # room for the legend
    modulus.legend(fontsize=8, ncols=3, columnspacing=1, loc="upper center")
    modulus.set(title=f"{name}: moduli" + ("" if only else " of all heads"), ylabel="modulus")
    chosen = values[:, heads]
    at = np.broadcast_to(times[:, None, None], chosen.shape)
    points = plane.scatter(chosen.real, chosen.imag, c=at, s=4, cmap="viridis")
    figure.colorbar(points, ax=plane, label=axis_label)
    plane.axvline(0, color="grey", linewidth=0.8)
    plane.set(title="the same in the complex plane", xlabel="real part", ylabel="imaginary part")
    title = "share with a positive real part"
    figures.over_time(positive, found.positive_share(), times, title, "share", **figures.SHARES)
    radii = found.radius()
    colours = {"norm": "log"} if 0 < 10 * radii.min() < radii.max() else {}
    figures.over_time(radius, radii, times, "spectral radius", "radius", **colours)
    figures.over_time(rank, found.effective_rank(), times, f"effective rank (of {values.shape[-1]})", "rank")
    for axis in (real, modulus, positive, radius, rank):
        axis.set_xlim(edges[0], edges[-1])
        figures.time_axis(axis, axis_label, times)
    return figure


@in_float32
def section(
    opened: Checkpoint, *, num_steps: int | None = None, times: int | None = None, feed_forward: bool = True
) -> Section:
    """Eigenvalues and singular values of QK, OV and the feed-forward's products, which take longest, over time.

    `times`: how many, evenly spaced over the depth; by default those at which the steps take weights.
    """
    model = opened.model
    at = np.unique(model.grid(num_steps).times) if times is None else model.grid(times).ends
    found = spectra(model, at, feed_forward)
    at = at[-len(found["QK"].eigenvalues) :]  # shared weights have only the last time
    shown = [
        paragraph(
            "Eigenvalues of QK (before 1 / sqrt(K)), OV and the feed-forward's products, without biases, norms, "
            "activation and rotary positions. Along an eigenvalue with a positive real part, tokens attend to similar "
            "ones (QK), or are copied and attract (OV); negative ones do the opposite. Eigenvalues that are 0 in any "
            "such product are omitted. Effective rank: the exponential of the entropy of the singular values."
        )
    ]
    numbers, arrays, rows = {"times": at.tolist()}, {"times": at}, []
    for name, one in found.items():
        shown.append(figures.as_html(picture(name, one, at, time_label(model)), f"spectrum of {name}"))
        of_heads = {name: getattr(one, name)() for name in ("radius", "positive_share", "effective_rank")}
        numbers[name] = {name: values.tolist() for name, values in of_heads.items()}
        arrays |= {f"{name}/eigenvalues": one.eigenvalues, f"{name}/singular_values": one.singular_values}
        means = [float(of_heads[name].mean()) for name in ("positive_share", "effective_rank")]
        rows.append([name, float(one.radius().max()), *means])
    shown.insert(1, table(["product", "largest radius", "mean positive share", "mean effective rank"], rows))
    return Section("spectra", "Spectra over time", "".join(shown), numbers, arrays)
