"""Pretrained models in Hugging Face's format: read exactly, or refused in one sentence."""

import collections
import json
import pathlib

import numpy as np
import pytest
from flax import traverse_util
from huggingface import CONFIGS, arrays_of, write_folder
from jaxtyping import Array

from diffeqformer.checkpoints import checkpoint
from diffeqformer.errors import UserError
from diffeqformer.huggingface.architectures import read_model
from diffeqformer.huggingface.model_folder import INDEX, Tensors
from diffeqformer.huggingface.pretrained import Pretrained, open_pretrained
from diffeqformer.import_model import import_model
from diffeqformer.transformer import Path, split_model
from helpers import forward


def parameters(found: Pretrained) -> dict[Path, Array]:
    return traverse_util.flatten_dict(split_model(found.model())[1])


@pytest.mark.parametrize(
    "name, kind",
    [*((name, None) for name in CONFIGS), ("llama3", "interpolated"), ("llama3", "diffeqformer")],
)
def test_logits_are_those_of_transformers(name, kind, tmp_path):
    arrays, tokens, expected = arrays_of(name)
    write_folder(tmp_path / "folder", arrays, CONFIGS[name])
    found, check = import_model(tmp_path / "folder", tmp_path / "run", kind)
    opened = checkpoint.load(tmp_path / "run")
    logits = np.asarray(forward(opened.model, tokens))
    assert np.abs(logits - expected).max() < 2e-6 * np.abs(expected).max()
    assert 1 < check.loss < 9 and len(check.likeliest) == 5
    assert opened.tokenizer.decode(opened.tokenizer.encode("France")) == "France" and opened.tokenizer.end_of_text == 59
    if kind:
        assert check.of_weights < 2e-7 and check.of_logits < 2e-6
        assert check.of_weights == 0 or kind == "diffeqformer"
        depth, steps, weights = opened.model.depth, opened.model.num_steps, parameters(found)
        at = depth.from_features(depth.features(np.array([0.0, 1.5, steps - 0.25, steps]) / steps))
        for layer, each in at.items():
            for leaf, value in each.items():
                knots = weights.get(("depth", "layers", layer, leaf), np.zeros((steps, 1)))
                between = [knots[0], (knots[0] + knots[1]) / 2, 0.25 * knots[-2] + 0.75 * knots[-1], knots[-1]]
                assert np.abs(np.asarray(value) - between).max() < 1e-3 * np.abs(knots).max() + 1e-9, (layer, leaf)


def test_each_device_reads_its_own_rows(tmp_path, monkeypatch):
    arrays, *_ = arrays_of("llama3")
    write_folder(tmp_path, arrays, CONFIGS["llama3"])
    read, sizes = Tensors.read, collections.defaultdict(list)

    def counting(self, name, part=...):
        array = read(self, name, part)
        sizes[name].append(array.size)
        return array

    monkeypatch.setattr(Tensors, "read", counting)
    open_pretrained(tmp_path).model()
    for name, array in arrays.items():
        assert array.ndim == 1 or sizes[name] == [array.size // 8] * 8, name
        assert array.ndim == 2 or {*sizes[name]} == {array.size}


def test_names_of_earlier_files_are_read(tmp_path):
    arrays, *_ = arrays_of("gpt2")
    short = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    short["h.0.attn.bias"] = np.zeros((1, 1, 9, 9), np.int8)  # a mask, not a parameter
    write_folder(tmp_path, short, CONFIGS["gpt2"])
    found = parameters(open_pretrained(tmp_path))
    np.testing.assert_array_equal(found["token_embedding",], short["wte.weight"])
    np.testing.assert_array_equal(found["depth", "layers", "mlp_up", "kernel"][3], short["h.3.mlp.c_fc.weight"])


@pytest.mark.parametrize(
    "architecture, given, expected",
    [
        ("Llama", {"rope_theta": 1e5}, {"rope_theta": 1e5, "rope_scaling": "", "biases": "none", "tied_head": False}),
        ("Llama", {"rope_theta": 5, "rope_parameters": {"rope_theta": 5.0}, "rope_scaling": None}, {"rope_theta": 5.0}),
        ("Llama", {"num_attention_heads": 8, "hidden_size": 64, "head_dim": 16}, {"head_width": 16, "num_steps": 32}),
        ("Llama", {"head_dim": 128, "num_key_value_heads": 32}, {"head_width": 0, "key_value_heads": 0}),
        ("Mistral", {"sliding_window": None}, {"key_value_heads": 8, "mlp": 14_336, "norm_epsilon": 1e-6}),
        ("Qwen2", {"tie_word_embeddings": True, "sliding_window": 4096}, {"biases": "qkv", "tied_head": True}),
        ("GPT2", {"n_inner": None}, {"mlp": 3072, "norm_epsilon": 1e-5}),
        ("GPTNeoX", {"rotary_pct": 1.0, "rotary_emb_base": 500}, {"rotary_fraction": 1.0, "rope_theta": 500.0}),
        ("GPTNeoX", {}, {"rotary_fraction": 0.25, "solver": "euler", "tied_head": False}),
        ("GPTNeoX", {"use_parallel_residual": False}, {"solver": "lie_trotter"}),
    ],
)
def test_what_is_left_out_of_a_config_has_the_default_of_its_architecture(architecture, given, expected):
    end = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    _, model = read_model({"architectures": [architecture + end], **given}, pathlib.Path("config.json"))
    assert expected.items() <= model.items()


REFUSED = [
    ({"architectures": ["BertModel"]}, "architectures: must be one of GPT2LMHeadModel, .*, but it is 'BertModel'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: "),
    ({"hidden_act": "relu"}, "hidden_act: must be 'silu' or 'swish' .* 'relu'"),
    ({"hidden_size": "32"}, "hidden_size: must be of type int, but it is '32'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters: must be of the type default or llama3 .* 'yarn'"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta: must have one value"),
    ({"layer_types": ["sliding_attention"]}, "layer_types: must be full_attention alone"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, "sliding_window: must be null, or no less than"),
    ({"num_attention_heads": 0}, "can't be computed: config.model.heads: must be at least 1"),
    ({"num_hidden_layers": 7}, "lacks the tensor model.layers.6.input_layernorm.weight"),
    ({"intermediate_size": 48}, r"mlp.gate_proj.weight has the shape \[64, 32\], .* \[48, 32\]"),
    ({"vocab_size": 59}, "tokenizer.json: has ids up to 59, but the vocab_size of config.json is 59"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
]


@pytest.mark.parametrize("given, sentence", REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_a_model_that_cannot_be_computed_is_one_sentence(given, sentence, tmp_path):
    write_folder(tmp_path / "folder", arrays_of("llama")[0], {**CONFIGS["llama"], **given})
    with pytest.raises(UserError, match=sentence):
        import_model(tmp_path / "folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "how, sentence",
    [
        ("pickled", "has no weights as safetensors"),
        ("cut", "model.safetensors: can't be read: "),
        ("nan", "model.norm.weight has numbers that are NaN or infinite"),
        ("no config", "config.json: can't be read: .*No such file"),
        ("no tokenizer", "tokenizer.json: No such file"),
        ("../folder/1.safetensors", r"model.* is in \.\./folder/1.safetensors, which isn't in this folder"),
        ("1.safetensors", "1.safetensors: lacks absent"),
    ],
)
def test_a_folder_that_is_not_whole_is_one_sentence(how, sentence, tmp_path):
    folder, arrays = tmp_path / "folder", arrays_of("llama")[0]
    write_folder(folder, arrays, CONFIGS["llama"])
    weights = folder / "model.safetensors"
    if how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif how == "nan":
        write_folder(folder, {**arrays, "model.norm.weight": np.full(32, np.nan, np.float32)}, CONFIGS["llama"])
    elif how.startswith("no "):
        (folder / f"{how[3:]}.json").unlink()
    else:
        weights.rename(folder / "1.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*arrays, "absent"], how)}))
    with pytest.raises(UserError, match=sentence):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
