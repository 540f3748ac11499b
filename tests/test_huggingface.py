"""Transformers itself: what it saves is imported, and it opens what is exported. `make test-extras` has its own
environment for this."""

import functools
import pathlib

import jax.numpy as jnp
import lm_eval
import numpy as np
import pytest
from huggingface import LLAMA3, write_folder, write_run
from lm_eval.tasks import TaskManager

import diffeqformer
import diffeqformer.inference.lm_eval_model  # (registers the model)
from diffeqformer.checkpoints import checkpoint
from diffeqformer.huggingface.pretrained import difference
from helpers import forward
from runs import TINY, command

transformers = pytest.importorskip("transformers", reason="make test-extras installs it")
torch = pytest.importorskip("torch", reason="make test-extras installs it")
pytestmark = pytest.mark.extras

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
THEIRS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_inner=48, n_positions=64),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 32},
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, intermediate_size=48),
    "sequential neox": lambda: transformers.GPTNeoXConfig(
        **SIZES, intermediate_size=48, use_parallel_residual=False, rope_parameters={"partial_rotary_factor": 0.5},
    ),
}  # fmt: skip


def done(name: str, *options) -> None:
    said = command(name, *options)
    assert said.returncode == 0, said.stderr


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def our_logits(workdir: pathlib.Path, tokens: np.ndarray, num_steps: int | None = None) -> np.ndarray:
    model = checkpoint.load(workdir).model.replace(dtype=jnp.dtype("float32"))
    return np.asarray(forward(model, tokens, num_steps))[..., : model.vocab_size]


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_saves_is_imported(name, tmp_path):
    write_folder(tmp_path / "folder", {}, {})  # with a tokenizer
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(THEIRS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "folder")
    tokens = np.random.RandomState(0).randint(64, size=(2, 64))
    for kind, most in ((None, 2e-6), ("interpolated", 1e-5)):
        workdir = tmp_path / f"run-{kind}"
        done("import_model", f"--from={tmp_path / 'folder'}", f"--workdir={workdir}", *[f"--kind={kind}"] * bool(kind))
        assert difference(our_logits(workdir, tokens), torch_logits(model, tokens)) < most


TRAINED = {
    "gpt": ["--config=tiny:diffeqformer", "--config.model.solver=lie_trotter", "--config.model.time_frequency=10"],
    "llama": ["--config=tiny:elastic"],
    "neox": ["--config=tiny:diffeqformer", "--config.model.field=neox", "--config.model.time_frequency=10"],
}


@functools.cache
def run_of(name: str, stores: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A run that was trained from scratch, or a baseline with random parameters."""
    if name in TRAINED:
        shared = [*TINY[1:], "--config.model.training_depths=2,3,4", f"--config.data.dir={stores}"]
        done("main", *TRAINED[name], *shared, f"--workdir={folder / name}")
    else:
        kind = name.removesuffix(" baseline")
        write_run(folder / name, kind, kind, model__max_length=64, model__norm_epsilon=1e-4, model__vocab_multiple=8)
    return folder / name


@pytest.fixture(scope="session")
def made(short_stores, tmp_path_factory):
    """The folder of a run, given its name."""
    folder = tmp_path_factory.mktemp("runs")
    return lambda name: run_of(name, short_stores, folder)


CASES = [(name, depth) for name in TRAINED for depth in (2, 3, 7)] + [(f"{name} baseline", 6) for name in TRAINED]
PROMPTS = ["def ", "import self return naïve"]


@pytest.mark.parametrize("name, depth", CASES)
def test_transformers_opens_what_is_exported(name, depth, made, tmp_path):
    done("export", f"--workdir={made(name)}", f"--to={tmp_path / 'folder'}", f"--num_steps={depth}")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.float32
    tokenizer, opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder"), diffeqformer.open(made(name))
    ours = opened.at(depth)
    for prompt in PROMPTS:
        assert tokenizer(prompt).input_ids == opened.checkpoint.tokenizer.encode(prompt)
        assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 256
    tokens = np.random.RandomState(0).randint(257, size=(2, 48))
    logits = our_logits(made(name), tokens, depth)
    assert difference(torch_logits(model, tokens), logits) < 1e-5
    batch = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    written = model.generate(**batch, max_new_tokens=32, do_sample=False)
    for prompt, ids in zip(PROMPTS, written[:, batch.input_ids.shape[1] :].tolist()):
        ids = ids[: ids.index(256)] if 256 in ids else ids
        text = prompt + opened.checkpoint.tokenizer.decode(ids)
        assert text == ours.generate(prompt, tokens=32, temperature=0.0)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        padded = model(**batch).logits.numpy()
    for prompt, row in zip(PROMPTS, padded):
        ids = np.array([tokenizer(prompt).input_ids])
        assert difference(row[: ids.size], our_logits(made(name), ids, depth)[0]) < 1e-5


@pytest.mark.parametrize("name, depth", [("gpt", 3), ("llama", 3)])
def test_lm_eval_says_the_same_of_both(name, depth, made, tmp_path):
    done("export", f"--workdir={made(name)}", f"--to={tmp_path / 'folder'}", f"--num_steps={depth}")
    models = {
        "hf": {"pretrained": str(tmp_path / "folder"), "dtype": "float32"},
        "diffeqformer": {"workdir": str(made(name)), "num_steps": depth, "window": 128},
    }
    found = {}
    for model, arguments in models.items():
        found[model] = lm_eval.simple_evaluate(
            model, arguments, tasks=["last_word", "pages", "sums"], batch_size=4, bootstrap_iters=0, device="cpu",
            task_manager=TaskManager(include_path="tests/data/tasks", include_defaults=False),
        )  # fmt: skip
    ours, theirs = (found[model]["results"] for model in ("diffeqformer", "hf"))
    assert ours.keys() == theirs.keys() == {"last_word", "pages", "sums"}
    for task, row in theirs.items():
        scores = {name: score for name, score in row.items() if isinstance(score, float)}
        assert len(scores) >= 1
        for name, score in scores.items():
            np.testing.assert_allclose(ours[task][name], score, rtol=1e-4, err_msg=f"{task}, {name}")
