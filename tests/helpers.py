"""Models and configs that several tests build."""

import functools
import hashlib
import importlib.util
import io
import json
import pathlib
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from flax import nnx

import authors
from diffeqformer.checkpoints import checkpoint
from diffeqformer.config import base_config
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.depth.depths import drawn_depth
from diffeqformer.fields import FIELDS, layers
from diffeqformer.fields.layers import Context
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.solvers import ONE_STEP
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.step import Program
from diffeqformer.transformer import MODELS, Transformer, split_model, weights_at

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = ("tiny", "small", "medium", "large", "llama_1b", "wikitext103_small", "wikitext103_medium")
FAMILY = [(kind, field) for kind, row in MODELS.items() for field in FIELDS if row.field in (None, field)]
FAMILY = [(kind, field) for kind, field in FAMILY if field != "neox" or kind in ("diffeqformer", "neox")]
"""Models by kind and field. A NeoX has a GPT's layers, so other kinds of weights have nothing new in it."""
LONG_TO_COMPILE = ("midpoint", "strang", "rk4", *(f"reversible_{name}" for name in ONE_STEP if name != "euler"))
NO_DROPOUT = Context()
ONE_DEVICE = make_mesh(devices=jax.devices()[:1])


def some_slow(cases: list[tuple], slow: Callable[[tuple], bool]) -> list:
    """The cases of a test, of which some run in `make test-slow` alone."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * slow(case)) for case in cases]


def long_to_compile(case: tuple) -> bool:
    """Whether the solver of a case, its last part, needs long programs, made of the same parts as shorter ones."""
    return case[-1] in LONG_TO_COMPILE


def load_config(name: str, model: str = "diffeqformer"):
    """The config of a file in configs/, for a model that can follow its name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(model)


def build_model(kind: str, field: str | None = None, **changes) -> Transformer:
    """A model of the authors' tiny sizes with our own initial parameters."""
    graph, params = drawn(authors.model_config(kind, field, **changes))
    return nnx.merge(graph, jax.device_put(params))


def lively_model(kind: str, field: str | None = None, **changes) -> Transformer:
    """The same with parameters so large that every token and every step affects the logits."""
    graph, params = drawn(authors.model_config(kind, field, **changes))
    random = np.random.RandomState(7)
    add = np.float32(0.2)
    return nnx.merge(graph, jax.device_put(jax.tree.map(lambda leaf: leaf + add * normal(random, leaf.shape), params)))


def normal(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Normally distributed fp32 numbers."""
    return np.asarray(random.randn(*shape), np.float32)


def drawn(config) -> tuple[nnx.GraphDef, dict]:
    """Structure and initial parameters of a model, from the `model` part of a config.

    NumPy draws them. JAX would compile four functions for each shape.
    """
    random = np.random.RandomState(0)
    with (
        mock.patch.object(layers.jnp, "full", np.full),
        mock.patch.object(layers.jax.random, "normal", lambda key, shape, dtype: normal(random, shape)),
    ):
        graph, params = split_model(Transformer(config, nnx.Rngs(0)))
    return graph, jax.tree.map(np.asarray, params)


@functools.partial(jax.jit, static_argnames=("graph", "microbatches"))
def loss_and_gradient(graph, params, tokens, keys, microbatches=1):
    """The loss and gradient of a batch, as in training, on one device."""
    return ShardedLoss(graph, params, ONE_DEVICE).value_and_grad(params, tokens, keys, microbatches)


@functools.partial(jax.jit, static_argnames="graph")
def logits_of(graph, params, weights, tokens):
    """The logits [B, S, V] of a forward pass. A closure over parameters takes XLA longer: it folds constants."""
    return nnx.merge(graph, params)(tokens, weights)


def forward(model: Transformer, tokens, num_steps: int | None = None) -> jax.Array:
    """The same of a model at a number of steps. Operation by operation, JAX would compile a hundred programs."""
    return logits_of(*split_model(model), weights_at(model, num_steps), tokens)


TEXTS = [f"document {i}: " + "x" * (i % 17) for i in range(100)]


WHOLE = dict(
    byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False
)
"""The options of SentencePiece's trainer with which text stays whole."""


def train_sentencepiece(whole: dict = WHOLE, **options) -> bytes:
    """A SentencePiece model of up to 300 pieces, trained on our own sentences; with no `whole`, by its own defaults."""
    model = io.BytesIO()
    sentences = [f"{a} {b} sees the {c} thing." for a in "AB" for b in ("cat", "dog") for c in ("red", "odd")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5), model_writer=model, vocab_size=300 if whole else 60, model_type="bpe",
        minloglevel=2, hard_vocab_limit=False, **whole, **options,
    )  # fmt: skip
    return model.getvalue()


def write_tokenizer_json(folder: pathlib.Path, vocab_size: int = 300) -> pathlib.Path:
    """A byte-level tokenizer.json of that many ids, the last of which is </s>. It has what such files may contain: a
    text is cut, padded and begun with <s>, and </s> isn't marked as special."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([tokenizers.AddedToken(f"{n} spaces" + " " * n) for n in range(vocab_size - 258)])
    tokenizer.add_tokens([tokenizers.AddedToken("</s>", special=False)])
    begin = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    tokenizer.post_processor = begin
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder / "tokenizer.json"


def make_store(folder: pathlib.Path, splits: dict[str, list[list[str]]], tokenizer=ByteTokenizer(), **changes) -> dict:
    """Write a token store as `diffeqformer.data.preparation` would, from the documents of each shard of each split.

    `changes` are entries of its record.
    """
    folder.mkdir(parents=True)
    about = {"format": 2, "task": "python_stdlib", "origin": "made up", "files": "", "tokenizer": tokenizer.name}
    about |= {"vocab_size": tokenizer.vocab_size, "dtype": "<u2", "splits": {}}
    for split, shards in splits.items():
        entries, whole = [], b""
        for index, documents in enumerate(shards):
            ids = [i for text in documents for i in [*tokenizer.encode(text), tokenizer.end_of_text]]
            data = np.array(ids, "<u2").tobytes()
            (folder / f"{split}-{index:05d}.bin").write_bytes(data)
            size = sum(len(text.encode()) for text in documents)
            entry = {"file": f"{split}-{index:05d}.bin", "tokens": len(ids), "documents": len(documents), "empty": 0}
            entries.append(entry | {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()})
            whole += data
        sums = {name: sum(entry[name] for entry in entries) for name in ("tokens", "documents", "bytes")}
        about["splits"][split] = sums | {"sha256": hashlib.sha256(whole).hexdigest(), "shards": entries}
    (folder / "store.json").write_text(json.dumps(about | changes))
    return about


def flip(file: pathlib.Path, place: int, bit: int) -> None:
    """Change a bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def toy_config(kind: str = "diffeqformer", field: str = "gpt", **changes):
    """A complete config that trains in seconds; `changes` are fields with double underscores in place of dots."""
    config = base_config("toy", kind, field)
    config.update(steps=6, batch_size=8, sequence_length=16, log_every=1, eval_every=100, checkpoint_every=100)
    config.model.update(authors.model_config(kind, config.model.field, vocab_size=257, generator_start="varying"))
    config.data.update(task="python_stdlib", tokenizer="bytes")
    config.sample.prompt = "def "
    return change(config, **changes)


def change(config, **changes):
    """The config with changed fields, named with double underscores in place of dots."""
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        (config[section] if section else config)[field] = value
    return config


def tokens_of(step: int, config) -> np.ndarray:
    """A batch [B, S] for one step."""
    return np.random.RandomState(step).randint(257, size=(config.batch_size, config.sequence_length))


def save_params(workdir: pathlib.Path, config, params_by_step: dict[int, dict], **about) -> None:
    """Write checkpoints of some parameters. `about` changes what they say of themselves."""
    about = {"config": config.to_dict(), "tokenizer": "bytes", "data_sha256": "hash", **about}
    with checkpoint.open_to_write(workdir, kept=9) as checkpoints:
        for step, params in params_by_step.items():
            checkpoint.save(checkpoints, step, {"params": params}, checkpoint.About(**about))


def first_state(program: Program) -> dict:
    """A program's state before its first step, like that of `program.init()`, without compiling anything."""
    params = drawn(program.config.model)[1]
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.state_shapes)
    return jax.device_put({**state, "params": params}, program.shardings.state)


def run_steps(config, mesh, steps: int):
    """A program, its state after steps on two alternating batches, and each one's loss and gradient norm [steps, 2].

    Each step has the depth that training draws for it.
    """
    program = Program(config, mesh)
    state, scalars = first_state(program), []
    for step in range(steps):
        depth = drawn_depth(program.depths, config.seed, step)
        state, new = program.train_step(state, tokens_of(step % 2, config), depth)
        scalars.append((float(new["loss"]), float(new["gradient_norm"])))
    return program, state, np.array(scalars)
