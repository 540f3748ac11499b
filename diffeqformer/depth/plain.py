"""Depth weights: where the weights of the vector field at the times t_0 ... t_{T-1} come from.

Each kind is a module `(times) -> {layer: {kernel | bias | scale | shift: [T, ...]}}`, in the type of its
parameters; if it is `constant`, one set serves all times and the axis T is left out. Here are the two plain
kinds, per-layer (a vanilla transformer, or any discretized model; with adapters `a` and `b` of `low_rank` beside
its kernels, if it has any) and shared; the generated kind has a file of its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Linear, Norm, as_it_is, parameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedWeights:
    """The weights of every depth step, ready for a solver to walk.

    layers: {layer: {kernel | bias | scale | shift: [T, ...]}}, one set for each node of each step of the solver, in
        their order; without the axis T if `constant`.
    step_sizes: length in time of each step, fp32.
    constant: the same weights serve every step.
    gather: makes one step's layers whole, where devices share them (`diffeqformer.parallel.sharding`).
    """

    layers: dict
    step_sizes: Float[Array, "T"]
    constant: bool = dataclasses.field(default=False, metadata={"static": True})
    gather: Callable[[dict], dict] = dataclasses.field(default=as_it_is, metadata={"static": True})

    def at_step(self, step: int | Int[Array, ""], nodes: int) -> tuple[list[dict], Float[Array, ""]]:
        """The layers at each of a solver's `nodes` nodes in one step, and the step's size; as they are, neither merged nor gathered."""
        at = lambda node: self.layers if self.constant else jax.tree.map(lambda leaf: leaf[node], self.layers)  # noqa: E731
        return [at(step * nodes + node) for node in range(nodes)], self.step_sizes[step]


def weight_axes(layer: Linear | Norm, name: str) -> tuple[str, ...]:
    """The logical axes of a layer's kernel, bias, scale, shift or factor of an adapter at one time."""
    if isinstance(layer, Norm):
        return ("embed",)
    inputs, outputs = layer.axes
    return {"kernel": (inputs, outputs), "bias": (outputs,), "a": (inputs, "rank"), "b": ("rank", outputs)}[name]


def step_sizes(times: Float[np.ndarray | Array, "T"]) -> Float[Array, "T"]:
    """Lengths of the steps that end at `times`, the first of which starts at 0; differences in float64, unless traced."""
    of, times = _exact(times)
    return jnp.asarray(of.diff(times, prepend=0.0), jnp.float32)


def _exact(times: Float[np.ndarray | Array, "T"]):
    """The library to compute with, and the times: in float64 on the host, or as they are on the device."""
    return (jnp, times) if isinstance(times, Array) else (np, np.asarray(times, np.float64))


def stage_times(times: Float[np.ndarray | Array, "T"], nodes: tuple[float, ...]) -> Float[np.ndarray | Array, "stages"]:
    """When a solver takes weights: at its nodes within each of the steps that end at `times`, step by step, in float64, unless traced.

    Nodes that two steps share come twice; a projection of small h(t) is cheaper than to sort them out.
    """
    of, ends = _exact(times)
    starts = of.concatenate([of.zeros(1, ends.dtype), ends[:-1]])
    return of.stack([ends if node == 1 else starts + node * (ends - starts) for node in nodes], axis=1).ravel()


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


def in_compute_type(layers: dict, dtype) -> dict:
    """Kernels, biases and adapters of every layer in `dtype`; scales and shifts of norms in fp32.

    Where there are adapters, kernels stay as they are until these are merged, so that they aren't held twice.
    """
    adapted = any("a" in weights for weights in layers.values())

    def typed(name, value):
        if name == "kernel" and adapted:
            return value
        return value.astype(jnp.float32 if name in ("scale", "shift") else dtype)

    return {layer: {name: typed(name, value) for name, value in weights.items()} for layer, weights in layers.items()}


class PlainWeights(nnx.Module):
    """Parameters that are the weights themselves, with the axes of `stack` in front."""

    def __init__(self, layers: dict[str, Linear | Norm], stack: tuple[int, ...], rngs: nnx.Rngs):
        self.layers = nnx.Dict(**{name: plain_layer(rngs, layer, stack) for name, layer in layers.items()})

    def __call__(self, times: Float[np.ndarray | Array, "T"]) -> dict:
        """The weights, whatever the times."""
        return {name: nnx.to_pure_dict(nnx.state(layer)) for name, layer in self.layers.items()}


class SharedWeights(PlainWeights):
    """One set of weights for every time: the paper's shared-parameter baseline."""

    constant = True

    def __init__(self, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        super().__init__(layers, (), rngs)


class PerLayerWeights(PlainWeights):
    """Each time has weights of its own: a vanilla transformer, or any discretised model.

    adapter_scale: alpha / rank, with which the factors `a` of adapters are multiplied, if the layers have any.
    """

    constant = False
    adapter_scale = 1.0

    def __init__(self, layers: dict[str, Linear | Norm], num_layers: int, rngs: nnx.Rngs):
        super().__init__(layers, (num_layers,), rngs)
        self.num_layers = num_layers

    def __call__(self, times: Float[np.ndarray | Array, "T"]) -> dict:
        """The stacked weights.

        Raises:
            UserError: if there are not as many times as layers.
        """
        if len(times) != self.num_layers:
            raise UserError(
                f"num_steps: this model has weights for {self.num_layers} steps and for no other number, but it is {len(times)}"
            )
        return {
            layer: {**weights, "a": self.adapter_scale * weights["a"]} if "a" in weights else weights
            for layer, weights in super().__call__(times).items()
        }
