"""Scores of given ids equal a plain loop's, regardless of batching, padding and sharding."""

import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.errors import UserError
from diffeqformer.inference.scoring import Scorer, Stretch
from diffeqformer.parallel.mesh import make_mesh
from helpers import ONE_DEVICE, build_model, forward, lively_model

RANDOM = np.random.default_rng(0)
STRETCHES = [
    Stretch(RANDOM.integers(0, 64, n + 1).tolist(), first) for n, first in ((16, 1), (3, 2), (1, 1), (9, 9), (16, 7))
]


@pytest.mark.parametrize("batch_size, mesh", [(2, ONE_DEVICE), (3, make_mesh())])
@pytest.mark.parametrize("kind, field", [("diffeqformer", "gpt"), ("llama", "llama")])
def test_scores_are_those_of_a_plain_loop(kind, field, batch_size, mesh):
    """Which has other ids behind a stretch than the scorer has: nothing depends on them. Rows pad the vocabulary."""
    model = lively_model(kind, field, vocab_multiple=48)
    for stretch, scores in zip(STRETCHES, Scorer(model, batch_size=batch_size, mesh=mesh)(STRETCHES), strict=True):
        length = len(stretch.ids) - 1
        logits = np.float64(forward(model, jnp.array([(stretch.ids[:-1] + [9] * 16)[:16]]))[0, :length])
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = np.array(stretch.ids)[stretch.first :]
        expected = np.array([log_probs[stretch.first - 1 + i, target] for i, target in enumerate(targets)])
        np.testing.assert_allclose(scores.log_probs, expected, atol=2e-5)
        best = logits[stretch.first - 1 :].argmax(-1) == targets
        np.testing.assert_array_equal(scores.likeliest, best)


def test_a_text_longer_than_the_model_has_positions_is_refused():
    with pytest.raises(UserError, match="tokens: 17 positions"):
        Scorer(build_model("gpt"))([Stretch([1] * 18, 1)])


def test_logits_that_are_not_finite_are_refused():
    model = lively_model("gpt", max_length=16)
    model.final_norm["shift"][...] = 1e25 * model.token_embedding[...][7]
    model.token_embedding[...] *= 1e15  # the product of both is more than fp32 holds
    with pytest.raises(NotFinite):
        Scorer(model, batch_size=2, mesh=ONE_DEVICE)([Stretch([1, 2, 3], 1)])
