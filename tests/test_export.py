"""Runs as folders in Hugging Face's format: the same numbers as before, or one sentence and nothing written."""

import json
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from huggingface import CONFIGS, LLAMA3, arrays_of, write_folder, write_run
from safetensors.numpy import load_file
from test_tokenizers import TEXTS

from diffeqformer import export as command_of_export
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.export import export
from diffeqformer.huggingface import model_folder as folders
from diffeqformer.huggingface.architectures import write_model
from diffeqformer.huggingface.model_folder import INDEX, tokenizer_files
from diffeqformer.huggingface.pretrained import difference, open_pretrained
from diffeqformer.import_model import import_model
from diffeqformer.transformer import split_model
from helpers import forward, toy_config, write_tokenizer_json
from newcomer import gpt2_files
from runs import command


@pytest.mark.parametrize("name, kind", [*((name, None) for name in CONFIGS), ("neox", "diffeqformer")])
def test_what_transformers_wrote_comes_back(name, kind, tmp_path):
    """The numbers in tests/data, bit for bit where weights at knots are exact, under the same names and fields."""
    arrays, *_ = arrays_of(name)
    write_folder(tmp_path / "folder", arrays, CONFIGS[name])
    import_model(tmp_path / "folder", tmp_path / "run", kind)
    export(tmp_path / "run", tmp_path / "back")
    made = load_file(tmp_path / "back" / "model.safetensors")
    if name == "qwen2":  # a Llama has one more bias, which is 0
        assert not any(made.pop(f"model.layers.{n}.self_attn.o_proj.bias").any() for n in range(2))
    assert made.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(made[key], array, rtol=0, atol=1e-6 if kind == "diffeqformer" else 0)
    before, after = (open_pretrained(tmp_path / place).config.model.to_dict() for place in ("folder", "back"))
    assert after == before | ({"biases": "attention"} if name == "qwen2" else {})
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert name == "qwen2" or written.items() >= CONFIGS[name].items()
    tokenizers = [(tmp_path / folder / "tokenizer.json").read_bytes() for folder in ("folder", "back")]
    assert tokenizers[0] == tokenizers[1]


OF_LLAMA = {"model__key_value_heads": 2, "model__head_width": 12, "model__rope_scaling": "8,1,4,16"}
PADDED = {"model__vocab_multiple": 64, "model__dtype": "bfloat16"}


@pytest.mark.parametrize(
    "kind, field, num_steps, changes",
    [
        ("llama", "llama", 6, OF_LLAMA | {"model__biases": "qkv", "model__tied_head": True}),
        ("llama", "llama", 4, OF_LLAMA | {"model__left_out": "2,5"}),
        ("diffeqformer", "gpt", 4, PADDED),
        ("diffeqformer", "llama", 3, OF_LLAMA | PADDED | {"model__base_width": 16}),
        ("diffeqformer", "neox", 9, {"model__solver": "euler", "model__span": 3.0}),
        ("interpolated", "llama", 8, {"model__biases": "all", "model__norm_epsilon": 1e-3}),
        ("shared", "gpt", 5, {}),
        ("discretized", "llama", 6, {"model__lora_rank": 2, "base": "base"}),
    ],
)
def test_a_model_of_any_kind_comes_back_as_a_baseline(kind, field, num_steps, changes, tmp_path):
    write_run(tmp_path / "run", kind, field, **changes)
    said, error = export(tmp_path / "run", tmp_path / "folder", num_steps)
    found = open_pretrained(tmp_path / "folder")
    assert found.config.model.num_steps == num_steps and found.config.model.kind == field
    assert error < 2e-5 and "257 ids of the model's 257, end of text 256\n" in said and said.endswith(" MB")
    tokens = jnp.asarray(np.random.RandomState(0).randint(257, size=(2, 16)))
    run, back = checkpoint.load(tmp_path / "run").model.replace(dtype=jnp.dtype("float32")), found.model()
    ours = np.asarray(forward(run, tokens, num_steps))[..., :257]
    assert difference(np.asarray(forward(back, tokens)), ours) < 2e-5


def test_rotations_are_written_as_transformers_nests_them():
    """Since version 5. Earlier ones know the flat fields, which come back above."""
    written = write_model(toy_config("llama", "llama", **OF_LLAMA).model)["rope_parameters"]
    assert written == LLAMA3 | {"original_max_position_embeddings": 16, "rope_theta": 10_000.0}
    changes = dict(model__solver="euler", model__rotary_fraction=0.5, model__rope_theta=500.0)
    written = write_model(toy_config("neox", "neox", **changes).model)["rope_parameters"]
    assert written == {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_and_cut_into_files(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LARGEST", 30_000)
    params = write_run(tmp_path / "run", "gpt", "gpt")
    said, error = export(tmp_path / "run", tmp_path / "folder", dtype=dtype)
    index = json.loads((tmp_path / "folder" / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert 1e-5 < error < 0.1 and len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    with safetensors.safe_open(tmp_path / "folder" / files[0], framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert f" tensors of {dtype[0].upper()}" in said and f" and {len(files)} files" in said
    found = split_model(open_pretrained(tmp_path / "folder").model())[1]  # in fp32
    expected = jax.tree.map(lambda leaf: np.float32(leaf.astype(getattr(ml_dtypes, dtype, dtype))), params)
    for name in ("token_embedding", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, found[name], expected[name])


def test_a_tokenizer_gives_the_same_ids_as_a_tokenizer_json(tmp_path, sentencepiece_file):
    given = [
        ByteTokenizer(),
        GPT2Tokenizer.open(str(gpt2_files())),
        HuggingFaceTokenizer.open(str(write_tokenizer_json(tmp_path))),
    ]
    for number, tokenizer in enumerate(given):
        (tmp_path / str(number)).mkdir()
        for name, content in tokenizer_files(tokenizer, 16).items():
            (tmp_path / str(number) / name).write_bytes(content)
        made = HuggingFaceTokenizer.open(str(tmp_path / str(number) / "tokenizer.json"))
        assert (made.vocab_size, made.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
        for text in [*TEXTS, *map(chr, range(300)), (gpt2_files() / "vocab.bpe").read_text(encoding="utf-8")[:50_000]]:
            ids = tokenizer.encode(text)
            assert made.encode(text) == ids and made.decode(ids) == text
    with pytest.raises(UserError, match="^--workdir: its tokenizer is a SentencePiece model"):
        tokenizer_files(SentencePieceTokenizer.open(str(sentencepiece_file)), 16)


@pytest.mark.parametrize(
    "field, changes, sentence",
    [
        ("gpt", {"model__solver": "euler"}, "the block of model.field gpt with model.solver euler"),
        ("llama", {"model__norm_of_norm": True}, "has a norm of a norm"),
        ("gpt", {"model__head_width": 12}, "4 heads of 12, which are not 32 wide"),
    ],
)
def test_what_no_architecture_computes_is_refused(field, changes, sentence, tmp_path):
    write_run(tmp_path / "run", "diffeqformer", field, **changes)
    with pytest.raises(UserError, match=f"^--workdir: no architecture of Transformers .*{sentence}"):
        export(tmp_path / "run", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_weights_and_epsilons_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    write_run(tmp_path / "run", "diffeqformer", "llama")
    assert 0 < export(tmp_path / "run", tmp_path / "made")[1] < 1e-3  # epsilons of 1e-6 and 1e-5
    monkeypatch.setattr(command_of_export, "LARGEST_ERROR", 1e-9)
    with pytest.raises(UserError, match="^--workdir: what would be written differs by "):
        export(tmp_path / "run", tmp_path / "folder", dtype="bfloat16")
    monkeypatch.setattr(command_of_export.ml_dtypes, "finfo", lambda _: types.SimpleNamespace(max=0.1))
    with pytest.raises(UserError, match="^--dtype: float16 can't hold .*, the largest weight"):
        export(tmp_path / "run", tmp_path / "folder", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "run"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_run(tmp_path / "run", "gpt", "gpt")
    (tmp_path / "folder").mkdir()
    export(tmp_path / "run", tmp_path / "folder")  # it was empty
    before = {path: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    assert len(before) == 6 and len({path.stat().st_mode for path in before}) == 1
    with pytest.raises(UserError, match="^--to: .*folder already holds something"):
        export(tmp_path / "run", tmp_path / "folder")
    assert {path: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == before
    with pytest.raises(UserError, match="^--to: .* can't be written: "):
        export(tmp_path / "run", tmp_path / "folder" / "config.json" / "inside")
    monkeypatch.setattr(command_of_export, "model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(tmp_path / "run", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


def test_the_card_has_what_was_measured_at_this_depth_alone(tmp_path, monkeypatch):
    write_run(tmp_path / "run", "interpolated", "gpt", model__training_depths="3,6")
    curves = {"validation/bits_per_byte": {6: 9.0, 12: 2.5}, "validation/bits_per_byte_at_3": {12: 2.75}}
    monkeypatch.setattr(command_of_export, "read_curves", lambda _: curves)
    for step, solver, bits in ((6, "lie_trotter", 9.0), (12, "euler", 8.0), (12, "lie_trotter", 3.25)):
        folder = tmp_path / "run" / "evaluation" / "poem" / f"{step}-{solver}"
        folder.mkdir(parents=True)
        row = {"solver": solver, "num_steps": 4, "bits_per_byte": bits}
        results = {"checkpoint_step": step, "text": "poem", "dtype": "float32", "window": 16, "rows": [row]}
        (folder / "results.json").write_text(json.dumps(results))
    opened = checkpoint.load(tmp_path / "run")
    for number, said in (
        (6, "the run's validation text | 2.5000, read in float32 |"),
        (3, "the run's validation text | 2.7500, read in float32 |"),
        (4, "poem | 3.2500, read in float32 in windows of 16 tokens |"),
    ):
        card = command_of_export.model_card(tmp_path / "run", opened, number, "says", 0.0)
        assert card.count("bits per byte") == 1 and f"| bits per byte of {said}" in card


def test_the_commands_import_and_export(tmp_path):
    write_folder(tmp_path / "folder", arrays_of("llama")[0], CONFIGS["llama"])
    run, options = f"--workdir={tmp_path / 'run'}", (f"--from={tmp_path / 'folder'}", "--kind=diffeqformer")
    done = command("import_model", run, *options)
    assert done.returncode == 0, done.stderr
    assert ": LlamaForCausalLM, 65,952 weights in 57 tensors of F32 and 1 file" in done.stdout
    assert "largest error of a weight: " in done.stdout
    again = command("import_model", run, *options)
    assert again.returncode == 1 and "diffeqformer: --workdir: " in again.stderr and "already holds" in again.stderr
    done = command("export", run, f"--to={tmp_path / 'back'}", "--num_steps=3", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert "back: LlamaForCausalLM, " in done.stdout and " tensors of BF16 and 1 file\n" in done.stdout
