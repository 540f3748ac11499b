"""Causal attention, equation (1) of the paper for every head, with the fastest implementation for each platform.

H / G queries in a row share each key and value, of which no implementation makes copies.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

BLOCKS = (512, 384, 256, 128)  # positions of a tile of splash attention


def plain(
    query: Float[Array, "B S H K"], key: Float[Array, "B S G K"], value: Float[Array, "B S G K"]
) -> Float[Array, "B S H K"]:
    """For all platforms: XLA's own attention, which holds all S x S scores of each head."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def cudnn(
    query: Float[Array, "B S H K"], key: Float[Array, "B S G K"], value: Float[Array, "B S G K"]
) -> Float[Array, "B S H K"]:
    """For NVIDIA GPUs: cuDNN's flash attention."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def splash(
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """For TPUs: the Pallas kernel that comes with JAX. Its backward pass recomputes the scores, tile by tile."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    _, sequence, heads, width = query.shape
    block = next(size for size in BLOCKS if sequence % size == 0)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    minor = splash_attention.QKVLayout.SEQ_MINOR  # positions along the lanes (`layers.heads_by_position`)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((sequence, sequence))] * heads),
        block_sizes=splash_attention.BlockSizes(**sizes, q_layout=minor, k_layout=minor, v_layout=minor),
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    query, key, value = (x.swapaxes(1, 2) for x in (query * width**-0.5, key, value))
    return jax.vmap(kernel)(query, key, value).swapaxes(1, 2)


def fastest(device, dtype: str, sequence_length: int, head_width: int) -> tuple[Callable, str]:
    """The implementation for devices like this one, and its description for the log.

    The device may belong to a topology description. cuDNN and splash have limits. Beyond them, attention is plain, and
    the description gives the reason.
    """
    if device.platform == "tpu":
        if sequence_length % 128 == 0:
            return splash, "splash"
        return plain, f"plain: splash needs a sequence length that is a multiple of 128, and it is {sequence_length}"
    if device.platform == "gpu":
        capability = str(getattr(device, "compute_capability", ""))  # "9.0", or AMD's "gfx942"
        generation = int(capability.partition(".")[0]) if capability.replace(".", "").isdigit() else 0
        widest = 256 if generation >= 9 else 128
        fits = head_width <= widest and head_width % 8 == 0 and sequence_length % 2 == 0
        if generation >= 8 and dtype != "float32" and fits:
            return cudnn, "cuDNN"
        return plain, (
            "plain: cuDNN needs an NVIDIA GPU of compute capability 8 or more, bfloat16, a head width of 8, 16, ... "
            f"{widest} and an even sequence length, and they are {capability or 'unknown'}, {dtype}, {head_width}, "
            f"{sequence_length}"
        )
    return plain, "plain"
