"""Our models compared with the authors' numbers and with the float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import authors
from diffeqformer import reference
from diffeqformer.transformer import split_model
from helpers import FAMILY, forward, lively_model, loss_and_gradient

MODELS = list(authors.MODELS)
KNOTS = 2  # of interpolated weights
LLAMA3 = "8,1,4,32"  # of eight-entry heads at theta 20, one pair is fast, one slow, and two are between
ALL = {"biases": "all", "norm_epsilon": 0.3, "rope_theta": 20.0, "rope_scaling": LLAMA3, "tied_head": True}
PART = {"rotary_fraction": 0.75, "rope_theta": 20.0, "norm_epsilon": 0.3}


def difference(ours, theirs):
    """Largest difference, relative to the scale (largest magnitude) of the expected values."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def weights_given_features(model, arrays):
    """The model's weights, computed from the authors' own e(t) if there is one."""
    if "out.time_embed" not in arrays:
        return model.weights()
    return dataclasses.replace(model.weights(), layers=model.depth.from_features(arrays["out.time_embed"]))


@pytest.mark.parametrize("kind, field", MODELS)
@pytest.mark.parametrize("remat", ["none", "step"])
def test_logits_states_and_gradients_equal_the_authors_given_time_features(kind, field, remat):
    arrays, params, gradients = authors.load(kind, field)
    config = authors.model_config(kind, field, remat=remat)
    tokens = jnp.asarray(arrays["input_ids"])
    graph = nnx.graphdef(authors.build(config, params))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss_of(params):
        model = nnx.merge(graph, params)
        weights = weights_given_features(model, arrays)
        logits = model(tokens, weights)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()
        return loss, (logits, model.trajectory(tokens, weights))

    (loss, (logits, states)), ours = loss_of(jax.device_put(params))
    assert difference(logits, arrays["out.logits"]) < 2e-6
    if "out.states" in arrays:
        assert states.shape == (7, 2, 16, 32)
        for state, theirs in zip(states[1:], arrays["out.states"]):
            assert difference(state, theirs) < 2e-6
    assert abs(loss - arrays["loss"]) < 1e-5
    for (path, theirs), mine in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(ours), strict=True):
        error = np.linalg.norm(np.asarray(mine) - theirs) / np.linalg.norm(theirs)
        assert error < 1e-5, (path, error)


@pytest.mark.parametrize(
    "field, num_steps, name",
    [*(("gpt", steps, f"evaluate_at_{steps}.logits") for steps in (6, 9, 12, 18, 24)), ("llama", 6, "out.logits")],
)
def test_logits_from_t_equal_the_authors_at_any_depth(field, num_steps, name):
    arrays, params, _ = authors.load("diffeqformer", field)
    model = authors.build(authors.model_config("diffeqformer", field), params)
    logits = forward(model, jnp.asarray(arrays["input_ids"]), num_steps)
    np.testing.assert_allclose(logits, arrays[name], atol=5e-4)


def reference_blocks(kind, params, num_steps):
    if kind in ("diffeqformer", "alternative", "looped"):
        return reference.generated_blocks(params, num_steps, 8), reference.euler
    if kind == "neox":
        return reference.per_layer_blocks(params, num_steps), functools.partial(reference.euler, unit_steps=True)
    if kind in ("gpt", "llama"):
        return reference.per_layer_blocks(params, num_steps), reference.lie_trotter
    blocks = {
        "shared": reference.shared_blocks,
        "discretized": reference.per_layer_blocks,
        "interpolated": reference.interpolated_blocks,
    }[kind]
    return blocks(params, num_steps), reference.euler


@pytest.mark.parametrize(
    "kind, field, changes, options",
    [
        *((*model, {}, {"rotary_fraction": 0.25, "epsilon": 1e-5} if model[1] == "neox" else {}) for model in FAMILY),
        ("diffeqformer", "llama", {"norm_of_norm": False}, {"norm_of_norm": False}),
        ("llama", "llama", {"key_value_heads": 2, "head_width": 6}, {}),
        ("llama", "llama", ALL, {"theta": 20.0, "scaling": (8, 1, 4, 32), "epsilon": 0.3}),
        ("neox", "neox", PART, {"theta": 20.0, "rotary_fraction": 0.75, "epsilon": 0.3}),
    ],
)
def test_models_agree_with_the_float64_reference(kind, field, changes, options):
    """Logits, and the gradient of every parameter."""
    sizes = {"solver": "euler", "time_embed_dim": KNOTS} if kind == "interpolated" else {}
    model = lively_model(kind, field, num_steps=3, **sizes, **changes)
    graph, params = split_model(model)
    tokens = authors.load("gpt", "gpt")[0]["input_ids"]
    with jax.enable_x64(True):

        def loss_of(params):
            blocks, solver = reference_blocks(kind, params, 3)
            solver, epsilon = functools.partial(solver, **options), changes.get("norm_epsilon", 1e-5)
            logits = jax.vmap(lambda row: reference.forward(params, blocks, solver, row, 4, epsilon)[0])(tokens)
            return reference.loss(logits, tokens), logits

        exact = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)
        (_, logits), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(exact)
        assert logits.dtype == jnp.float64
    assert difference(forward(model, jnp.asarray(tokens)), logits) < 2e-6
    _, ours = loss_and_gradient(graph, params, jnp.asarray(tokens), None)
    for exact, mine in zip(jax.tree.leaves(gradients), jax.tree.leaves(ours), strict=True):
        assert np.linalg.norm(np.asarray(mine) - np.asarray(exact)) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind, field", MODELS)
def test_the_reference_itself_agrees_with_the_authors(kind, field):
    arrays, params, _ = authors.load(kind, field)
    with jax.enable_x64(True):
        params = jax.device_put(jax.tree.map(np.float64, params))
        blocks, solver = reference_blocks(kind, params, 6)
        rows = [reference.forward(params, blocks, solver, row, heads=4) for row in arrays["input_ids"]]
        logits = np.stack([logits for logits, _ in rows])
        assert abs(float(reference.loss(jnp.asarray(logits), arrays["input_ids"])) - arrays["loss"]) < 5e-5
    tolerance = 5e-5 if kind == "diffeqformer" else 2e-6  # their angles are fp32
    assert difference(logits, arrays["out.logits"]) < tolerance
