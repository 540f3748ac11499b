"""Pretrained models in Hugging Face's format, made of the numbers in tests/data (`tests/data/make_huggingface.py`).

python tests/huggingface.py FOLDER
"""

import json
import pathlib
import sys

import jax
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from diffeqformer.checkpoints import checkpoint
from diffeqformer.import_model import SENTENCE
from diffeqformer.transformer import abstract_model, select
from helpers import drawn, normal, save_params, toy_config

DATA = pathlib.Path(__file__).parent / "data"
SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 16},
    "llama": SMALL
    | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64, "num_hidden_layers": 6, "rms_norm_eps": 1e-5},
    "llama3": {
        **SMALL,
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 100.0,  # as written before Transformers 5, beside what is nested since
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
    },
    "qwen2": {**SMALL, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "tie_word_embeddings": True},
    "neox": {**SMALL, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
}
"""Of the models in tests/data: what isn't the default."""


def arrays_of(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The parameters of a model in tests/data as Transformers saves them, tokens and their logits."""
    arrays = dict(np.load(DATA / f"huggingface_{name}.npz"))
    return arrays, arrays.pop("tokens"), arrays.pop("logits")


def write_folder(folder: pathlib.Path, arrays: dict[str, np.ndarray], config: dict, vocab_size: int = 60) -> None:
    """A folder whose tokenizer knows the characters of `SENTENCE`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, **config}))
    characters = sorted(set(SENTENCE))
    pieces = [*characters, *(f"piece {n}" for n in range(vocab_size - len(characters) - 1)), "<end>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors")


def write_run(workdir: pathlib.Path, kind: str, field: str, saved: dict | None = None, **changes) -> dict:
    """A run of step 12 with large random parameters, which are returned. `saved` changes what it says of itself."""
    config = toy_config(kind, field, **{"model__solver": "lie_trotter", "model__norm_of_norm": False, **changes})
    params, random = drawn(config.model)[1], np.random.RandomState(7)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.1) * normal(random, leaf.shape), params)
    if config.model.lora_rank:  # what adapters are added to has its own place
        base, trains = {"workdir": "base", "step": 3, "data_sha256": ""}, abstract_model(config).trains
        checkpoint.save_frozen(workdir, select(params, lambda path: not trains(path)), base)
        params, saved = select(params, trains), {"base": base}
    save_params(workdir, config, {12: params}, **(saved or {}))
    return params


if __name__ == "__main__":
    write_folder(pathlib.Path(sys.argv[1]), arrays_of("llama")[0], CONFIGS["llama"] | {"max_position_embeddings": 64})
