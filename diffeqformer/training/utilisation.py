"""How much of its devices' arithmetic a train step could use at best."""

import jax
from ml_collections import ConfigDict

from diffeqformer.depth.depths import longest_grid
from diffeqformer.depth.low_rank import adapted_layers
from diffeqformer.fields.layers import Linear
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import vector_field

PEAKS = {  # dense bfloat16 FLOP/s of a device, from data sheets; the first name that is a prefix of its kind counts
    "NVIDIA A100": 312e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12, "NVIDIA H200": 989e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6": 918e12,
    "TPU7x": 2307e12 / 2,
}  # fmt: skip


def peak_of(kind: str) -> float | None:
    """The dense bfloat16 FLOP/s of a device of this kind; None if they aren't known."""
    return next((peak for name, peak in PEAKS.items() if kind.startswith(name)), None)


def step_flops(config: ConfigDict, num_steps: int | None = None) -> float:
    """The FLOPs of a train step with `num_steps` steps of depth (None: the config's), over all devices.

    They are six for each weight of a matrix product, each token and each evaluation of it by the solver (four if the
    weight is frozen, as adapted models' are but for the head), plus the causal half of attention. Recomputation and the
    generator aren't counted. Layers whose names begin with mlp belong to the feed-forward, all others to the attention.
    """
    model = config.model
    field = vector_field(model)
    layers = {name: layer for name, layer in field.layers().items() if isinstance(layer, Linear)}
    adapted = adapted_layers(layers, model.lora_layers, model.lora_rank) if model.lora_rank else ()
    attentions, feed_forwards = SOLVERS[model.solver].counted
    by_weight = 4 if adapted else 6
    one_step = 6 * attentions * field.heads * field.head_width * config.sequence_length
    for name, layer in layers.items():
        flops = by_weight * layer.inputs * layer.outputs
        if name in adapted:
            flops += 6 * model.lora_rank * (layer.inputs + layer.outputs)
        one_step += flops * (feed_forwards if name.startswith("mlp") else attentions)
    by_token = longest_grid(model, num_steps or model.num_steps) * one_step + 6 * model.vocab_size * model.width
    return float(by_token * config.batch_size * config.sequence_length)


def utilisation(config: ConfigDict, seconds: float, devices: list[jax.Device], num_steps: int | None = None) -> float:
    """The share of the devices' peak that a train step uses if it takes that long.

    NaN for devices or a compute type whose peak isn't known.
    """
    peak = peak_of(devices[0].device_kind)
    if not peak or config.model.dtype != "bfloat16":
        return float("nan")
    return step_flops(config, num_steps) / seconds / (peak * len(devices))
