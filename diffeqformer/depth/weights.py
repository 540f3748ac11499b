"""The interface of depth weights: where the weights of the vector field at the solver's times come from."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from diffeqformer.fields.layers import Linear, Norm
from diffeqformer.parallel.sharding import identity


class DepthWeights(nnx.Module):
    """A kind of depth weights: a module that maps a `Grid` to the weights at the grid's times.

    Its constructor takes (config, layers, rngs): the `model` part of a config, the layers of the vector field and the
    source of the initial parameters. Called with a grid, it returns {layer: {kernel | bias | scale | shift: [T, ...]}}
    in the type of the parameters, one set for each of `grid.times`. An adapter is returned beside its kernel as `a` and
    `b` (`diffeqformer.depth.low_rank`).

    continuous: the weights are functions of time, so there are weights for any grid.
    generates_kernels: their kernels are products with a projection P (`diffeqformer.depth.projection`).
    sinusoidal: they read the time as sines and cosines.
    constant: one set is used at all times, and there is no axis T.
    fixed_depth: there is one set for each step. Fewer steps can leave out some (`model.left_out`).
    precision: that of the products with P (`diffeqformer.fields.layers.PRECISIONS`).
    """

    continuous: ClassVar[bool] = False
    generates_kernels: ClassVar[bool] = False
    sinusoidal: ClassVar[bool] = False
    constant: ClassVar[bool] = False
    fixed_depth: ClassVar[bool] = False
    precision: str = "default"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedWeights:
    """The weights of every step of depth, ready for a solver.

    layers: {layer: {kernel | bias | scale | shift: [T, ...]}}, one set for each node of each step of the solver, in
        order; without the axis T if `constant`.
    step_sizes: the length of each of the L steps, [L] fp32.
    constant: every step uses the same weights.
    dtype: the type in which a step uses such weights (`in_type`).
    gather: gathers the layers of one step if they are sharded (`diffeqformer.parallel.sharding`).
    """

    layers: dict
    step_sizes: PyTree  # not `Float[Array, "L"]`: JAX also puts shapes, shardings and None here
    constant: bool = dataclasses.field(default=False, metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype("float32"), metadata={"static": True})
    gather: Callable[[dict], dict] = dataclasses.field(default=identity, metadata={"static": True})

    def at_step(self, step: int | Int[Array, ""], nodes: int) -> tuple[list[dict], Float[Array, ""]]:
        """The layers at each of `nodes` nodes in one step, not yet merged or gathered, and the size of the step."""

        def at(node):
            return self.layers if self.constant else jax.tree.map(lambda leaf: leaf[node], self.layers)

        return [at(step * nodes + node) for node in range(nodes)], self.step_sizes[step]


def weight_axes(layer: Linear | Norm, name: str) -> tuple[str, ...]:
    """The logical axes of a layer's kernel, bias, scale, shift or adapter factor at one time."""
    if isinstance(layer, Norm):
        return ("embed",)
    inputs, outputs = layer.axes
    return {"kernel": (inputs, outputs), "bias": (outputs,), "a": (inputs, "rank"), "b": ("rank", outputs)}[name]


def in_type(layers: dict, dtype) -> dict:
    """Kernels, biases and adapters of every layer in `dtype`; scales and shifts of norms in fp32.

    In a model with adapters, kernels keep their type (see `low_rank.of_adapters_type`), so that none is held twice.
    """
    adapted = any("a" in weights for weights in layers.values())

    def typed(name, value):
        if name == "kernel" and adapted:
            return value
        return value.astype(jnp.float32 if name in ("scale", "shift") else dtype)

    return {layer: {name: typed(name, value) for name, value in weights.items()} for layer, weights in layers.items()}
