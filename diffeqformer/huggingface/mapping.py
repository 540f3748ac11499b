"""Which parameter of ours is which of theirs, in both directions: one table for each architecture."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from diffeqformer.transformer import Path


def _reordered(array: Float[np.ndarray, "*D outputs"], parts: int, of_each: int) -> Float[np.ndarray, "*D outputs"]:
    """The last axis, of [parts, of_each, width], as [of_each, parts, width]."""
    return array.reshape(*array.shape[:-1], parts, of_each, -1).swapaxes(-3, -2).reshape(array.shape)


class Row(NamedTuple):
    """One parameter.

    ours: its path, where the layers' arrays are stacked if it is in `depth`.
    theirs: the name of their tensor, with {} for the number of the layer.
    transposed: torch's Linear keeps [outputs, inputs].
    qkv: the last axis of theirs is [query | key | value, head, width], and of ours [head, query | key | value, width].
    earlier: its name in files of earlier versions.
    """

    ours: Path
    theirs: str
    transposed: bool = False
    qkv: bool = False
    earlier: str = ""

    def to_ours(self, array: np.ndarray, heads: int) -> np.ndarray:
        """Our array of one layer, or some of its rows, from theirs, without rounding."""
        array = array.T if self.transposed else array
        return _reordered(array, 3, heads) if self.qkv else array

    def to_theirs(self, array: np.ndarray, heads: int) -> np.ndarray:
        """The reverse of `to_ours`."""
        array = _reordered(array, heads, 3) if self.qkv else array
        return array.T if self.transposed else array

    def name(self, layer: int, names: Collection[str]) -> str:
        """The name of its tensor among `names`; if it isn't there, the usual one. Some files lack its first part."""
        usual = self.theirs.format(layer)
        return next((name for name in (usual, self.earlier, usual.partition(".")[2]) if name in names), usual)


def _linear(layer: str, theirs: str, transposed: bool = True, qkv: bool = False) -> list[Row]:
    ours = "depth", "layers", layer
    kernel = Row((*ours, "kernel"), f"{theirs}.weight", transposed, qkv)
    return [kernel, Row((*ours, "bias"), f"{theirs}.bias", qkv=qkv)]


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
    *_linear("qkv", "transformer.h.{}.attn.c_attn", transposed=False, qkv=True),
    *_linear("attention_out", "transformer.h.{}.attn.c_proj", transposed=False),
    *_linear("mlp_up", "transformer.h.{}.mlp.c_fc", transposed=False),
    *_linear("mlp_down", "transformer.h.{}.mlp.c_proj", transposed=False),
    Row(("lm_head",), "lm_head.weight", transposed=True),
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
    Row(("lm_head",), "lm_head.weight", transposed=True),
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
    Row(("lm_head",), "lm_head.weight", transposed=True, earlier="embed_out.weight"),  # before Transformers 5
]


def tensors_of(
    rows: list[Row], leaves: dict[Path, tuple[int, ...]], heads: int, names: Collection[str] = ()
) -> Iterator[tuple[Row, int, str, tuple[int, ...]]]:
    """The tensors that a model consists of: each one's row, the number of its layer, its name, and its shape there.

    `leaves` are the shapes of our parameters, and `names` those of a file, which may have other names for some.
    """
    for row in rows:
        if row.ours in leaves:
            stacked, shape = row.ours[0] == "depth", leaves[row.ours]
            one = np.broadcast_to(np.float32(0), shape[stacked:])
            theirs = row.to_theirs(one, heads).shape
            for layer in range(shape[0] if stacked else 1):
                yield row, layer, row.name(layer, names), theirs
