"""Cross-entropy of the next token, computed without holding all logits at once.

At GPT-large's 256 x 1,024 positions and 50,304 entries, fp32 logits are 53 GB, far more than the model.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 1024  # number of positions whose logits exist at once


def cross_entropy(
    walks: list[Float[Array, "N D"]],
    matrix: Float[Array, "V D"],
    targets: Int[Array, "N"],
    weights: Float[Array, "N"],
    vocab_size: int,
) -> Float[Array, ""]:
    """The sum over walks and positions of `weights` times -log softmax(matrix x)[target], in nats, fp32.

    The first walk y teaches the others: KL(softmax(matrix y) || softmax(matrix x)) is added to the losses of each other
    walk x. The gradient of that term stops at y.

    Args:
        walks: the last states of each walk after the final norm, in the compute type.
        matrix: the head, in the compute type. Rows from `vocab_size` on get probability 0.
        targets: ids below `vocab_size`.
        weights: fp32. A weight of 0 excludes a position.
    """
    return _cross_entropy(list(walks), matrix, targets, weights, vocab_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(walks, matrix, targets, weights, vocab_size):
    def add(total, chunk):
        walks, targets, weights = chunk
        losses, _ = _losses(walks, matrix, targets, vocab_size)
        return total + jnp.sum(losses * weights), None

    return jax.lax.scan(add, jnp.float32(0), _chunks((walks, targets, weights)))[0]


def _losses(walks, matrix, targets, vocab_size):
    """The loss of each position over all walks, and the log-probabilities of each walk as three parts."""
    first, *others = parts = [_parts(x, matrix, vocab_size) for x in walks]
    losses = _entropies(*first, targets)
    for part in others:
        losses += _entropies(*part, targets) + _divergences(_log_probs(*first), _log_probs(*part))
    return losses, parts


def _parts(x, matrix, vocab_size):
    """Logits, their maximum, and the logarithm of the sum of exponentials less that."""
    logits = jnp.einsum("nd,vd->nv", x, matrix, preferred_element_type=jnp.float32)
    if len(matrix) != vocab_size:
        logits = jnp.where(jnp.arange(len(matrix)) < vocab_size, logits, -jnp.inf)
    largest = logits.max(axis=1, keepdims=True)
    return logits, largest, jnp.log(jnp.exp(logits - largest).sum(axis=1, keepdims=True))


def _log_probs(logits, largest, log_total):
    return logits - largest - log_total


def _entropies(logits, largest, log_total, targets):
    """-log p of each target."""
    return (log_total - (jnp.take_along_axis(logits, targets[:, None], axis=1) - largest))[:, 0]


def _divergences(expected, found):
    """KL(expected || found) of each position, from log-probabilities. Padding of the vocabulary has -inf in both."""
    return jnp.sum(jnp.where(expected > -jnp.inf, jnp.exp(expected) * (expected - found), 0), axis=1)


def _chunks(arrays):
    """Arrays split into chunks of at most `CHUNK` rows. The last is padded with zeros, which have weight 0."""
    rows = len(jax.tree.leaves(arrays)[0])
    size = min(CHUNK, rows)
    count = -(-rows // size)

    def cut(array):
        filled = jnp.pad(array, [(0, count * size - rows)] + [(0, 0)] * (array.ndim - 1))
        return filled.reshape(count, size, *array.shape[1:])

    return jax.tree.map(cut, arrays)


def _forward(walks, matrix, targets, weights, vocab_size):
    """Compute the gradient together with the loss, chunk by chunk, so that no logit is computed twice."""

    def add(carry, chunk):
        total, d_matrix = carry
        walks, targets, weights = chunk
        losses, parts = _losses(walks, matrix, targets, vocab_size)
        one_hot = jnp.arange(len(matrix)) == targets[:, None]
        d_walks = []
        for x, part in zip(walks, parts):
            d_logits = jnp.exp(_log_probs(*part)) - one_hot
            if part is not parts[0]:
                d_logits += jnp.exp(_log_probs(*part)) - jnp.exp(_log_probs(*parts[0]))
            d_logits = (d_logits * weights[:, None]).astype(x.dtype)
            d_walks.append(d_logits @ matrix)
            d_matrix += jnp.einsum("nv,nd->vd", d_logits, x, preferred_element_type=jnp.float32)
        return (total + jnp.sum(losses * weights), d_matrix), d_walks

    start = (jnp.float32(0), jnp.zeros(matrix.shape, jnp.float32))
    (total, d_matrix), d_walks = jax.lax.scan(add, start, _chunks((walks, targets, weights)))
    d_walks = [d_x.reshape(-1, x.shape[1])[: len(x)] for d_x, x in zip(d_walks, walks)]
    return total, (d_walks, d_matrix.astype(matrix.dtype))


def _backward(vocab_size, gradients, d_total):
    d_walks, d_matrix = jax.tree.map(lambda gradient: (d_total * gradient).astype(gradient.dtype), gradients)
    return d_walks, d_matrix, None, None


_cross_entropy.defvjp(_forward, _backward)
