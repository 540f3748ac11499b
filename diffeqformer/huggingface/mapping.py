"""Which parameter of ours is which of theirs, in both directions: one table for each architecture."""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from diffeqformer.transformer import Path


class Transform(NamedTuple):
    """How an array of theirs becomes ours, and ours theirs, each without rounding. Both are given the number of heads.

    They work on the arrays of one layer, and `to_ours` on some rows of them, too.

    transposed: the rows of ours are their columns.
    """

    to_ours: Callable[[np.ndarray, int], np.ndarray]
    to_theirs: Callable[[np.ndarray, int], np.ndarray]
    transposed: bool = False


def _heads_first(array: Float[np.ndarray, "*D outputs"], heads: int) -> Float[np.ndarray, "*D outputs"]:
    """From the order [query | key | value, head, width] of the last axis to [head, query | key | value, width]."""
    return array.reshape(*array.shape[:-1], 3, heads, -1).swapaxes(-3, -2).reshape(array.shape)


def _parts_first(array: Float[np.ndarray, "*D outputs"], heads: int) -> Float[np.ndarray, "*D outputs"]:
    """The reverse of `_heads_first`."""
    return array.reshape(*array.shape[:-1], heads, 3, -1).swapaxes(-3, -2).reshape(array.shape)


SAME = Transform(lambda array, _: array, lambda array, _: array)
# torch's Linear keeps [outputs, inputs]
TRANSPOSED = Transform(lambda array, _: array.T, lambda array, _: array.T, transposed=True)
HEADS_FIRST = Transform(_heads_first, _parts_first)


class Row(NamedTuple):
    """One parameter.

    ours: its path, where the layers' arrays are stacked if it is in `depth`.
    theirs: the name of their tensor, with {} for the number of the layer.
    transform: how one becomes the other.
    earlier: its name in files of earlier versions.
    """

    ours: Path
    theirs: str
    transform: Transform = SAME
    earlier: str = ""

    def name(self, layer: int, names: Collection[str]) -> str:
        """The name of its tensor among `names`, where its first part may be missing; if it isn't there, the usual one.

        The first part is that of the whole model, without a head, from which some files were saved.
        """
        usual = self.theirs.format(layer)
        return next((name for name in (usual, self.earlier, usual.partition(".")[2]) if name in names), usual)


def _linear(layer: str, theirs: str, kernel: Transform = TRANSPOSED, bias: Transform = SAME) -> list[Row]:
    ours = "depth", "layers", layer
    return [Row((*ours, "kernel"), f"{theirs}.weight", kernel), Row((*ours, "bias"), f"{theirs}.bias", bias)]


def _norms(attention: str, feed_forward: str, last: str) -> list[Row]:
    layers = "depth", "layers"
    norms = {(*layers, "norm_attention"): attention, (*layers, "norm_mlp"): feed_forward, ("final_norm",): last}
    leaves = {"scale": "weight", "shift": "bias"}
    return [Row((*ours, a), f"{theirs}.{b}") for ours, theirs in norms.items() for a, b in leaves.items()]


GPT2 = [
    Row(("token_embedding",), "transformer.wte.weight"),
    Row(("position_embedding",), "transformer.wpe.weight"),
    *_norms("transformer.h.{}.ln_1", "transformer.h.{}.ln_2", "transformer.ln_f"),
    # GPT-2 has no Linear but Conv1D, which keeps [inputs, outputs] as we do
    *_linear("qkv", "transformer.h.{}.attn.c_attn", HEADS_FIRST, HEADS_FIRST),
    *_linear("attention_out", "transformer.h.{}.attn.c_proj", SAME),
    *_linear("mlp_up", "transformer.h.{}.mlp.c_fc", SAME),
    *_linear("mlp_down", "transformer.h.{}.mlp.c_proj", SAME),
    Row(("lm_head",), "lm_head.weight", TRANSPOSED),
]
LLAMA = [
    Row(("token_embedding",), "model.embed_tokens.weight"),
    *_norms("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm", "model.norm"),
    # both rotate the pairs (k, k + K / 2) of a head, so queries and keys keep their order
    *_linear("query", "model.layers.{}.self_attn.q_proj"),
    *_linear("key", "model.layers.{}.self_attn.k_proj"),
    *_linear("value", "model.layers.{}.self_attn.v_proj"),
    *_linear("attention_out", "model.layers.{}.self_attn.o_proj"),
    *_linear("mlp_gate", "model.layers.{}.mlp.gate_proj"),
    *_linear("mlp_up", "model.layers.{}.mlp.up_proj"),
    *_linear("mlp_down", "model.layers.{}.mlp.down_proj"),
    Row(("lm_head",), "lm_head.weight", TRANSPOSED),
]
NEOX = [
    Row(("token_embedding",), "gpt_neox.embed_in.weight"),
    *_norms(
        "gpt_neox.layers.{}.input_layernorm",
        "gpt_neox.layers.{}.post_attention_layernorm",
        "gpt_neox.final_layer_norm",
    ),
    # its outputs are ordered [head, query | key | value, width], as ours are
    *_linear("qkv", "gpt_neox.layers.{}.attention.query_key_value"),
    *_linear("attention_out", "gpt_neox.layers.{}.attention.dense"),
    *_linear("mlp_up", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
    *_linear("mlp_down", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    Row(("lm_head",), "lm_head.weight", TRANSPOSED, "embed_out.weight"),  # the second before Transformers 5
]


def tensors_of(
    rows: list[Row], leaves: dict[Path, tuple[int, ...]], heads: int, names: Collection[str] = ()
) -> Iterator[tuple[Row, int, str, tuple[int, ...]]]:
    """The tensors that a model consists of: each one's row, the number of its layer, its name, and its shape there.

    Args:
        leaves: the shapes of our parameters, by path.
        names: those of a file, which may have other names for some.
    """
    for row in rows:
        if row.ours in leaves:
            stacked, shape = row.ours[0] == "depth", leaves[row.ours]
            one = np.broadcast_to(np.float32(0), shape[stacked:])
            theirs = row.transform.to_theirs(one, heads).shape
            for layer in range(shape[0] if stacked else 1):
                yield row, layer, row.name(layer, names), theirs
