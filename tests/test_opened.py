"""`diffeqformer.open`: a run in Python does what the commands do, at any depth."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeqformer
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.transformer import weights_at
from helpers import forward

TEXT = "def read(file):"


def log_probs_by_hand(opened, num_steps: int, text: str) -> np.ndarray:
    """Of each byte, given end-of-text and the bytes before it."""
    ids = [ByteTokenizer.end_of_text, *text.encode()]
    logits = forward(opened.model, jnp.array([ids[:-1]]), num_steps)
    return np.array(jax.nn.log_softmax(logits)[0, np.arange(len(text)), ids[1:]])


def test_scores_texts_and_traces_are_those_of_the_model(run):
    steps = 5
    opened = diffeqformer.open(run, step=12).at(steps)
    score, expected = opened.score(TEXT), log_probs_by_hand(opened, steps, TEXT)
    np.testing.assert_allclose(score.log_probs, expected, rtol=1e-4)
    assert score.tokens == list(TEXT)
    assert score.bits_per_byte == pytest.approx(-expected.sum() / math.log(2) / len(TEXT), rel=1e-5)

    trace, tokens = opened.trace(TEXT), jnp.array([list(TEXT.encode())])
    logits = np.asarray(forward(opened.model, tokens, steps))[0]
    assert trace.lens[-1] == [chr(each) for each in logits.argmax(-1)]
    np.testing.assert_allclose(trace.lens_probability[-1], jax.nn.softmax(logits).max(-1), rtol=1e-4)
    np.testing.assert_allclose(trace.times, np.arange(steps + 1) / steps)
    assert trace.states.shape == (steps + 1, len(TEXT), opened.model.field.width)
    np.testing.assert_allclose(trace.attention.sum(-1), 1, rtol=1e-5)
    assert trace.attention.shape[0] == steps and (np.triu(trace.attention, 1) == 0).all()

    likeliest = opened.generate("def ", tokens=1, temperature=0.0)
    after = forward(opened.model, jnp.array([list(b"def ")]), steps)[0, -1, :256]
    assert likeliest == "def " + bytes([int(after.argmax())]).decode(errors="replace")


def test_a_text_longer_than_a_window_is_scored_whole(run):
    opened = diffeqformer.open(run)
    assert len(opened.score(10 * TEXT).log_probs) == 10 * len(TEXT) > opened.model.max_length
    with pytest.raises(UserError, match="^text: must not be empty"):
        opened.score("")


def test_weights_at_a_time_are_those_of_a_step_that_ends_there(run):
    opened = diffeqformer.open(run)
    of_steps = weights_at(opened.model, 4).layers
    for layer, each in opened.weights(0.5).items():
        for name, value in each.items():
            np.testing.assert_allclose(value, of_steps[layer][name][1], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="^time: "):
        opened.weights(1.5)
