"""The blocks of pretrained models: grouped queries, rotations, biases, tied heads, and the block of GPT-NeoX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import authors
from diffeqformer import reference
from diffeqformer.config import check_config
from diffeqformer.errors import UserError
from diffeqformer.fields.rotary import Rotary, table
from diffeqformer.inference.reader import CHUNK, Reader, padded_prompt, read_prompt, read_token
from diffeqformer.transformer import split_model, vector_field, weights_at
from helpers import forward, lively_model, logits_of, loss_and_gradient, toy_config

LLAMA3 = "8,1,4,32"  # of eight-entry heads at theta 20, one pair is fast, one slow, and two are between
TOKENS = np.random.RandomState(0).randint(64, size=(2, 16))
GROUPED = {"key_value_heads": 2, "head_width": 6}
ALL = {"biases": "all", "norm_epsilon": 0.3, "rope_theta": 20.0, "rope_scaling": LLAMA3, "tied_head": True}
PART = {"rotary_fraction": 0.75, "rope_theta": 20.0, "norm_epsilon": 0.3}


@pytest.mark.parametrize(
    "kind, changes, options",
    [
        ("llama", GROUPED, {}),
        ("llama", ALL, {"theta": 20.0, "scaling": (8, 1, 4, 32)}),
        ("neox", PART, {"theta": 20.0, "rotary_fraction": 0.75, "unit_steps": True}),
    ],
)
def test_a_block_agrees_with_the_float64_reference(kind, changes, options):
    """Logits, and the gradient of every parameter."""
    model = lively_model(kind, num_steps=2, **changes)
    graph, params = split_model(model)
    if epsilon := changes.get("norm_epsilon"):
        options = options | {"epsilon": epsilon}
    solver = functools.partial(reference.euler if kind == "neox" else reference.lie_trotter, **options)
    with jax.enable_x64(True):

        def loss_of(params):
            blocks = reference.per_layer_blocks(params, 2)
            forward = functools.partial(reference.forward, params, blocks, solver, heads=4)
            logits = jax.vmap(lambda row: forward(tokens=row, final_epsilon=epsilon or 1e-5)[0])(TOKENS)
            return reference.loss(logits, TOKENS), logits

        exact = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)
        (_, logits), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(exact)
    ours = forward(model, TOKENS)
    np.testing.assert_allclose(ours, logits, atol=3e-6 * np.abs(logits).max())
    _, found = loss_and_gradient(graph, params, jnp.asarray(TOKENS), None)
    for path, expected in jax.tree.leaves_with_path(gradients):
        mine = functools.reduce(lambda tree, part: tree[part.key], path, found)
        assert np.linalg.norm(np.asarray(mine) - expected) < 2e-5 * np.linalg.norm(expected), path


@pytest.mark.parametrize("kind, changes", [("llama", GROUPED), ("neox", PART)])
def test_a_cache_holds_the_keys_and_values_that_there_are(kind, changes):
    model = lively_model(kind, num_steps=2, max_length=CHUNK + 8, **changes)
    graph, params = split_model(model)
    weights, ids = weights_at(model), np.random.RandomState(1).randint(64, size=CHUNK + 8)
    expected = logits_of(graph, params, weights, ids[None])[0]
    reader = Reader(graph, params, weights)
    logits, cache = read_prompt(reader, padded_prompt(ids[:CHUNK].tolist(), len(ids)), CHUNK)
    heads, width = (2, 6) if kind == "llama" else (4, 8)
    assert cache.keys.shape == cache.values.shape == (2, 1, 2 * CHUNK, heads, width)
    for position in range(CHUNK, CHUNK + 8):
        np.testing.assert_allclose(logits[0], expected[position - 1], atol=5e-6 * np.abs(expected).max())
        logits, cache = read_token(reader, cache, ids[position : position + 1], position)


def test_rotations_slow_down_as_llama_3_has_it():
    """Of Llama 3.1's: the frequencies from the angles at position 1, and at position 10,000 the angle itself."""
    scaling, positions = (8.0, 1.0, 4.0, 8192.0), 10_001
    cos, sin = table(Rotary(positions, 128, 500_000.0, "8,1,4,8192"))
    expected = np.array([reference.frequency(k, 128, 500_000.0, scaling) for k in range(64)])
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), expected, rtol=1e-6)
    np.testing.assert_allclose(sin[10_000], np.sin(10_000 * expected), atol=1e-7)


def test_defaults_that_parity_does_not_show():
    for kind in ("diffeqformer", "llama"):
        assert vector_field(authors.model_config(kind, "llama")).final_epsilon == 1e-5
    assert vector_field(authors.model_config("llama", tied_head=True)).embedding_stddev == 0.02


@pytest.mark.parametrize(
    "kind, field, changes, sentence",
    [
        ("diffeqformer", "neox", {"rotary_fraction": 0.4}, "rotary_fraction: must leave an even number .* it is 0.4"),
        ("diffeqformer", "gpt", {"left_out": "1"}, "left_out: must be empty for model.kind diffeqformer"),
        ("llama", "llama", {"left_out": "1,1"}, "left_out: must be different layers, counted from 0"),
        ("gpt", "gpt", {"left_out": "6"}, "left_out: must be layers of the 6"),
        ("llama", "llama", {"left_out": "1", "training_depths": "7"}, "training_depths: must be at most the 6 layers"),
        ("discretized", "gpt", {"lora_rank": 33}, "lora_rank: must not exceed .* 32 in qkv, but it is 33"),
        ("discretized", "gpt", {"lora_rank": 1, "lora_layers": "("}, "lora_layers: .* isn't a regular expression"),
    ],
)
def test_a_model_that_cannot_be_is_refused(kind, field, changes, sentence):
    config = toy_config(kind, field, base="runs/base" if "lora_rank" in changes else "")
    config.model.update(changes)
    with pytest.raises(UserError, match=f"^config.model.{sentence}"):
        check_config(config, num_devices=1)


def test_heads_of_a_width_of_their_own():
    """They need not divide the model's width, and keys and values of fewer heads are divided as others are."""
    check_config(toy_config("llama", model__heads=5, model__head_width=6), num_devices=8)
    check_config(toy_config("diffeqformer", model__heads=5, model__head_width=7), num_devices=8)
    config = toy_config("llama", mesh__tensor=4, model__key_value_heads=2, model__vocab_multiple=16)
    with pytest.raises(UserError, match=r"^config.mesh.tensor: must divide config.model.key_value_heads \(2\)"):
        check_config(config, num_devices=8)
