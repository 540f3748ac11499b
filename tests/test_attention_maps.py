"""Attention maps: compared with the attention that the model computes, and on texts with a known result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.analysis import attention_maps, induction, sharpness
from diffeqformer.fields.layers import Context
from diffeqformer.transformer import split_model, weights_at
from helpers import build_model, lively_model

TOKENS = jnp.arange(3, 11)


@pytest.mark.parametrize("kind, field", [("diffeqformer", "gpt"), ("llama", "llama")])
def test_maps_are_the_attention_that_mixes_values(kind, field):
    """Measured from outside: with one-hot values, the mixed values are the attention."""
    model = lively_model(kind, field, num_steps=2)
    found = attention_maps.maps(model, TOKENS[None])
    assert found.shape == (2, 1, 4, 8, 8) and np.allclose(found.sum(-1), 1, atol=1e-5)
    assert not np.triu(np.asarray(found), 1).any() and np.ptp(np.asarray(found)[..., -1, :]) > 0.05
    one_hot = jnp.tile(jnp.eye(8)[None, :, None], (1, 1, 4, 1))
    states, seen = model.trajectory(TOKENS[None], weights_at(model)), []

    def attend(query, key, value):
        seen.append(jax.nn.dot_product_attention(query, key, one_hot, is_causal=True))
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    layers, dt = weights_at(model).at_step(1, 1)
    model.solver.step(model.field, layers, states[1], dt, Context(attend=attend))
    np.testing.assert_allclose(found[1], seen[0].swapaxes(1, 2), atol=1e-5)


def test_induction_scores_of_an_induction_head_and_of_an_even_one():
    size = 6
    known = np.zeros((1, 2, 2 * size, 2 * size), np.float32)
    for token in range(2 * size):
        known[0, 0, token, token + 1 - size if token >= size else token] = 1
        known[0, 1, token, : token + 1] = 1 / (token + 1)
    even = np.mean([1 / (token + 1) for token in range(size, 2 * size)])
    assert np.allclose(induction.to_successor(jnp.asarray(known)), [1, even])
    scores = induction.induction_scores(lively_model("diffeqformer", num_steps=3), range(10, 40), 8, examples=4)
    assert scores.shape == (3, 4) and (0 < scores).all() and (scores < 1).all()


def test_entropy_is_a_share_of_uniform_attentions():
    known = np.zeros((1, 3, 4, 4), np.float32)
    known[0, :, 0, 0] = known[0, 0, np.arange(4), np.arange(4)] = 1  # head 0: each token looks at itself
    known[0, 1] = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    known[0, 2, 1:, :2] = 0.5  # head 2: 1 bit of 1, log2(3) and 2
    expected = [0, 1, np.mean([1, 1 / np.log2(3), 1 / 2])]
    np.testing.assert_allclose(sharpness.relative_entropy(jnp.asarray(known)), expected, atol=1e-6)


def test_rollout_multiplies_steps_from_the_last_to_the_first(monkeypatch):
    """Two steps: the last token takes half from token 1, which took half from token 0 before."""
    first, second = np.eye(3), np.eye(3)
    first[1], second[2] = [1, 0, 0], [0, 1, 0]
    monkeypatch.setattr(attention_maps, "maps", lambda *_: np.stack([first, second]))
    np.testing.assert_allclose(attention_maps.rollout(build_model("gpt"), jnp.arange(3)), [0.25, 0.25, 0.5])


@pytest.mark.long
def test_input_gradients_are_those_of_the_embeddings():
    """For distinct tokens, each of whose rows is read once; a Llama's separate head isn't involved."""
    model = lively_model("llama", "llama", num_steps=2)
    graph, params = split_model(model)

    def log_probability(table):
        here = nnx.merge(graph, {**params, "token_embedding": table})
        return jax.nn.log_softmax(here(TOKENS[None], here.weights())[0, -1])[5]

    slopes = jax.jit(jax.grad(log_probability))(params["token_embedding"])[TOKENS]
    found = attention_maps.input_gradients(model, TOKENS, target=5)
    np.testing.assert_allclose(found, np.linalg.norm(slopes, axis=-1), rtol=1e-4)
