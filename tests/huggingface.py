"""The Hugging Face fixtures (`tests/data/make_huggingface.py`), with their parameters converted to our layout."""

import numpy as np

import authors

GPT2 = {
    "norm_attention": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "norm_mlp": "ln_2",
    "mlp_up": "mlp.c_fc",
    "mlp_down": "mlp.c_proj",
}
LLAMA = {name: path for name, (path, _) in authors.LAYERS["llama"].items()}


def stacked(arrays, path: str) -> np.ndarray | None:
    """A parameter of all six layers, [6, ...], or None if there is none of this name."""
    return np.stack([arrays[path.format(n)] for n in range(6)]) if path.format(0) in arrays else None


def heads_first(array: np.ndarray) -> np.ndarray:
    """GPT-2's joint projection, from [..., (3, H, K)] to our [..., (H, 3, K)]."""
    return array.reshape(*array.shape[:-1], 3, 4, 8).swapaxes(-3, -2).reshape(array.shape)


def gpt2_layer(arrays, name: str, path: str) -> dict:
    weight, bias = (stacked(arrays, f"transformer.h.{{}}.{path}.{leaf}") for leaf in ("weight", "bias"))
    if name.startswith("norm"):
        return {"scale": weight, "shift": bias}
    return (
        {"kernel": heads_first(weight), "bias": heads_first(bias)}
        if name == "qkv"
        else {"kernel": weight, "bias": bias}
    )


def llama_layer(arrays, name: str, path: str) -> dict:
    weight = stacked(arrays, f"model.layers.{{}}.{path}.weight")
    return {"scale": weight} if name.startswith("norm") else {"kernel": weight.swapaxes(1, 2)}  # torch keeps [out, in]


def load(name: str) -> tuple[dict, dict]:
    """The arrays and our parameters of "gpt2" or "llama"."""
    arrays = dict(np.load(authors.DATA / f"huggingface_{name}.npz"))
    if name == "gpt2":
        return arrays, {
            "token_embedding": arrays["transformer.wte.weight"],
            "position_embedding": arrays["transformer.wpe.weight"],
            "final_norm": {"scale": arrays["transformer.ln_f.weight"], "shift": arrays["transformer.ln_f.bias"]},
            "depth": {"layers": {name: gpt2_layer(arrays, name, path) for name, path in GPT2.items()}},
        }
    return arrays, {
        "token_embedding": arrays["model.embed_tokens.weight"],
        "lm_head": arrays["lm_head.weight"].T,
        "final_norm": {"scale": arrays["model.norm.weight"]},
        "depth": {"layers": {name: llama_layer(arrays, name, path) for name, path in LLAMA.items()}},
    }
