"""Cross-entropy of the next token, computed without holding all logits at once.

At GPT-large's 256 x 1,024 positions and 50,304 entries, fp32 logits are 53 GB, far more than the model.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 4096  # number of positions whose logits exist at once
MANY = 4096  # entries from which a pass over their logits takes longer than the condition that saves it


class SoftTargets(NamedTuple):
    """A teacher's distributions at the same positions, by its normalized states and its head; no gradient reaches it.

    weight: how much the divergence from them counts beside the loss of the targets.
    """

    states: Float[Array, "*N W"]
    matrix: Float[Array, "V W"]
    weight: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    x: Float[Array, "N D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, "N"],
    weights: Float[Array, "N"],
    vocab_size: int,
    soft: SoftTargets | None = None,
) -> Float[Array, ""]:
    """The sum over positions of `weights` times -log softmax(matrix x)[target], in nats, fp32.

    `_forward` computes it, with its gradient, which compiled programs leave out where nothing uses it.

    Args:
        x: the last states after the final norm, in the compute type.
        matrix: the head, in the compute type. Rows from `vocab_size` on get probability 0.
        targets: ids below `vocab_size`.
        weights: fp32. A weight of 0 excludes a position.
        soft: adds their weight times KL(teacher || softmax(matrix x)) to the loss of each position (knowledge
            distillation at temperature 1: Hinton et al., 2015, arXiv:1503.02531).
    """
    return _forward(x, matrix, targets, weights, vocab_size, soft)[0]


def log_probabilities(
    x: Float[Array, "N D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, "N"],
    vocab_size: int,
    written: tuple[int, int | None] | None = None,
) -> tuple[Float[Array, "N"], Bool[Array, "N"]]:
    """log softmax(matrix x)[target] at every position, in nats, fp32, and whether the target is the likeliest id.

    For the arguments see `cross_entropy`. Only ids `of_vocabulary` count as the likeliest. There is no gradient.
    """

    def score(chunk):
        x, targets = chunk
        losses, logits, *_ = _losses(x, matrix, targets, vocab_size)
        return -losses, jnp.argmax(of_vocabulary(logits, *written or (vocab_size, None)), axis=1) == targets

    scores = jax.lax.map(score, _chunks(x, targets))
    return tuple(score.reshape(-1)[: len(x)] for score in scores)


def of_vocabulary(logits: Float[Array, "N V"], vocab_size: int | None, unknown: int | None) -> Float[Array, "N W"]:
    """The logits of the ids that can be written: the first `vocab_size`, with -inf for the tokenizer's unknown one."""
    logits = logits[:, :vocab_size]
    return logits if unknown is None else logits.at[:, unknown].set(-jnp.inf)


def _losses(x, matrix, targets, vocab_size):
    """-log p of each target, the logits, their shift, and the logarithm of the sum of the shifted ones' exponentials.

    `MANY` logits are shifted by their target's, which is known before them. So the sum is a part of the product that
    makes them, and takes no pass over all. Where it overflows, as some logit is too far above, the largest replaces it.
    """
    logits = _logits(x, matrix, vocab_size)
    if len(matrix) < MANY:
        shift, log_total = _largest_and_log_total(logits)
    else:
        shift = jnp.einsum("nd,nd->n", x, matrix[targets], preferred_element_type=jnp.float32)[:, None]
        log_total = jnp.log(jnp.exp(logits - shift).sum(axis=1, keepdims=True))
        shift, log_total = jax.lax.cond(
            jnp.isfinite(log_total).all(), lambda: (shift, log_total), lambda: _largest_and_log_total(logits)
        )
    losses = log_total - (jnp.take_along_axis(logits, targets[:, None], axis=1) - shift)
    return losses[:, 0], logits, shift, log_total


def _logits(x, matrix, vocab_size):
    logits = jnp.einsum("nd,vd->nv", x, matrix, preferred_element_type=jnp.float32)
    return logits if len(matrix) == vocab_size else jnp.where(jnp.arange(len(matrix)) < vocab_size, logits, -jnp.inf)


def _largest_and_log_total(logits):
    """The largest logit, and the logarithm of the sum of exponentials less that."""
    largest = logits.max(axis=1, keepdims=True)
    return largest, jnp.log(jnp.exp(logits - largest).sum(axis=1, keepdims=True))


def _divergence(logits, shift, log_total, states, matrix, vocab_size):
    """KL(teacher || model) of each position in nats, and the teacher's probabilities."""
    theirs = _logits(states, matrix, vocab_size)
    largest, their_log_total = _largest_and_log_total(theirs)
    probabilities = jnp.exp(theirs - largest - their_log_total)
    difference = (theirs - largest - their_log_total) - (logits - shift - log_total)
    terms = jnp.where(probabilities > 0, probabilities * difference, 0)  # padding has -inf in both
    return terms.sum(axis=1), probabilities


def _chunks(*arrays):
    """Each array split into chunks of at most `CHUNK` rows. The last is padded with zeros, which have weight 0."""
    rows = len(arrays[0])
    size = min(CHUNK, rows)
    count = -(-rows // size)

    def cut(array):
        filled = jnp.pad(array, [(0, count * size - rows)] + [(0, 0)] * (array.ndim - 1))
        return filled.reshape(count, size, *array.shape[1:])

    return jax.tree.map(cut, arrays)  # without a teacher there are no states of it


def _forward(x, matrix, targets, weights, vocab_size, soft=None):
    """The loss and its gradient, chunk by chunk, so that no logit is computed twice."""

    def add(carry, chunk):
        total, d_matrix = carry
        x, states, targets, weights = chunk
        losses, logits, shift, log_total = _losses(x, matrix, targets, vocab_size)
        probabilities, one_hot = jnp.exp(logits - shift - log_total), jnp.arange(len(matrix)) == targets[:, None]
        d_logits = probabilities - one_hot
        if soft:
            divergence, theirs = _divergence(logits, shift, log_total, states, soft.matrix, vocab_size)
            losses += soft.weight * divergence
            d_logits += soft.weight * (probabilities - theirs)
        d_logits = (d_logits * weights[:, None]).astype(x.dtype)
        d_x = d_logits @ matrix
        d_matrix += jnp.einsum("nv,nd->vd", d_logits, x, preferred_element_type=jnp.float32)
        return (total + jnp.sum(losses * weights), d_matrix), d_x

    start = (jnp.float32(0), jnp.zeros(matrix.shape, jnp.float32))
    chunks = _chunks(x, soft and soft.states, targets, weights)
    (total, d_matrix), d_x = jax.lax.scan(add, start, chunks)
    return total, (d_x.reshape(-1, x.shape[1])[: len(x)], d_matrix.astype(matrix.dtype))


def _backward(vocab_size, gradients, d_total):
    d_x, d_matrix = gradients
    return (d_total * d_x).astype(d_x.dtype), (d_total * d_matrix).astype(d_matrix.dtype), None, None, None


cross_entropy.defvjp(_forward, _backward)
