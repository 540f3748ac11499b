"""Speculative generation: greedily the same tokens as without drafts; sampled, the same distribution; few rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.errors import UserError
from diffeqformer.inference import speculation
from diffeqformer.inference.cached import CHUNK
from diffeqformer.inference.choice import Choice, chances
from diffeqformer.inference.sampling import write_tokens
from diffeqformer.inference.speculation import DRAFTED, accept
from helpers import forward, lively_model

VOCABULARY = 64
SMOOTH = {"time_frequency": 3.0, "num_steps": 5}  # so that two steps guess some tokens of five


def written(model, prompt, **options) -> np.ndarray:
    options = {"key": jax.random.key(0), "vocab_size": VOCABULARY, "samples": 3, **options}
    return np.stack(list(write_tokens(model, prompt, **options)))


@pytest.mark.parametrize(
    "kind, field, solver, frequency, length",
    [("diffeqformer", "gpt", "euler", 3.0, CHUNK), ("alternative", "llama", "heun", 100.0, CHUNK - DRAFTED)],
)
def test_greedy_text_is_the_same(kind, field, solver, frequency, length, monkeypatch):
    """Up to the last position, where drafts go on behind it, and without an id that the model would write."""
    changes = {**SMOOTH, "time_frequency": frequency, "solver": solver}
    model = lively_model(kind, field, max_length=length, vocab_size=VOCABULARY, **changes)
    counts, starts, write_round = [], [], speculation.write_round

    def recorded(readers, texts, keys, going_on, *rest):
        starts.extend(np.asarray(texts.position)[going_on])
        assert starts[-1] + DRAFTED < texts.caches.many.keys.shape[3]  # else all of them would lie too early
        out = write_round(readers, texts, keys, going_on, *rest)
        counts.extend(np.asarray(out[2])[going_on])
        return out

    monkeypatch.setattr(speculation, "write_round", recorded)
    options = dict(choice=Choice(0.0), vocab_size=VOCABULARY)
    options["vocab_size"] = int(written(model, [1, 2], count=20, **options).max())
    for prompt in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4]):
        plain = written(model, prompt, count=length - len(prompt), **options)
        drafted = written(model, prompt, count=length - len(prompt), draft_steps=2, **options)
        np.testing.assert_array_equal(drafted, plain)
    assert max(counts) > 2 and min(counts) < DRAFTED + 1  # drafts were kept, and some weren't
    assert max(starts) + DRAFTED >= length


def test_texts_differ_and_each_is_the_same_in_any_company():
    model = lively_model("diffeqformer", max_length=CHUNK, vocab_size=VOCABULARY, **SMOOTH)
    options = dict(count=20, choice=Choice(1.0), draft_steps=1)
    three, one = written(model, [1, 2], **options), written(model, [1, 2], samples=1, **options)
    assert three.shape == (20, 3) and len({tuple(text) for text in three.T}) == 3
    np.testing.assert_array_equal(three[:, :1], one)


def test_a_token_after_kept_drafts_has_the_distribution_of_the_full_depth():
    """Whatever the drafts are drawn from: also where they exclude tokens, or differ from it by nothing."""
    random, draws = np.random.RandomState(0), 40_000
    many = np.log(random.dirichlet(np.ones(5), size=3)).astype(np.float32)
    few = np.log(random.dirichlet(np.ones(5), size=2)).astype(np.float32)
    few[0, 2], many[0, 4] = -np.inf, -np.inf

    def tokens(few, key):
        drafted = jax.random.categorical(jax.random.fold_in(key, 9), few).astype(jnp.int32)
        return accept(drafted, few, jnp.asarray(many), key)

    keys = jax.random.split(jax.random.key(1), draws)
    for drafts in (jnp.asarray(few), jnp.asarray(many[:2])):
        found, counts = map(np.asarray, jax.jit(jax.vmap(tokens, (None, 0)))(drafts, keys))
        for place in range(3):
            here = found[counts > place, place]
            expected = np.asarray(jax.nn.softmax(many[place]))
            shares = np.bincount(here, minlength=5) / len(here)
            np.testing.assert_allclose(shares, expected, atol=4 / np.sqrt(len(here)))  # over 8 standard deviations
        overlap = [np.minimum(jax.nn.softmax(drafts[place]), jax.nn.softmax(many[place])).sum() for place in (0, 1)]
        assert (counts > 1).mean() == pytest.approx(overlap[0], abs=0.01)  # as many drafts as can be kept
        assert (counts > 2).mean() == pytest.approx(overlap[0] * overlap[1], abs=0.01)


def test_sampled_texts_have_the_distribution_of_plain_ones():
    model = lively_model("diffeqformer", max_length=16, vocab_size=8, time_frequency=3.0, num_steps=3)
    choice, count = Choice(0.7, top_k=6, top_p=0.95), 2000
    texts = written(model, [1, 2], count=3, samples=count, vocab_size=8, choice=choice, draft_steps=1)

    def probabilities(*prompts):
        logits = forward(model, jnp.array(prompts))[:, -1]
        return np.asarray(jax.nn.softmax(chances(logits, choice)), np.float64)

    second = probabilities(*([1, 2, token] for token in range(8)))
    third = probabilities(*([1, 2, a, b] for a in range(8) for b in range(8))).reshape(8, 8, 8)
    expected = probabilities([1, 2])[0][:, None, None] * second[:, :, None] * third
    found = np.zeros((8, 8, 8))
    np.add.at(found, tuple(texts), 1 / count)
    assert (found[expected == 0] == 0).all()
    distance, noise = np.abs(found - expected).sum() / 2, np.sqrt(expected / count).sum() / 2
    assert distance < noise  # of texts that follow `expected`, the mean is 0.8 of it


def test_drafts_take_fewer_steps():
    model = lively_model("diffeqformer", **SMOOTH)
    for num_steps, draft_steps in ((None, 0), (3, 3)):
        sentence = f"^draft_steps: must be at least 1 and below the {num_steps or 5} steps of depth"
        with pytest.raises(UserError, match=sentence):
            written(model, [1], count=2, choice=Choice(), num_steps=num_steps, draft_steps=draft_steps)
