"""Depth weights: where the weights of the vector field at the times t_0 ... t_{T-1} come from.

Each kind is a module `(times) -> StackedWeights`. Here are the two plain kinds, per-layer (a
vanilla transformer) and shared (one set for all times); `generated` has a file of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from diffeqformer.models.layers import Linear, Norm, parameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedWeights:
    """The weights of every depth step, ready for a solver to walk.

    layers: {layer: {kernel | bias | scale | shift: [T, ...]}}; without the axis T if `constant`.
    step_sizes: [T] fp32, the length in time of each step.
    constant: the same weights serve every step.
    """

    layers: dict
    step_sizes: Float[Array, "T"]
    constant: bool = dataclasses.field(default=False, metadata={"static": True})


def step_sizes(times: np.ndarray) -> Float[Array, "T"]:
    """Lengths of the steps that end at `times`, the first of which starts at 0; differences in float64."""
    return jnp.asarray(np.diff(np.asarray(times, np.float64), prepend=0.0), jnp.float32)


def plain_layer(rngs: nnx.Rngs, layer: Linear | Norm, stack: tuple[int, ...]) -> nnx.Dict:
    """One layer's own parameters, with the axes of `stack` in front: kernels N(0, 0.02^2), biases and shifts 0, scales 1."""
    time = ("time",) * len(stack)
    if isinstance(layer, Norm):
        leaves = {"scale": parameter(rngs, (*stack, layer.width), (*time, "embed"), mean=1.0)}
        if layer.shift:
            leaves["shift"] = parameter(rngs, (*stack, layer.width), (*time, "embed"))
    else:
        leaves = {"kernel": parameter(rngs, (*stack, layer.inputs, layer.outputs), (*time, *layer.axes), stddev=0.02)}
        if layer.bias:
            leaves["bias"] = parameter(rngs, (*stack, layer.outputs), (*time, layer.axes[1]))
    return nnx.Dict(**leaves)


def in_compute_type(weights: dict, dtype) -> dict:
    """Kernels and biases in `dtype`; scales and shifts of norms stay in fp32."""
    return {name: value.astype(dtype if name in ("kernel", "bias") else jnp.float32) for name, value in weights.items()}


class PerLayerWeights(nnx.Module):
    """Each time has weights of its own: a vanilla transformer, or any discretised model."""

    def __init__(self, layers: dict[str, Linear | Norm], num_layers: int, dtype, rngs: nnx.Rngs):
        self.num_layers, self.dtype = num_layers, dtype
        self.layers = nnx.Dict(**{name: plain_layer(rngs, layer, (num_layers,)) for name, layer in layers.items()})

    def __call__(self, times: np.ndarray) -> StackedWeights:
        """The stacked weights; `times` [T] must be as many as there are layers.

        Raises:
            ValueError: for another number of times.
        """
        if len(times) != self.num_layers:
            raise ValueError(
                f"a model with weights per layer has exactly {self.num_layers} steps, but {len(times)} were asked for"
            )
        layers = {
            name: in_compute_type(nnx.to_pure_dict(nnx.state(layer)), self.dtype) for name, layer in self.layers.items()
        }
        return StackedWeights(layers, step_sizes(times))


class SharedWeights(nnx.Module):
    """One set of weights for every time: the paper's shared-parameter baseline."""

    def __init__(self, layers: dict[str, Linear | Norm], dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        self.layers = nnx.Dict(**{name: plain_layer(rngs, layer, ()) for name, layer in layers.items()})

    def __call__(self, times: np.ndarray) -> StackedWeights:
        """The one set of weights, marked as constant, for the steps that end at `times` [T]."""
        layers = {
            name: in_compute_type(nnx.to_pure_dict(nnx.state(layer)), self.dtype) for name, layer in self.layers.items()
        }
        return StackedWeights(layers, step_sizes(times), constant=True)
