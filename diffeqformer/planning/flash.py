"""What stands for cuDNN's attention in plans for GPUs, as its own can't be traced without one."""

import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from diffeqformer.fields import attention
from diffeqformer.planning.chips import Gpu
from diffeqformer.transformer import vector_field


@jax.custom_vjp
def flash(query, key, value):
    """Stands for attention that stores its result and a number for each row of scores, as cuDNN's does."""
    return query


def _flash_forward(query, key, value):
    result = query + value[:, :, :1]
    result, rows = (checkpoint_name(x, "attention") for x in (result, query[..., 0].astype(jnp.float32)))
    return result, (query, key, value, result, rows)


def _flash_backward(stored, gradient):
    query, key, value, result, rows = stored
    few, rows = (x[:, :, : key.shape[2]] for x in (gradient, rows[..., None].astype(value.dtype)))
    return gradient * result, few * key, few * value * rows


flash.defvjp(_flash_forward, _flash_backward)


def attention_on(gpu: Gpu, config: ConfigDict) -> tuple[Callable, str]:
    """The attention of a run on a kind of GPU, or what stands for it, and its description for the log."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=gpu.capability)
    head_width = vector_field(config.model).head_width
    attend, said = attention.fastest(device, config.model.dtype, config.sequence_length, head_width)
    return flash if attend is attention.cudnn else attend, said
