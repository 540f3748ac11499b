"""Attention over the cached keys and values of earlier tokens, for every evaluation of the attention in depth."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class KeyValueCache(NamedTuple):
    """Keys and values of all positions so far, in the compute type, for each evaluation of the attention in depth."""

    keys: Float[Array, "evaluations B length G K"]
    values: Float[Array, "evaluations B length G K"]


class CachedAttention:
    """`attend` for one step of depth: store the new tokens' keys and values, then attend to all tokens up to each one.

    It exists while one step is traced; the solver's loop then takes `cache` out again. A token's state at an evaluation
    doesn't depend on later tokens. So the keys and values of every evaluation can be cached, however many a step has.

    Args:
        cache: the cache of all steps.
        first: index of this step's first evaluation among those of all steps.
        position: position of the first new token, of each example or of all. The cache's content from there on is
            ignored.
    """

    def __init__(self, cache: KeyValueCache, first: Int[Array, ""], position: Int[Array, "*each"]):
        self.cache, self.evaluation, self.position = cache, first, position

    def __call__(
        self, query: Float[Array, "B S H K"], key: Float[Array, "B S G K"], value: Float[Array, "B S G K"]
    ) -> Float[Array, "B S H K"]:
        self.cache = KeyValueCache(self._stored(self.cache.keys, key), self._stored(self.cache.values, value))
        keys, values = (jax.lax.dynamic_index_in_dim(old, self.evaluation, keepdims=False) for old in self.cache)
        self.evaluation += 1
        last = self.position[..., None] + jnp.arange(query.shape[1])  # [S], or [B, S]
        seen = jnp.arange(keys.shape[1]) <= last[..., None]
        return jax.nn.dot_product_attention(query, keys, values, mask=seen.reshape(-1, 1, *seen.shape[-2:]))

    def _stored(self, old: Float[Array, "evaluations B length G K"], new: Float[Array, "B S G K"]) -> Array:
        """Keys or values, with the new ones at their positions."""
        new = new.astype(old.dtype)
        if self.position.ndim == 0:
            start = map(jnp.int32, (self.evaluation, 0, self.position, 0, 0))
            return jax.lax.dynamic_update_slice(old, new[None], tuple(start))
        places = self.position[:, None] + jnp.arange(new.shape[1])
        return old.at[self.evaluation, jnp.arange(len(new))[:, None], places].set(new)
