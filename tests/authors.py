"""The authors' reference numbers (tests/data), with their parameters converted to our layout."""

import pathlib

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from diffeqformer.config import base_config
from diffeqformer.transformer import Transformer

DATA = pathlib.Path(__file__).parent / "data"

# our layer -> (its path in the DiffEqFormer's block, its path in the vanilla blocks)
LAYERS = {
    "gpt": {
        "norm_attention": ("attn_ln", "ln_1"),
        "qkv": ("attn.c_attn", "attn.c_attn"),
        "attention_out": ("attn.c_proj", "attn.c_proj"),
        "norm_mlp": ("mlp_ln", "ln_2"),
        "mlp_up": ("mlp.c_fc", "mlp.c_fc"),
        "mlp_down": ("mlp.c_proj", "mlp.c_proj"),
    },
    "llama": {
        name: (path, path)
        for name, path in {
            "norm_attention": "input_layernorm",
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "attention_out": "self_attn.o_proj",
            "norm_mlp": "post_attention_layernorm",
            "mlp_gate": "mlp.gate_proj",
            "mlp_up": "mlp.up_proj",
            "mlp_down": "mlp.down_proj",
        }.items()
    },
}

# (kind, field) of our model -> (file, path of the blocks)
MODELS = {
    ("diffeqformer", "gpt"): ("authors_gpt.npz", "transformer.block"),
    ("gpt", "gpt"): ("authors_vanilla_gpt2.npz", "transformer.blocks.stacked"),
    ("diffeqformer", "llama"): ("authors_llama.npz", "transformer.block"),
    ("llama", "llama"): ("authors_vanilla_llama.npz", "transformer.layers.stacked"),
}


def model_config(kind: str, field: str | None = None, **changes) -> ConfigDict:
    """The `model` part of a config at the reference's sizes."""
    config = base_config("", kind, field or "gpt").model
    config.update(width=32, heads=4, mlp=64 if config.field == "llama" else 128, num_steps=6, vocab_size=64)
    config.update(max_length=16, time_embed_dim=12, sinusoidal_dim=8, dropout=0.0, dtype="float32", remat="none")
    config.update(changes)
    return config


def build(config: ConfigDict, params: dict) -> Transformer:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)
    return nnx.merge(graph, jax.device_put(params))


def flatten_kernel(name: str, kernel: np.ndarray, lead: int) -> np.ndarray:
    """Their linear weight [*lead, inputs..., outputs...] with inputs and outputs flattened, heads first in `qkv`."""
    if name == "qkv":  # [..., D, 3, H, K] -> [..., D, H, 3, K]
        kernel = kernel.swapaxes(-3, -2)
    if name in ("qkv", "query", "key", "value"):
        return kernel.reshape(*kernel.shape[: lead + 1], -1)
    if name == "attention_out":  # [..., H, K, D]
        return kernel.reshape(*kernel.shape[:lead], -1, kernel.shape[-1])
    return kernel


def flatten_bias(name: str, bias: np.ndarray) -> np.ndarray:
    """Their bias [lead, outputs...] with outputs flattened, heads first in `qkv`."""
    return bias.swapaxes(-3, -2).reshape(len(bias), -1) if name == "qkv" else bias


def renamed(arrays, names: dict[str, str], prefix: str) -> dict:
    """Their arrays under our names, as far as they have them."""
    return {ours: arrays[prefix + theirs] for ours, theirs in names.items() if prefix + theirs in arrays}


def generated_layer(arrays, prefix: str, name: str) -> dict:
    mlp = {"lin1": "lin1.weight", "lin1_bias": "lin1.bias", "lin2": "lin2.weight", "lin2_bias": "lin2.bias"}
    layer = {"mlp": renamed(arrays, mlp, prefix)}
    if name.startswith("norm"):
        norm = renamed(arrays, {"scale_projection": "f_weight", "shift_projection": "f_bias"}, prefix)
        return {**layer, **{ours: theirs.T for ours, theirs in norm.items()}}
    layer["projection"] = flatten_kernel(name, arrays[f"{prefix}f_W.weight"], lead=1).swapaxes(0, 1)
    layer["constant"] = flatten_kernel(name, arrays[f"{prefix}f_W.bias"], lead=0)
    if f"{prefix}f_b" in arrays:
        layer["bias_projection"] = flatten_bias(name, arrays[f"{prefix}f_b"])
    return layer


def per_layer(arrays, prefix: str, name: str) -> dict:
    if name.startswith("norm"):
        return renamed(arrays, {"scale": "weight", "shift": "bias"}, prefix)
    layer = {"kernel": flatten_kernel(name, arrays[f"{prefix}weight"], lead=1)}
    if f"{prefix}bias" in arrays:
        layer["bias"] = flatten_bias(name, arrays[f"{prefix}bias"])
    return layer


def load(kind: str, field: str) -> tuple[dict, dict, dict]:
    """Their arrays, their parameters as ours, and their gradients as ours, for a key of `MODELS`."""
    file, blocks = MODELS[kind, field]
    generated = kind == "diffeqformer"
    arrays = dict(np.load(DATA / file))

    def convert(prefix):
        layer = generated_layer if generated else per_layer
        layers = {
            name: layer(arrays, f"{prefix}{blocks}.{paths[not generated]}.", name)
            for name, paths in LAYERS[field].items()
        }
        embeddings = {
            "token_embedding": "embeddings.token_embeddings",
            "position_embedding": "embeddings.position_embeddings",
            "lm_head": "lm_head.weight",
        }
        params = renamed(arrays, embeddings, prefix)
        if kind == "llama":
            params["lm_head"] = params["lm_head"].T
        norm = renamed(
            arrays, {"scale": "weight", "shift": "bias"}, f"{prefix}transformer.{'ln_f' if field == 'gpt' else 'norm'}."
        )
        return {**params, "final_norm": norm, "depth": {"layers": layers}}

    return arrays, convert(""), convert("grad.")
