"""What a config.json means in the fields of our config, and what of it this version can't compute.

A config.json leaves out what has the default of its architecture, so the defaults are here, as in Transformers 5. A
null stands for 0 or nothing.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from diffeqformer.errors import UserError
from diffeqformer.huggingface.mapping import GPT2, LLAMA, NEOX, Row

OF_LLAMA = dict(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=0,  # as many as heads
    head_dim=0,  # hidden_size / num_attention_heads
    hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False,
    tie_word_embeddings=False, rope_theta=10_000.0, partial_rotary_factor=1.0, use_sliding_window=False,
    sliding_window=0,
)  # fmt: skip
OF_QWEN2 = OF_LLAMA | dict(
    vocab_size=151_936, intermediate_size=22_016, num_key_value_heads=32, max_position_embeddings=32_768
)
OF_MISTRAL = OF_LLAMA | dict(
    intermediate_size=14_336, num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096
)
OF_GPT2 = dict(
    vocab_size=50_257, n_positions=1024, n_embd=768, n_layer=12, n_head=12,
    n_inner=0,  # four times n_embd
    activation_function="gelu_new", layer_norm_epsilon=1e-5, scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True,
)  # fmt: skip
OF_NEOX = dict(
    vocab_size=50_432, hidden_size=6144, intermediate_size=24_576, num_hidden_layers=44, num_attention_heads=64,
    hidden_act="gelu", max_position_embeddings=2048, layer_norm_eps=1e-5, attention_bias=True,
    use_parallel_residual=True, tie_word_embeddings=False, rope_theta=10_000.0, partial_rotary_factor=0.25,
)  # fmt: skip
OTHER_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""What earlier versions called two fields of GPT-NeoX."""

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of rotations of the type llama3."""


class Unsupported(ValueError):
    """A field of config.json that this version can't compute with. The message begins with its name."""


def _require(fields: dict, name: str, *values: Any) -> None:
    if fields[name] not in values:
        possible = " or ".join(repr(value) for value in values)
        raise Unsupported(f"{name}: must be {possible} to be imported, but it is {fields[name]!r}")


def _gpt2(fields: dict) -> dict:
    """The `model` part of our config for a GPT2LMHeadModel."""
    _require(fields, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one function of three names
    _require(fields, "scale_attn_weights", True)
    _require(fields, "scale_attn_by_inverse_layer_idx", False)
    _require(fields, "tie_word_embeddings", True)
    return {
        "width": fields["n_embd"],
        "heads": fields["n_head"],
        "mlp": fields["n_inner"] or 4 * fields["n_embd"],
        "num_steps": fields["n_layer"],
        "max_length": fields["n_positions"],
        "norm_epsilon": fields["layer_norm_epsilon"],
    }


OURS = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "num_steps": "num_hidden_layers",
    "max_length": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
}
"""Our names of what all architectures but GPT-2 call the same."""


def _llama(fields: dict) -> dict:
    """The same for a LlamaForCausalLM and what has its block."""
    _require(fields, "hidden_act", "silu", "swish")
    _require(fields, "partial_rotary_factor", 1.0)
    heads, of_values, head_width = (fields[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if fields["mlp_bias"] and not fields["attention_bias"]:
        raise Unsupported("mlp_bias: must be False without attention_bias to be imported, but it is True")
    return {
        **{ours: fields[theirs] for ours, theirs in OURS.items()},
        "key_value_heads": 0 if of_values == heads else of_values,
        "head_width": 0 if head_width * heads == fields["hidden_size"] else head_width,
        "norm_epsilon": fields["rms_norm_eps"],
        "biases": "all" if fields["mlp_bias"] else "attention" if fields["attention_bias"] else "none",
    }


def _mistral(fields: dict) -> dict:
    """The same for a MistralForCausalLM without a sliding window, or with one that no text exceeds."""
    window, positions = fields["sliding_window"], fields["max_position_embeddings"]
    if 0 < window < positions:
        raise Unsupported(
            f"sliding_window: must be null, or no less than max_position_embeddings ({positions}), to be imported, but "
            f"it is {window}"
        )
    return _llama(fields)


def _qwen2(fields: dict) -> dict:
    """The same for a Qwen2ForCausalLM, whose queries, keys and values have biases."""
    _require(fields, "use_sliding_window", False)
    return _llama(fields) | {"biases": "qkv"}


def _neox(fields: dict) -> dict:
    """The same for a GPTNeoXForCausalLM."""
    _require(fields, "hidden_act", "gelu")
    _require(fields, "attention_bias", True)
    return {
        **{ours: fields[theirs] for ours, theirs in OURS.items()},
        "norm_epsilon": fields["layer_norm_eps"],
        "rotary_fraction": fields["partial_rotary_factor"],
        "solver": "euler" if fields["use_parallel_residual"] else "lie_trotter",
    }


class Architecture(NamedTuple):
    """One row of the table of architectures.

    kind: our model that computes the same, a key of `diffeqformer.transformer.MODELS`.
    defaults: of the fields of its config.json that count.
    model: the fields of the `model` part of our config, but vocab_size, from these.
    rows: its tensors.
    """

    kind: str
    defaults: dict[str, Any]
    model: Callable[[dict], dict]
    rows: list[Row]


ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture("gpt", OF_GPT2, _gpt2, GPT2),
    "LlamaForCausalLM": Architecture("llama", OF_LLAMA, _llama, LLAMA),
    "MistralForCausalLM": Architecture("llama", OF_MISTRAL, _mistral, LLAMA),
    "Qwen2ForCausalLM": Architecture("llama", OF_QWEN2, _qwen2, LLAMA),
    "GPTNeoXForCausalLM": Architecture("neox", OF_NEOX, _neox, NEOX),
}
"""What can be imported, by the name in `architectures` of config.json."""


def read_model(given: dict[str, Any], file: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """The architecture of a config.json, and the fields of the `model` part of our config.

    Args:
        given: its fields.

    Raises:
        UserError: if it isn't one of `ARCHITECTURES`, or has something that this version can't compute.
    """
    try:
        named = given.get("architectures") or []
        name = named[0] if isinstance(named, list) and len(named) == 1 else named
        if name not in (*ARCHITECTURES,):
            raise Unsupported(f"architectures: must be one of {', '.join(ARCHITECTURES)}, but it is {name!r}")
        if given.get("quantization_config"):
            raise Unsupported("quantization_config: the weights are quantised; take a folder with the original ones")
        layers = given.get("layer_types") or []
        if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
            raise Unsupported(f"layer_types: must be full_attention alone, but it is {layers!r}")
        fields = _with_defaults(_with_rotations(given), ARCHITECTURES[name].defaults)
        model = {**ARCHITECTURES[name].model(fields), "vocab_size": fields["vocab_size"]}
        if not model["norm_epsilon"] > 0:  # our 0 stands for a default
            raise Unsupported(
                f"the epsilon of norms: must be above 0 to be imported, but it is {model['norm_epsilon']}"
            )
        return name, model
    except Unsupported as error:
        raise UserError(f"{file}: {error}") from None


def _with_defaults(given: dict, defaults: dict) -> dict:
    """The value of each field that has a default. Its type must be the default's."""
    fields = {"rope_scaling": given["rope_scaling"]}
    for name, default in defaults.items():
        value = given.get(name, default)
        needed = type(default)
        value = needed(value or 0) if value is None or (needed is float and type(value) is int) else value
        if type(value) is not needed:
            raise Unsupported(f"{name}: must be of type {needed.__name__}, but it is {value!r}")
        fields[name] = value
    return fields


def _with_rotations(given: dict) -> dict:
    """The same fields, with the rotary ones, which versions write in several ways, under one name each."""
    nested = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given.get(name) or {}, dict):
            raise Unsupported(f"{name}: must hold fields, but it is {given[name]!r}")
        nested |= given.get(name) or {}
    fields, names = {}, ("rope_theta", "partial_rotary_factor", *OTHER_NAMES)
    for name, value in ((name, where.get(name)) for where in (given, nested) for name in names):
        name = OTHER_NAMES.get(name, name)
        if value is not None and fields.setdefault(name, value) != value:
            raise Unsupported(f"{name}: must have one value, but it is {fields[name]!r} and {value!r}")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise Unsupported(f"rope_parameters: must be of the type default or llama3 to be imported, but it is {kind!r}")
    numbers = [nested.get(name) for name in LLAMA3] if kind == "llama3" else []
    if not all(isinstance(number, int | float) for number in numbers):
        raise Unsupported(f"rope_parameters: must give {', '.join(LLAMA3)} as numbers, but it is {nested!r}")
    others = {name: value for name, value in given.items() if name not in names}
    return {**others, **fields, "rope_scaling": ",".join(map(str, numbers))}
