"""How the next token is chosen from a model's logits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.cross_entropy import of_vocabulary
from diffeqformer.errors import UserError


class Choice(NamedTuple):
    """How the next token is chosen.

    temperature: divides the logits; 0, or a value practically equal to 0, takes the likeliest token.
    top_k: keep this many of the likeliest tokens; 0 keeps all.
    top_p: of these, keep the smallest set of likeliest tokens with at least this total probability; 1 keeps all.
    vocab_size, unknown: ids from the first one on, which pad the vocabulary, and the second are never chosen.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None
    unknown: int | None = None

    def check(self) -> None:
        """Check that the values are in range."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: must be a number of at least 0, but it is {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise UserError(f"top_k: must be a whole number of at least 0, but it is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be above 0 and at most 1, but it is {self.top_p}")


def chances(logits: Float[Array, "B V"], choice: Choice) -> Float[Array, "B V"]:
    """The logits of the tokens as `choice` draws them at a temperature above 0: -inf for those that it excludes.

    top_p is nucleus sampling.

    @inproceedings{holtzman2020curious,
      title={The Curious Case of Neural Text Degeneration},
      author={Holtzman, Ari and Buys, Jan and Du, Li and Forbes, Maxwell and Choi, Yejin},
      booktitle={International Conference on Learning Representations},
      year={2020}}
    """
    logits = logits / choice.temperature
    if 0 < choice.top_k < logits.shape[-1]:
        logits = jnp.where(logits < jax.lax.top_k(logits, choice.top_k)[0][:, -1:], -jnp.inf, logits)
    if choice.top_p < 1:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # total probability of all likelier tokens
        least = jnp.min(jnp.where(before < choice.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], choice: Choice) -> Int[Array, "B"]:
    """One token for each row of logits."""
    if choice.temperature < 1e-6:
        return jnp.argmax(logits, axis=-1)
    return jax.vmap(jax.random.categorical)(keys, chances(logits, choice))


def refused(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Int[Array, "B"]:
    """The tokens, with -1 where the logits are NaN or infinite, which `checked` finds on the host."""
    return jnp.where(jnp.isfinite(logits.max(axis=-1)), tokens, -1).astype(jnp.int32)


def checked(tokens: Array) -> Int[np.ndarray, "..."]:
    """Tokens on the host; raises `NotFinite` if one of them was `refused`."""
    tokens = np.asarray(tokens)
    if (tokens < 0).any():
        raise NotFinite
    return tokens


@functools.partial(jax.jit, static_argnames=("choice",))
def choose_next(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], position: Int[Array, "*each"], choice: Choice
) -> Int[Array, "B"]:
    """The token chosen at `position`, of each text or of all, for `checked`."""
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(position, keys.shape))
    logits = of_vocabulary(logits, choice.vocab_size, choice.unknown)
    return refused(logits, draw(logits, keys, choice))
