"""Interpolated depth weights: one set of weights at each of E knots, and what lies between them in a straight line."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from diffeqformer.depth.grid import Grid
from diffeqformer.depth.plain import plain_layer
from diffeqformer.depth.weights import DepthWeights
from diffeqformer.fields.layers import Linear, Norm


class InterpolatedWeights(DepthWeights):
    """Weights at the times k / E, k = 1 ... E, linear between them, and constant before the first.

    A solver of E steps uses the weights at the knots themselves, so the layers of a trained transformer can be its
    knots.

    Args:
        config: the `model` part of a config, with E = `time_embed_dim`.
        layers: the layers of the vector field.
        rngs: source of the initial parameters.
    """

    generated = True

    def __init__(self, config, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        self.knots = config.time_embed_dim
        self.layers = nnx.Dict(**{name: plain_layer(rngs, layer, (self.knots,)) for name, layer in layers.items()})

    def __call__(self, grid: Grid) -> dict:
        """The weights at `grid.times`, in fp32. At all knots these are the parameters, and no copy is made."""
        places = self.features(grid.times)
        if isinstance(places, np.ndarray) and np.array_equal(places[:, 0], np.arange(self.knots)):
            return {name: {key: leaf[...] for key, leaf in layer.items()} for name, layer in self.layers.items()}
        return self.from_features(places)

    def features(self, times: Float[np.ndarray | Array, "T"]) -> Float[np.ndarray | Array, "T 1"]:
        """The places of some times among the knots, counted from 0, for `from_features`: [T, 1] fp32."""
        return (times * self.knots - 1).clip(0, self.knots - 1)[:, None].astype(np.float32)

    def from_features(self, features: Float[np.ndarray | Array, "T 1"]) -> dict:
        """The weights of every layer in fp32, given their places among the knots."""
        place = jnp.asarray(features)[:, 0]
        before = jnp.floor(place).astype(jnp.int32)
        after, part = jnp.minimum(before + 1, self.knots - 1), place - before

        def between(leaf):
            weight = part.reshape(-1, *(1,) * (leaf.ndim - 1))
            return (1 - weight) * leaf[before] + weight * leaf[after]

        return {name: {key: between(leaf[...]) for key, leaf in layer.items()} for name, layer in self.layers.items()}
