"""Scores of given ids equal a plain loop's, regardless of batching, padding and sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diffeqformer import transformer
from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.errors import UserError
from diffeqformer.inference.scoring import Scorer, Stretch, sliding_windows
from diffeqformer.parallel.mesh import make_mesh
from helpers import ONE_DEVICE, build_model, forward, lively_model

RANDOM = np.random.default_rng(0)
STRETCHES = [
    Stretch(RANDOM.integers(0, 64, n + 1).tolist(), first) for n, first in ((16, 1), (3, 2), (1, 1), (9, 9), (16, 7))
]


@pytest.mark.parametrize("length", [0, 7, 8, 9, 30])
@pytest.mark.parametrize("window, stride", [(8, 8), (8, 3), (2, 1)])
def test_sliding_windows_score_every_id_once_with_as_much_context_as_fits(length, window, stride):
    ids, scored = list(range(100, 100 + length)), []
    for part in sliding_windows(ids, window, stride, before=7):
        assert len(part.ids) - 1 <= window and 1 <= part.first < len(part.ids)
        end = len(scored) + len(part.ids) - part.first
        assert part.ids == [7, *ids][max(0, end - window) : end + 1]  # as far back as the window reaches
        assert end - len(scored) <= (stride if scored else window)
        scored += part.ids[part.first :]
    assert scored == ids


@pytest.mark.parametrize("kind, field", [("diffeqformer", "gpt"), ("llama", "llama")])
def test_scores_are_those_of_a_plain_loop(kind, field):
    """Which has other ids behind a stretch than the scorer has: nothing depends on them."""
    model = lively_model(kind, field)
    for stretch, scores in zip(STRETCHES, Scorer(model, batch_size=2, mesh=ONE_DEVICE)(STRETCHES), strict=True):
        length = len(stretch.ids) - 1
        logits = np.float64(forward(model, jnp.array([(stretch.ids[:-1] + [9] * 16)[:16]]))[0, :length])
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = np.array(stretch.ids)[stretch.first :]
        expected = np.array([log_probs[stretch.first - 1 + i, target] for i, target in enumerate(targets)])
        np.testing.assert_allclose(scores.log_probs, expected, atol=2e-5)
        best = logits[stretch.first - 1 :].argmax(-1) == targets
        np.testing.assert_array_equal(scores.likeliest, best)


@pytest.mark.parametrize("batch_size, mesh", [(5, ONE_DEVICE), (3, make_mesh())])
def test_scores_depend_on_neither_batch_nor_devices(batch_size, mesh):
    model = lively_model("diffeqformer")
    ours, theirs = (Scorer(model, 9, *how)(STRETCHES) for how in ((batch_size, mesh), (2, ONE_DEVICE)))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_a_model_that_knows_nothing_scores_log_v():
    """Id 0 and every other id, and none of the rows that pad the vocabulary."""
    graph, params = nnx.split(build_model("diffeqformer", vocab_multiple=48))
    model = nnx.merge(graph, jax.tree.map(jnp.zeros_like, params))
    [scores] = Scorer(model)([Stretch([0] + [0] * 8 + [63] * 8, 1)])
    np.testing.assert_allclose(scores.log_probs, -np.log(64), rtol=1e-6)
    logits = forward(model, jnp.zeros((1, 4), jnp.int32))
    assert logits.shape[-1] == 96 and np.isneginf(logits[..., 64:]).all()


@pytest.mark.long
@pytest.mark.parametrize("kind, field", [("diffeqformer", "gpt"), ("llama", "llama")])
def test_rows_that_fill_up_the_vocabulary_change_nothing(kind, field):
    """Padding rows get neither logits nor gradients."""
    model = lively_model(kind, field)
    wide = build_model(kind, field, vocab_multiple=48)
    graph, params = transformer.split_model(model)
    wide_graph, like = transformer.split_model(wide)
    padded = jax.tree.map(
        lambda small, large: np.pad(small, [(0, b - a) for a, b in zip(small.shape, large.shape)], constant_values=0.7),
        params,
        like,
    )
    tokens = jnp.array(RANDOM.integers(0, 64, (2, 12)))

    def loss(params, graph):
        merged = nnx.merge(graph, params)
        return optax.softmax_cross_entropy_with_integer_labels(
            merged(tokens, merged.weights())[:, :-1], tokens[:, 1:]
        ).mean()

    loss_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, grads = loss_and_gradient(params, graph)
    wide_value, wide_grads = loss_and_gradient(padded, wide_graph)
    assert value == pytest.approx(float(wide_value), rel=1e-6)
    for small, large in zip(*map(jax.tree.leaves, jax.device_get((grads, wide_grads)))):
        inner = large[tuple(slice(n) for n in small.shape)]
        np.testing.assert_allclose(inner, small, atol=1e-6)
        assert np.abs(large).sum() == pytest.approx(np.abs(inner).sum(), rel=1e-6)


def test_what_cannot_be_scored_is_refused():
    model = build_model("gpt")
    with pytest.raises(UserError, match="tokens: 17 positions, but this model has 16"):
        Scorer(model)([Stretch([1] * 18, 1)])
    with pytest.raises(UserError, match="batch_size: must be at least 1"):
        Scorer(model, batch_size=0)
    with pytest.raises(UserError, match="num_steps"):
        Scorer(model, 9)
    assert Scorer(model)([]) == []


def test_logits_that_are_not_finite_are_refused():
    model = lively_model("gpt", max_length=16)
    model.final_norm["shift"][...] = 1e25 * model.token_embedding[...][7]
    model.token_embedding[...] *= 1e15  # the product of both is more than fp32 holds
    with pytest.raises(NotFinite):
        Scorer(model, batch_size=2, mesh=ONE_DEVICE)([Stretch([1, 2, 3], 1)])
