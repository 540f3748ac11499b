"""Low-rank adapters (LoRA). Each step's kernel is a frozen base plus two trained factors: base + (alpha / rank) a b.

A layer's adapter is stored beside its kernel as `a` [T, inputs, rank] and `b` [T, rank, outputs]. A model multiplies
by them one after the other, as published: a small change isn't rounded away in a kernel of a shorter type, and the
gradient of a frozen kernel is never made. Spectra and models that are materialized have them merged into the kernels.

@inproceedings{hu2022lora,
  title={{LoRA}: Low-Rank Adaptation of Large Language Models},
  author={Hu, Edward J and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean
          and Wang, Lu and Chen, Weizhu},
  booktitle={International Conference on Learning Representations},
  year={2022}}
"""

import re

import jax.numpy as jnp
from flax import nnx

from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Linear, Norm, parameter

FACTORS = ("a", "b")
ADAPTER_STARTS = ("zero", "published")
"""The initialisation of adapters (`model.lora_start`), as standard deviations. Adapters have almost no effect at first.

zero: a has 1 / sqrt(inputs), b has 0, as is usual.
published: both have 1e-6, as in the authors' code.
"""


def adapted_layers(layers: dict[str, Linear | Norm], pattern: str, rank: int) -> list[str]:
    """The linear layers that get adapters, whose whole name matches a regular expression; a UserError if they can't."""
    linear = [name for name, layer in layers.items() if isinstance(layer, Linear)]
    try:
        matched = [name for name in linear if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UserError(f"config.model.lora_layers: {pattern!r} isn't a regular expression: {error}") from None
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
    """Add factors to the parameters `stack` of `adapted_layers`, one pair for each step."""
    for name in adapted_layers(layers, pattern, rank):
        layer, steps = layers[name], len(stack[name].kernel[...])
        stddevs = (layer.inputs**-0.5, 0.0) if start == "zero" else (1e-6, 1e-6)
        shapes = (steps, layer.inputs, rank), (steps, rank, layer.outputs)
        axes = ("time", layer.axes[0], "rank"), ("time", "rank", layer.axes[1])
        for factor, *how in zip(FACTORS, shapes, axes, stddevs):
            stack[name][factor] = parameter(rngs, *how, decays=True, always_trains=True)


def of_adapters_type(layers: dict) -> dict:
    """The same layers, of one step or stacked, with kernels in the type of the factors, in which they are gathered and
    multiplied. Without adapters nothing changes.
    """
    dtypes = [weights["a"].dtype for weights in layers.values() if "a" in weights]
    if not dtypes:
        return layers
    return {
        name: {**weights, "kernel": weights["kernel"].astype(dtypes[0])} if "kernel" in weights else weights
        for name, weights in layers.items()
    }


def merge(layers: dict) -> dict:
    """Equivalent layers without adapters: kernel + a b. Kernels are returned in the type of the factors."""
    merged = dict(of_adapters_type(layers))
    for name, weights in layers.items():
        if "a" in weights:
            others = {key: value for key, value in weights.items() if key not in FACTORS}
            product = jnp.matmul(weights["a"], weights["b"], preferred_element_type=jnp.float32)
            merged[name] = {**others, "kernel": (weights["kernel"] + product).astype(weights["a"].dtype)}
    return merged
