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
from helpers import FAMILY, forward, loss_and_gradient

MODELS = list(authors.MODELS)
KNOTS = 2  # of interpolated weights


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


def parameters(kind, field, num_steps):
    """The authors' parameters for their models; for the others a rearrangement of these."""
    if field == "neox":  # a GPT's, with another head
        params = parameters("gpt" if kind == "neox" else kind, "gpt", num_steps)
        others = {name: value for name, value in params.items() if name != "position_embedding"}
        return {**others, "lm_head": params["token_embedding"][::-1].T}
    if kind == "diffeqformer":
        return authors.load(kind, field)[1]
    if kind == "alternative":
        params = authors.load("diffeqformer", field)[1]
        layers = params["depth"]["layers"]
        mlp = layers["attention_out"]["mlp"]
        layers = {name: {k: v for k, v in layer.items() if k != "mlp"} for name, layer in layers.items()}
        return {**params, "depth": {"mlp": mlp, "layers": layers}}
    if kind == "looped":
        generated, shared = parameters("alternative", field, num_steps), parameters("shared", field, num_steps)
        layers = shared["depth"]["layers"] | {
            name: layer for name, layer in generated["depth"]["layers"].items() if "scale_projection" in layer
        }
        for name in ("attention_out", "mlp_down"):
            layers[name] = {**layers[name], "gate_projection": layers["norm_mlp"]["scale_projection"][:, ::-1]}
        return {**generated, "depth": {"mlp": generated["depth"]["mlp"], "layers": layers}}
    params = authors.load(field, field)[1]
    layers = params["depth"]["layers"]
    if field == "llama" != kind:  # a DiffEqFormer's norms have shifts
        norms = {
            name: {**layers[name], "shift": 0.3 * layers[name]["scale"]} for name in ("norm_attention", "norm_mlp")
        }
        layers = {**layers, **norms}
    part = {"shared": 2, "interpolated": slice(KNOTS)}.get(kind, slice(num_steps))
    layers = jax.tree.map(lambda leaf: leaf[part], layers)
    return {**params, "depth": {"layers": layers}}


@pytest.mark.parametrize(
    "kind, field, norm_of_norm", [*((*model, True) for model in FAMILY), ("diffeqformer", "llama", False)]
)
def test_models_agree_with_the_float64_reference(kind, field, norm_of_norm):
    params, num_steps = parameters(kind, field, 3), 3
    tokens = authors.load("gpt", "gpt")[0]["input_ids"]
    with jax.enable_x64(True):
        exact = jax.device_put(jax.tree.map(np.float64, params))

        def loss_of(params):
            blocks, solver = reference_blocks(kind, params, num_steps)
            if field == "neox":
                solver = functools.partial(solver, rotary_fraction=0.25, epsilon=1e-5)
            if not norm_of_norm:
                solver = functools.partial(solver, norm_of_norm=False)
            logits = jax.vmap(lambda row: reference.forward(params, blocks, solver, row, heads=4)[0])(tokens)
            return reference.loss(logits, tokens), logits

        (_, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(exact)
        assert logits.dtype == jnp.float64
    changes = {"solver": "euler", "time_embed_dim": KNOTS} if kind == "interpolated" else {}
    config = authors.model_config(kind, field, norm_of_norm=norm_of_norm, num_steps=num_steps, **changes)
    model = authors.build(config, params)
    assert difference(model(jnp.asarray(tokens), model.weights()), logits) < 2e-6
    _, ours = loss_and_gradient(nnx.graphdef(model), jax.device_put(params), jnp.asarray(tokens), None)
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
