"""The authors' reference numbers (tests/data), with their parameters rearranged into ours."""

import pathlib

import numpy as np
from ml_collections import ConfigDict

DATA = pathlib.Path(__file__).parent / "data"

# our layer -> (their path in the DiffEqFormer's block, their path in GPT-2's blocks)
LAYERS = {
    "norm_attention": ("attn_ln", "ln_1"),
    "qkv": ("attn.c_attn", "attn.c_attn"),
    "attention_out": ("attn.c_proj", "attn.c_proj"),
    "norm_mlp": ("mlp_ln", "ln_2"),
    "mlp_up": ("mlp.c_fc", "mlp.c_fc"),
    "mlp_down": ("mlp.c_proj", "mlp.c_proj"),
}


def model_config(kind: str, **changes) -> ConfigDict:
    """The `model` part of a config at the reference's sizes."""
    config = dict(
        kind=kind, width=32, heads=4, mlp=128, num_steps=6, vocab_size=64, max_length=16, time_embed_dim=12,
        sinusoidal_dim=8, time_frequency=1000.0, generator_start="published", dropout=0.0, dtype="float32", remat=False,
    )  # fmt: skip
    return ConfigDict({**config, **changes})


def flatten_kernel(name: str, kernel: np.ndarray, lead: int) -> np.ndarray:
    """Their linear weight [*lead, inputs..., outputs...] with inputs and outputs flattened, heads first in `qkv`."""
    if name == "qkv":  # [..., D, 3, H, K] -> [..., D, H, 3, K]
        kernel = kernel.swapaxes(-3, -2)
        return kernel.reshape(*kernel.shape[: lead + 1], -1)
    if name == "attention_out":  # [..., H, K, D]
        return kernel.reshape(*kernel.shape[:lead], -1, kernel.shape[-1])
    return kernel


def flatten_bias(name: str, bias: np.ndarray) -> np.ndarray:
    """Their bias [lead, outputs...] with outputs flattened, heads first in `qkv`."""
    return bias.swapaxes(-3, -2).reshape(len(bias), -1) if name == "qkv" else bias


def generated_layer(arrays, prefix: str, name: str, path: str) -> dict:
    theirs = lambda leaf: arrays[f"{prefix}transformer.block.{path}.{leaf}"]  # noqa: E731
    mlp = {
        "lin1": theirs("lin1.weight"), "lin1_bias": theirs("lin1.bias"),
        "lin2": theirs("lin2.weight"), "lin2_bias": theirs("lin2.bias"),
    }  # fmt: skip
    if name.startswith("norm"):
        return {"mlp": mlp, "scale_projection": theirs("f_weight").T, "shift_projection": theirs("f_bias").T}
    return {
        "mlp": mlp,
        "projection": flatten_kernel(name, theirs("f_W.weight"), lead=1).swapaxes(0, 1),
        "constant": flatten_kernel(name, theirs("f_W.bias"), lead=0),
        "bias_projection": flatten_bias(name, theirs("f_b")),
    }


def per_layer(arrays, prefix: str, name: str, path: str) -> dict:
    theirs = lambda leaf: arrays[f"{prefix}transformer.blocks.stacked.{path}.{leaf}"]  # noqa: E731
    if name.startswith("norm"):
        return {"scale": theirs("weight"), "shift": theirs("bias")}
    return {"kernel": flatten_kernel(name, theirs("weight"), lead=1), "bias": flatten_bias(name, theirs("bias"))}


def load(kind: str) -> tuple[dict, dict, dict]:
    """Their arrays, their parameters as ours, and their gradients as ours, for "diffeqformer" or "gpt"."""
    generated = kind == "diffeqformer"
    arrays = dict(np.load(DATA / ("authors_gpt.npz" if generated else "authors_vanilla_gpt2.npz")))

    def convert(prefix):
        layer = generated_layer if generated else per_layer
        return {
            "token_embedding": arrays[f"{prefix}embeddings.token_embeddings"],
            "position_embedding": arrays[f"{prefix}embeddings.position_embeddings"],
            "final_norm": {
                "scale": arrays[f"{prefix}transformer.ln_f.weight"],
                "shift": arrays[f"{prefix}transformer.ln_f.bias"],
            },
            "depth": {
                "layers": {name: layer(arrays, prefix, name, paths[not generated]) for name, paths in LAYERS.items()}
            },
        }

    return arrays, convert(""), convert("grad.")
