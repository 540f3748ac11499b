"""Attention over the keys and values of earlier tokens, kept for every step of depth."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffeqformer.errors import UserError


class KeyValueCache(NamedTuple):
    """Keys and values of every position so far, [T, B, length, H, K] each, in the compute type."""

    keys: Float[Array, "T B length H K"]
    values: Float[Array, "T B length H K"]

    @classmethod
    def empty(cls, num_steps: int, batch: int, length: int, heads: int, head_width: int, dtype) -> "KeyValueCache":
        """Room for `length` positions."""
        zeros = jnp.zeros((num_steps, batch, length, heads, head_width), dtype)
        return cls(zeros, zeros)


class CachedAttention:
    """`attend` of one step of depth: write the new tokens' keys and values, then attend to all up to each token.

    Lives while one step is traced; the solver's loop takes the cache out again with `updated`. A solver
    that evaluated the attention twice in a step would need the keys of both evaluations, at states that
    the first tokens of a text no longer have.

    Args:
        cache: of all steps.
        step: which of them this is, from 0.
        position: of the first new token; what the cache holds from there on is not looked at.
    """

    def __init__(self, cache: KeyValueCache, step: Int[Array, ""], position: int | Int[Array, ""]):
        self.cache, self.step, self.position, self.evaluations = cache, step, position, 0

    def __call__(
        self, query: Float[Array, "B S H K"], key: Float[Array, "B S H K"], value: Float[Array, "B S H K"]
    ) -> Float[Array, "B S H K"]:
        self.evaluations += 1
        start = (self.step, 0, self.position, 0, 0)
        self.cache = KeyValueCache(
            *(
                jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), start)
                for old, new in zip(self.cache, (key, value))
            )
        )
        keys, values = (jax.lax.dynamic_index_in_dim(old, self.step, keepdims=False) for old in self.cache)
        seen = jnp.arange(keys.shape[1]) <= self.position + jnp.arange(query.shape[1])[:, None]  # [S, length]
        return jax.nn.dot_product_attention(query, keys, values, mask=seen[None, None])

    def updated(self) -> KeyValueCache:
        """The cache with the new tokens in it.

        Raises:
            UserError: if the step didn't evaluate the attention exactly once.
        """
        if self.evaluations != 1:
            raise UserError(
                f"solver: it evaluates the vector field {self.evaluations} times a step, but a key-value cache needs "
                "one evaluation; generate with Euler or Lie-Trotter steps"
            )
        return self.cache
