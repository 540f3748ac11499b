"""How much of its devices' arithmetic a train step could use at best."""

import jax
from ml_collections import ConfigDict

from diffeqformer.fields.layers import Linear
from diffeqformer.transformer import vector_field

PEAKS = {  # dense bfloat16 FLOP/s from data sheets; the first name that is a prefix of the device kind counts
    "NVIDIA A100": 312e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12, "NVIDIA H200": 989e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6": 918e12,
}  # fmt: skip


def step_flops(config: ConfigDict, num_steps: int | None = None) -> float:
    """The FLOPs of a train step with `num_steps` steps of depth (None: the config's), over all devices.

    They are six for each weight of a matrix product and token, plus the causal half of attention. Recomputation and the
    generator aren't counted.
    """
    model = config.model
    layers = [layer for layer in vector_field(model).layers().values() if isinstance(layer, Linear)]
    one_step = sum(layer.inputs * layer.outputs for layer in layers) + model.width * config.sequence_length
    by_token = 6.0 * ((num_steps or model.num_steps) * one_step + model.vocab_size * model.width)
    return by_token * config.batch_size * config.sequence_length


def utilisation(config: ConfigDict, seconds: float, devices: list[jax.Device], num_steps: int | None = None) -> float:
    """The share of the devices' peak that a train step uses if it takes that long.

    NaN for devices or a compute type whose peak isn't known.
    """
    kind = devices[0].device_kind
    peaks = [peak for name, peak in PEAKS.items() if kind.startswith(name)]
    if not peaks or config.model.dtype != "bfloat16":
        return float("nan")
    return step_flops(config, num_steps) / seconds / (peaks[0] * len(devices))
