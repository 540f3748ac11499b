"""The plain kinds of depth weights: per layer, shared, and interpolated. Their parameters are weights themselves."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from diffeqformer.depth.depths import left_out_layers
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import add_adapters
from diffeqformer.depth.weights import DepthWeights
from diffeqformer.errors import UserError, counted
from diffeqformer.fields.layers import Linear, Norm, parameter


def plain_layer(rngs: nnx.Rngs, layer: Linear | Norm, stack: tuple[int, ...]) -> nnx.Dict:
    """The parameters of one layer, with the axes of `stack` in front.

    Kernels are drawn from N(0, 0.02^2). Biases and shifts are 0, scales 1.
    """
    time = ("time",) * len(stack)
    if isinstance(layer, Norm):
        leaves = {"scale": parameter(rngs, (*stack, layer.width), (*time, "embed"), mean=1.0)}
        if layer.shift:
            leaves["shift"] = parameter(rngs, (*stack, layer.width), (*time, "embed"))
    else:
        shape, axes = (*stack, layer.inputs, layer.outputs), (*time, *layer.axes)
        leaves = {"kernel": parameter(rngs, shape, axes, stddev=0.02, decays=True)}
        if layer.bias:
            leaves["bias"] = parameter(rngs, (*stack, layer.outputs), (*time, layer.axes[1]))
    return nnx.Dict(**leaves)


class PlainWeights(DepthWeights):
    """Parameters that are the weights themselves, with the axes of `stack` in front."""

    def __init__(self, layers: dict[str, Linear | Norm], stack: tuple[int, ...], rngs: nnx.Rngs):
        self.layers = nnx.Dict(**{name: plain_layer(rngs, layer, stack) for name, layer in layers.items()})

    def stored(self) -> dict:
        """The parameters of every layer."""
        return {name: nnx.to_pure_dict(nnx.state(layer)) for name, layer in self.layers.items()}


class SharedWeights(PlainWeights):
    """One set of weights for every time: the paper's shared-parameter baseline."""

    constant = True

    def __init__(self, config, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        super().__init__(layers, (), rngs)

    def __call__(self, grid: Grid) -> dict:
        """The weights, which don't depend on the grid."""
        return self.stored()


class PerLayerWeights(PlainWeights):
    """Each step has its own weights, and its own adapters if the config has a `lora_rank`.

    Vanilla transformers and discretized models use this kind. Fewer steps leave out layers (`model.left_out`).
    """

    fixed_depth = True

    def __init__(self, config, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        super().__init__(layers, (config.num_steps,), rngs)
        self.num_layers, self.left_out, self.adapter_scale = config.num_steps, left_out_layers(config.left_out), 1.0
        if config.lora_rank:
            add_adapters(self.layers, layers, config.lora_layers, config.lora_rank, config.lora_start, rngs)
            self.adapter_scale = config.lora_alpha / config.lora_rank

    def __call__(self, grid: Grid) -> dict:
        """The weights of all layers, stacked, or of those that fewer steps keep, or a UserError."""
        fewer = self.num_layers - len(grid.times)
        if not 0 <= fewer <= len(self.left_out):
            least = self.num_layers - len(self.left_out)
            has = f"{counted(self.num_layers, 'step')} and for no other number"
            has = f"{least} to {counted(self.num_layers, 'step')}" if self.left_out else has
            raise UserError(f"num_steps: this model has weights for {has}, but it is {len(grid.times)}")
        made = {
            layer: {**weights, "a": self.adapter_scale * weights["a"]} if "a" in weights else weights
            for layer, weights in self.stored().items()
        }
        kept = np.delete(np.arange(self.num_layers), self.left_out[:fewer])
        return jax.tree.map(lambda leaf: leaf[kept], made) if fewer else made


class InterpolatedWeights(PlainWeights):
    """Weights at the knots k / E, k = 1 ... E, with E = `time_embed_dim`; linear in t between them, constant before.

    A solver of E steps uses the weights at the knots themselves. So the layers of a trained transformer can be them.
    """

    continuous = True

    def __init__(self, config, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        self.knots = config.time_embed_dim
        super().__init__(layers, (self.knots,), rngs)

    def __call__(self, grid: Grid) -> dict:
        """The weights at `grid.times`, in fp32. At all knots these are the parameters, and no copy is made."""
        places = self.features(grid.times)
        if isinstance(places, np.ndarray) and np.array_equal(places[:, 0], np.arange(self.knots)):
            return self.stored()
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

        return jax.tree.map(between, self.stored())
