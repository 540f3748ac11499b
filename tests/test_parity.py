"""Our models against the authors' numbers, and against the float64 reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import authors
from diffeqformer import reference
from diffeqformer.models import Transformer
from diffeqformer.models.depth_weights import step_sizes
from diffeqformer.step import token_losses

KINDS = ("diffeqformer", "gpt")


def difference(ours, theirs):
    """Largest difference, relative to the scale (largest magnitude) of what it should be."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def build(config, params):
    """The model of a config with given parameters."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)
    return nnx.merge(graph, jax.tree.map(jnp.asarray, params))


def weights_given_features(model, arrays):
    """The model's weights, starting from the authors' own e(t) where there is one."""
    if "out.time_embed" not in arrays:
        return model.weights()
    return dataclasses.replace(model.weights(), layers=model.depth.from_features(arrays["out.time_embed"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remat", [False, True])
def test_logits_states_and_gradients_equal_the_authors_given_time_features(kind, remat):
    arrays, params, gradients = authors.load(kind)
    config = authors.model_config(kind, remat=remat)
    tokens = jnp.asarray(arrays["input_ids"])
    model = build(config, params)
    graph = nnx.graphdef(model)

    weights = weights_given_features(model, arrays)
    assert difference(model(tokens, weights), arrays["out.logits"]) < 2e-6
    if "out.states" in arrays:
        states = model.trajectory(tokens, weights)
        assert states.shape == (7, 2, 16, 32)
        for ours, theirs in zip(states[1:], arrays["out.states"]):
            assert difference(ours, theirs) < 2e-6

    def loss_of(params):
        model = nnx.merge(graph, params)
        return token_losses(model(tokens, weights_given_features(model, arrays)), tokens)[:, :-1].mean()

    loss, ours = jax.value_and_grad(loss_of)(jax.tree.map(jnp.asarray, params))
    assert abs(loss - arrays["loss"]) < 1e-5
    for (path, theirs), mine in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(ours), strict=True):
        error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert error < 1e-5, (path, error)


@pytest.mark.parametrize("num_steps", [6, 9, 12, 18, 24])
def test_logits_from_t_equal_the_authors_at_any_depth(num_steps):
    arrays, params, _ = authors.load("diffeqformer")
    model = build(authors.model_config("diffeqformer"), params)
    logits = model(jnp.asarray(arrays["input_ids"]), model.weights(model.times(num_steps)))
    np.testing.assert_allclose(logits, arrays[f"evaluate_at_{num_steps}.logits"], atol=5e-4)


def reference_blocks(kind, params):
    if kind == "diffeqformer":
        return reference.diffeqformer_blocks(params, 6, 8), reference.euler
    if kind == "gpt":
        return reference.gpt_blocks(params, 6), reference.lie_trotter
    return reference.shared_blocks(params, 6), reference.euler


def shared_params():
    """Parameters for the shared baseline: one layer of the authors' GPT."""
    _, params, _ = authors.load("gpt")
    return {**params, "depth": jax.tree.map(lambda leaf: leaf[2], params["depth"])}


@pytest.mark.parametrize("kind", ["diffeqformer", "gpt", "shared"])
def test_models_agree_with_the_float64_reference(kind):
    params = shared_params() if kind == "shared" else authors.load(kind)[1]
    tokens = authors.load("gpt")[0]["input_ids"]
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)

        def loss_of(params):
            blocks, solver = reference_blocks(kind, params)
            logits = jnp.stack([reference.forward(params, blocks, solver, row, heads=4)[0] for row in tokens])
            return reference.loss(logits, tokens), logits

        (_, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(exact)
        assert logits.dtype == jnp.float64
    model = build(authors.model_config(kind), params)
    graph = nnx.graphdef(model)
    assert difference(model(jnp.asarray(tokens), model.weights()), logits) < 2e-6

    def ours(params):
        model = nnx.merge(graph, params)
        return token_losses(model(jnp.asarray(tokens), model.weights()), jnp.asarray(tokens))[:, :-1].mean()

    for exact, mine in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(jax.grad(ours)(jax.tree.map(jnp.asarray, params))), strict=True
    ):
        assert np.linalg.norm(mine - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_itself_agrees_with_the_authors(kind):
    arrays, params, _ = authors.load(kind)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        blocks, solver = reference_blocks(kind, params)
        rows = [reference.forward(params, blocks, solver, row, heads=4) for row in arrays["input_ids"]]
        logits = np.stack([logits for logits, _ in rows])
        assert abs(float(reference.loss(jnp.asarray(logits), arrays["input_ids"])) - arrays["loss"]) < 5e-5
    assert difference(logits, arrays["out.logits"]) < (
        5e-5 if kind == "diffeqformer" else 2e-6
    )  # their angles are fp32


def test_steps_end_where_time_does():
    np.testing.assert_array_equal(step_sizes(np.arange(1, 37) / 36), np.full(36, 1 / 36, np.float32))
