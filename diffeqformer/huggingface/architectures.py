"""What a config.json and tensors mean in our terms, in both directions, and what of it this version can't compute.

A config.json leaves out what has the default of its architecture, so the defaults are here, as in Transformers 5. A
null stands for 0 or nothing.
"""

import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.errors import UserError
from diffeqformer.transformer import Path, vector_field


class Field(NamedTuple):
    """One field of a config.json.

    theirs: its name.
    default: its value where it is left out, of the type that it must have.
    ours: the field of the `model` part of our config that means the same; empty: none does.
    only: all values that can be computed with, of which the first is written; empty: any.
    """

    theirs: str
    default: Any
    ours: str = ""
    only: tuple = ()


OF_GPT2 = [
    Field("vocab_size", 50_257, "vocab_size"),
    Field("n_positions", 1024, "max_length"),
    Field("n_embd", 768, "width"),
    Field("n_layer", 12, "num_steps"),
    Field("n_head", 12, "heads"),
    Field("n_inner", 0, "mlp"),  # 0: four times n_embd
    Field("layer_norm_epsilon", 1e-5, "norm_epsilon"),
    # one function of three names
    Field("activation_function", "gelu_new", only=("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),
    Field("scale_attn_weights", True, only=(True,)),
    Field("scale_attn_by_inverse_layer_idx", False, only=(False,)),
    Field("tie_word_embeddings", True, only=(True,)),
]
OF_LLAMA = [
    Field("vocab_size", 32_000, "vocab_size"),
    Field("hidden_size", 4096, "width"),
    Field("intermediate_size", 11_008, "mlp"),
    Field("num_hidden_layers", 32, "num_steps"),
    Field("num_attention_heads", 32, "heads"),
    Field("num_key_value_heads", 0, "key_value_heads"),  # 0: as many as heads
    Field("head_dim", 0, "head_width"),  # 0: hidden_size / num_attention_heads
    Field("max_position_embeddings", 2048, "max_length"),
    Field("rms_norm_eps", 1e-6, "norm_epsilon"),
    Field("attention_bias", False),
    Field("mlp_bias", False),
    Field("tie_word_embeddings", False, "tied_head"),
    Field("rope_theta", 10_000.0, "rope_theta"),
    Field("rope_scaling", "", "rope_scaling"),
    Field("hidden_act", "silu", only=("silu", "swish")),
    Field("partial_rotary_factor", 1.0, only=(1.0,)),
]
OF_NEOX = [
    Field("vocab_size", 50_432, "vocab_size"),
    Field("hidden_size", 6144, "width"),
    Field("intermediate_size", 24_576, "mlp"),
    Field("num_hidden_layers", 44, "num_steps"),
    Field("num_attention_heads", 64, "heads"),
    Field("max_position_embeddings", 2048, "max_length"),
    Field("layer_norm_eps", 1e-5, "norm_epsilon"),
    Field("use_parallel_residual", True),
    Field("tie_word_embeddings", False, "tied_head"),
    Field("rope_theta", 10_000.0, "rope_theta"),
    Field("rope_scaling", "", "rope_scaling"),
    Field("partial_rotary_factor", 0.25, "rotary_fraction"),
    Field("hidden_act", "gelu", only=("gelu",)),
    Field("attention_bias", True, only=(True,)),
]


def _but(fields: list[Field], **defaults: Any) -> list[Field]:
    """The same fields with other defaults. Those that aren't among them follow."""
    known = [field._replace(default=defaults.pop(field.theirs, field.default)) for field in fields]
    return known + [Field(name, default) for name, default in defaults.items()]


OF_QWEN2 = _but(
    OF_LLAMA, vocab_size=151_936, intermediate_size=22_016, num_key_value_heads=32, max_position_embeddings=32_768
) + [Field("use_sliding_window", False, only=(False,))]
OF_MISTRAL = _but(
    OF_LLAMA, intermediate_size=14_336, num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096
)
OTHER_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""What earlier versions called two fields of GPT-NeoX."""

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of rotations of the type llama3."""


def _from_gpt2(fields: dict) -> dict:
    return {"mlp": fields["n_inner"] or 4 * fields["n_embd"]}


def _to_gpt2(model: dict) -> dict:
    return {"n_ctx": model["max_length"]}  # llama.cpp's converter reads it


def _from_llama(fields: dict) -> dict:
    heads, of_values, head_width = (fields[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if fields["mlp_bias"] and not fields["attention_bias"]:
        raise UserError("mlp_bias: must be False without attention_bias to be imported, but it is True")
    return {
        "key_value_heads": 0 if of_values == heads else of_values,
        "head_width": 0 if head_width * heads == fields["hidden_size"] else head_width,
        "biases": "all" if fields["mlp_bias"] else "attention" if fields["attention_bias"] else "none",
    }


def _to_llama(model: dict) -> dict:
    biases = {"attention_bias": model["biases"] in ("attention", "all"), "mlp_bias": model["biases"] == "all"}
    return {**biases, **_to_rotations(model)}


def _from_mistral(fields: dict) -> dict:
    window, positions = fields["sliding_window"], fields["max_position_embeddings"]
    if 0 < window < positions:  # no text exceeds a longer one
        raise UserError(
            f"sliding_window: must be null, or no less than max_position_embeddings ({positions}), to be imported, but "
            f"it is {window}"
        )
    return _from_llama(fields)


def _from_qwen2(fields: dict) -> dict:
    return _from_llama(fields) | {"biases": "qkv"}


def _from_neox(fields: dict) -> dict:
    return {"solver": "euler" if fields["use_parallel_residual"] else "lie_trotter"}


def _to_neox(model: dict) -> dict:
    earlier = {"rotary_emb_base": model["rope_theta"], "rotary_pct": model["rotary_fraction"]}
    fields = _to_rotations(model)
    fields["rope_parameters"]["partial_rotary_factor"] = model["rotary_fraction"]
    return {"use_parallel_residual": model["solver"] == "euler", **earlier, **fields}


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


class Architecture(NamedTuple):
    """One row of the table of architectures.

    kind: our model that computes the same, a key of `diffeqformer.transformer.MODELS`.
    fields: those of its config.json that count.
    rows: its tensors.
    to_ours: the fields of our config's `model` part that aren't the same as one of theirs.
    to_theirs: the reverse.
    model_type: another name of it, which is written; empty: it is imported, but not exported.
    """

    kind: str
    fields: list[Field]
    rows: list[Row]
    to_ours: Callable[[dict], dict]
    to_theirs: Callable[[dict], dict] | None = None
    model_type: str = ""


ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture("gpt", OF_GPT2, GPT2, _from_gpt2, _to_gpt2, "gpt2"),
    "LlamaForCausalLM": Architecture("llama", OF_LLAMA, LLAMA, _from_llama, _to_llama, "llama"),
    "MistralForCausalLM": Architecture("llama", OF_MISTRAL, LLAMA, _from_mistral),
    "Qwen2ForCausalLM": Architecture("llama", OF_QWEN2, LLAMA, _from_qwen2),
    "GPTNeoXForCausalLM": Architecture("neox", OF_NEOX, NEOX, _from_neox, _to_neox, "gpt_neox"),
}
"""What can be imported and exported, by the name in `architectures` of config.json."""


def read_model(given: dict[str, Any], file: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """The architecture of a config.json, whose fields are given, and the fields of the `model` part of our config.

    A UserError says if it isn't one of `ARCHITECTURES`, or has something that this version can't compute.
    """
    try:
        named = given.get("architectures") or []
        name = named[0] if isinstance(named, list) and len(named) == 1 else named
        if name not in (*ARCHITECTURES,):  # it may be unhashable
            raise UserError(f"architectures: must be one of {', '.join(ARCHITECTURES)}, but it is {name!r}")
        if given.get("quantization_config"):
            raise UserError("quantization_config: the weights are quantised; take a folder with the original ones")
        if {*(given.get("layer_types") or ["full_attention"])} != {"full_attention"}:
            raise UserError(f"layer_types: must be full_attention alone, but it is {given['layer_types']!r}")
        table = ARCHITECTURES[name].fields
        fields = _with_defaults(_with_rotations(given), table)
        model = {field.ours: fields[field.theirs] for field in table if field.ours}
        model |= ARCHITECTURES[name].to_ours(fields)
        if not model["norm_epsilon"] > 0:  # our 0 stands for a default
            raise UserError(f"the epsilon of norms: must be above 0 to be imported, but it is {model['norm_epsilon']}")
        return name, model
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _with_defaults(given: dict, table: list[Field]) -> dict:
    """The value of each field of a table, checked."""
    fields = {}
    for name, default, _, only in table:
        value = given.get(name, default)
        needed = type(default)
        value = needed(value or 0) if value is None or (needed is float and type(value) is int) else value
        if type(value) is not needed:
            raise UserError(f"{name}: must be of type {needed.__name__}, but it is {value!r}")
        if only and value not in only:
            possible = " or ".join(map(repr, only))
            raise UserError(f"{name}: must be {possible} to be imported, but it is {value!r}")
        fields[name] = value
    return fields


def _with_rotations(given: dict) -> dict:
    """The same fields, with the rotary ones, which versions write in several ways, under one name each."""
    nested = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given.get(name) or {}, dict):
            raise UserError(f"{name}: must hold fields, but it is {given[name]!r}")
        nested |= given.get(name) or {}
    fields, names = {}, ("rope_theta", "partial_rotary_factor", *OTHER_NAMES)
    for name, value in ((name, where.get(name)) for where in (given, nested) for name in names):
        name = OTHER_NAMES.get(name, name)
        if value is not None and fields.setdefault(name, value) != value:
            raise UserError(f"{name}: must have one value, but it is {fields[name]!r} and {value!r}")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"rope_parameters: must be of the type default or llama3 to be imported, but it is {kind!r}")
    numbers = [nested.get(name) for name in LLAMA3] if kind == "llama3" else []
    if not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"rope_parameters: must give {', '.join(LLAMA3)} as numbers, but it is {nested!r}")
    others = {name: value for name, value in given.items() if name not in names}
    return {**others, **fields, "rope_scaling": ",".join(map(str, numbers))}


def write_model(model: ConfigDict) -> dict[str, Any]:
    """The fields of the config.json of a baseline, from the `model` part of its config: `read_model` reversed."""
    block = vector_field(model)
    ours = {**model, "key_value_heads": block.key_value_heads, "head_width": block.head_width}
    [(name, row)] = ((name, row) for name, row in ARCHITECTURES.items() if row.model_type and row.kind == model.kind)
    same = {field.theirs: ours[field.ours] for field in row.fields if field.ours}
    only = {field.theirs: field.only[0] for field in row.fields if field.only}
    return {"architectures": [name], "model_type": row.model_type, **same, **only, **row.to_theirs(ours)}


def _to_rotations(model: dict) -> dict:
    """Rotations as Transformers 5 reads them, and as earlier versions and others do."""
    numbers = model["rope_scaling"].split(",") if model["rope_scaling"] else []
    scaling = {"rope_type": "llama3"} | {name: float(number) for name, number in zip(LLAMA3, numbers)}
    scaling = {**scaling, LLAMA3[-1]: int(scaling[LLAMA3[-1]])} if numbers else None
    parameters = {"rope_type": "default", "rope_theta": model["rope_theta"], **(scaling or {})}
    return {"rope_scaling": scaling, "rope_parameters": parameters}


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
