"""Spectra over time of the products of weights that move a state: sections 5.1 and E of the paper.

    QK = W_Q W_K^T of a head: x_i QK x_j is what its attention of token i to token j comes from (before 1 / sqrt(K))
    OV = W_V W_O of a head: x_j OV is what token i receives of token j
    up·down, gate·down: the products of the feed-forward's matrices, as if its activation were linear

Biases and norms are left aside, and rotary positions are those of a token and itself, where they do nothing. Each
product of a D x n and an n x D matrix has the nonzero eigenvalues of the n x n product the other way round, so those of a
head come from K x K matrices. Eigenvalues stay complex.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Complex, Float
from threadpoolctl import threadpool_limits

from diffeqformer.depth.generated import time_features
from diffeqformer.depth.low_rank import merge
from diffeqformer.transformer import Transformer, split_model

CHUNK = 12  # times whose weights exist at once
PRODUCTS = ("QK", "OV", "up·down", "gate·down")  # in the order in which they are shown


class Spectrum(NamedTuple):
    """Of one product at T times, in order of size; a product of the feed-forward counts as one head.

    eigenvalues: the n largest by modulus, complex64, where n is the smaller side of the two matrices; the others are 0.
    singular_values: as many, fp32.
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
        """The exponential of the entropy of the singular values' shares of their sum: between 1 and n.

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
    """The spectrum of each product left @ right [D, D], from its smaller side."""
    with threadpool_limits(1, "blas"):  # beside other work its threads wait for one another
        return _spectrum(left, right)


def _spectrum(left, right):
    if left.shape[-1] < left.shape[-2]:
        left, right = left.astype(np.float64), right.astype(np.float64)
        small, singular = right @ left, _singular_values(left, right)
    else:
        small = left @ right
        singular = np.linalg.svd(small, compute_uv=False)
    values = np.linalg.eigvals(small).astype(np.complex64)
    order = np.argsort(-np.abs(values), axis=-1, kind="stable")
    return Spectrum(np.take_along_axis(values, order, -1), singular)


def _singular_values(left, right):
    """Those of left @ right, from n x n matrices: with left^T left = s s^T, they are the roots of the eigenvalues of
    s^T (right right^T) s. In float64, roots below 1e-8 of the largest are rounding.
    """
    values, vectors = np.linalg.eigh(left.swapaxes(-1, -2) @ left)
    root = vectors * np.sqrt(np.maximum(values, 0))[..., None, :]
    squares = np.linalg.eigvalsh(root.swapaxes(-1, -2) @ (right @ right.swapaxes(-1, -2)) @ root)
    return np.sqrt(np.maximum(squares[..., ::-1], 0)).astype(np.float32)


def matrix_pairs(field, layers: dict, feed_forward: bool) -> dict[str, tuple[Array, Array]]:
    """By name, the two matrices [T, H, D, n] and [T, H, n, D] of every product of a block, with those of its feed-forward or without."""
    query, key, value, out = field.head_matrices(layers)
    pairs = {"QK": (query, key.swapaxes(-1, -2)), "OV": (value, out)}
    if feed_forward:
        for name, pair in field.feed_forward_matrices(layers).items():
            pairs[name] = tuple(matrix[:, None] for matrix in pair)
    return pairs


@functools.partial(jax.jit, static_argnames=("graph", "feed_forward"))
def _generated_pairs(graph, params, features, feed_forward):
    model = nnx.merge(graph, params)
    return matrix_pairs(model.field, model.depth.from_features(features), feed_forward)


@functools.partial(jax.jit, static_argnames=("field", "count", "feed_forward"))
def _stored_pairs(field, layers, start, count, feed_forward):
    part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, count), layers)
    return matrix_pairs(field, merge(part), feed_forward)


def pairs_over_time(
    model: Transformer, times: Float[np.ndarray, "T"], feed_forward: bool
) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """`matrix_pairs` in fp32 at a few of the times after another.

    Raises:
        UserError: if the model has weights per layer, and another number of layers than there are times.
    """
    depth = model.depth
    if hasattr(depth, "from_features"):
        graph, params = split_model(model)
        for start in range(0, len(times), CHUNK):
            features = time_features(times[start : start + CHUNK], depth.sinusoidal_dim, depth.time_frequency)
            yield jax.tree.map(np.asarray, _generated_pairs(graph, params, jnp.asarray(features), feed_forward))
        return
    layers = depth(times)
    if depth.constant:
        layers = jax.tree.map(lambda leaf: leaf[None], layers)
    total = 1 if depth.constant else len(times)
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        yield jax.tree.map(np.asarray, _stored_pairs(model.field, layers, start, count, feed_forward))


def spectra(model: Transformer, times: Float[np.ndarray, "T"], feed_forward: bool = True) -> dict[str, Spectrum]:
    """The spectra of a model's products at some times; one set of weights that serves all times counts as one time.

    Args:
        feed_forward: those of the feed-forward as well, whose matrices are the largest.

    Raises:
        UserError: if the model has no weights at these times.
    """
    with jax.default_matmul_precision("highest"):
        parts = [
            {name: spectrum(*pair) for name, pair in pairs.items()}
            for pairs in pairs_over_time(model, times, feed_forward)
        ]
    return {
        name: Spectrum(*(np.concatenate(arrays) for arrays in zip(*(part[name] for part in parts))))
        for name in PRODUCTS
        if name in parts[0]
    }
