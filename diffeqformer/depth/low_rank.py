"""Low-rank adapters (LoRA): of each step's kernel a frozen base and two trained factors, base + (alpha / rank) a b.

A layer's adapter rides beside its kernel as `a` [T, inputs, rank] and `b` [T, rank, outputs], and is merged
inside the solver's step in training: nothing of the size of all kernels is made. Elsewhere weights are merged once.

@inproceedings{hu2022lora,
  title={{LoRA}: Low-Rank Adaptation of Large Language Models},
  author={Hu, Edward J and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean
          and Wang, Lu and Chen, Weizhu},
  booktitle={International Conference on Learning Representations},
  year={2022}}
"""

import re
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Linear, Norm, as_it_is, parameter

FACTORS = ("a", "b")
ADAPTER_STARTS = ("zero", "published")
"""How adapters start (`model.lora_start`), both without any effect, or almost.

zero: a at 1 / sqrt(inputs), b at 0, as is usual.
published: both at 1e-6, as in the authors' code.
"""


def adapted_layers(layers: dict[str, Linear | Norm], pattern: str, rank: int) -> list[str]:
    """The names of the linear layers that a regular expression matches as a whole, which get adapters.

    Raises:
        UserError: if the pattern is none or matches no linear layer, or one is smaller than the rank.
    """
    linear = [name for name, layer in layers.items() if isinstance(layer, Linear)]
    try:
        matched = [name for name in linear if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UserError(f"config.model.lora_layers: {pattern!r} is no regular expression: {error}") from None
    if not matched:
        raise UserError(f"config.model.lora_layers: must match a layer ({', '.join(linear)}), but it is {pattern!r}")
    for name in matched:
        if rank > (most := min(layers[name].inputs, layers[name].outputs)):
            raise UserError(
                f"config.model.lora_rank: must not exceed the smaller side of each adapted matrix, {most} in {name}, "
                f"but it is {rank}"
            )
    return matched


def add_adapters(
    stack: nnx.Dict, layers: dict[str, Linear | Norm], pattern: str, rank: int, start: str, rngs: nnx.Rngs
) -> None:
    """Give the layers of `adapted_layers` their factors, one pair for each step.

    Args:
        stack: the parameters of every layer with the axis T in front, to which the factors are added.
        layers: their shapes.
        start: one of `ADAPTER_STARTS`.
    """
    for name in adapted_layers(layers, pattern, rank):
        layer, steps = layers[name], len(stack[name].kernel[...])
        stddevs = (layer.inputs**-0.5, 0.0) if start == "zero" else (1e-6, 1e-6)
        shapes = (steps, layer.inputs, rank), (steps, rank, layer.outputs)
        axes = ("time", layer.axes[0], "rank"), ("time", "rank", layer.axes[1])
        for factor, *how in zip(FACTORS, shapes, axes, stddevs):
            stack[name][factor] = parameter(rngs, *how, decays=True, always_trains=True)


def merge(layers: dict, gather: Callable[[dict], dict] = as_it_is) -> dict:
    """The layers without adapters that do the same: kernel + a b. Kernels come out in the type of the factors.

    Args:
        layers: of one step, or stacked. Layers without adapters don't change.
        gather: makes the layers whole, of which a device has parts; kernels are in the factors' type by then.
    """
    dtypes = [weights["a"].dtype for weights in layers.values() if "a" in weights]
    if dtypes:
        layers = {
            name: {**weights, "kernel": weights["kernel"].astype(dtypes[0])} if "kernel" in weights else weights
            for name, weights in layers.items()
        }
    layers = gather(layers)
    return {name: _merged(weights) if "a" in weights else weights for name, weights in layers.items()}


def _merged(weights: dict) -> dict:
    product = jnp.matmul(weights["a"], weights["b"], preferred_element_type=jnp.float32)
    kernel = (weights["kernel"] + product).astype(weights["kernel"].dtype)
    return {**{name: value for name, value in weights.items() if name not in FACTORS}, "kernel": kernel}
