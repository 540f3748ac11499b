"""Properties of the models: sizes, starts, causality, dropout, types, size of the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context, dropout, layer_norm, random_words
from diffeqformer.parallel.sharding import LOGICAL_AXES
from diffeqformer.solvers import SOLVERS, walk
from diffeqformer.solvers.solver import REMAT
from diffeqformer.training.step import dropout_keys
from diffeqformer.transformer import abstract_model, split_model
from helpers import FAMILY, NO_DROPOUT, build_model, lively_model, load_config, normal


def parameter_count(config) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_model(config), nnx.Param)))


@pytest.mark.parametrize(
    "name, changes, diffeqformer, baseline",
    [
        ("small", {}, 188_254_152, 124_439_808),
        ("medium", {"time_embed_dim": 20}, 317_054_664, 354_823_168),
        ("medium", {}, 1_274_538_688, 354_823_168),
        ("medium", {"num_steps": 18, "time_embed_dim": 100, "sinusoidal_dim": 256}, 1_325_088_104, None),
        ("large", {}, 1_974_541_760, 774_030_080),
        ("llama_1b", {}, 6_641_948_192, 1_204_881_408),
        ("wikitext103_small", {}, 188_254_152, 124_439_808),
        ("wikitext103_medium", {}, 669_803_872, 354_823_168),
    ],
)
def test_parameter_counts_are_the_published_ones(name, changes, diffeqformer, baseline):
    for model, expected in (("diffeqformer", diffeqformer), ("llama" if name == "llama_1b" else "gpt", baseline)):
        config = load_config(name, model)
        config.model.update(changes, vocab_multiple=1)
        assert expected is None or parameter_count(config) == expected


STDDEV = {  # of every leaf by its name, where the generator's start doesn't decide
    "token_embedding": 0.02,
    "position_embedding": 0.01,
    "lm_head": 0.02,
    "kernel": 0.02,
    "bias_projection": 1e-4,
    **dict.fromkeys(("lin1_bias", "lin2_bias", "scale", "shift", "bias"), 0.0),
    **dict.fromkeys((f"{what}_projection" for what in ("scale", "shift", "gate")), 0.0),
}
BY_START = {
    "published": {"lin1": 0.02, "lin2": 0.02, "projection": 0.02, "constant": 0.0},
    "constant": {"lin1": 0.02, "lin2": 0.02, "projection": 0.02, "constant": 0.02},
    "varying": {"lin1": 65**-0.5, "lin2": 24**-0.5, "projection": 0.015 * 24**-0.5, "constant": 0.02},
    "unit": {"lin1": 65**-0.5, "lin2": 24**-0.5, "projection": 0.04 * 24**0.5, "constant": 0.02},
}


@pytest.mark.parametrize(
    "kind, field, start",
    [
        *((*model, "published") for model in FAMILY),
        *(("diffeqformer", "gpt", start) for start in ("constant", "varying", "unit")),
    ],
)
def test_every_parameter_starts_at_its_published_scale_and_names_its_axes(kind, field, start):
    sizes = dict(width=64, mlp=256, time_embed_dim=24, sinusoidal_dim=32, max_length=64)
    model = build_model(kind, field, generator_start=start, **sizes)
    expected = {**STDDEV, **BY_START[start], **({"token_embedding": 1.0} if field == "llama" else {})}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value, stddev = np.asarray(variable[...]), expected[path[-1]]
        assert len(variable.axes) == value.ndim and {*variable.axes} <= {None, *LOGICAL_AXES}, path
        assert abs(value.std() - stddev) <= 0.1 * stddev, path  # exactly 0 where it starts at zero
        assert abs(value.mean() - (path[-1] == "scale")) <= 0.1 * stddev, path
    np.testing.assert_array_equal(model.weights().layers["norm_mlp"]["scale"], 1.0)


@pytest.mark.parametrize("field", ["gpt", "llama"])
def test_the_unit_start_and_a_base_width_only_scale_what_parameters_make(field):
    """So a model without them has the same logits if its parameters are scaled instead."""
    scaled = lively_model("diffeqformer", field, generator_start="unit", base_width=16, time_embed_dim=24)
    plain = build_model("diffeqformer", field, generator_start="varying", time_embed_dim=24)
    factors = {"lin2": 0.25 / 24, "lin2_bias": 0.25 / 24, "projection": 0.5, "constant": 0.5, "lm_head": 0.5}
    params = nnx.to_flat_state(nnx.state(scaled, nnx.Param))
    nnx.update(
        plain, nnx.from_flat_state({path: leaf.replace(leaf[...] * factors.get(path[-1], 1)) for path, leaf in params})
    )
    tokens = jnp.arange(24).reshape(2, 12)
    ours, theirs = scaled(tokens, scaled.weights()), plain(tokens, plain.weights())
    theirs *= 0.5 if field == "gpt" else 1  # its head is the embedding, which isn't scaled
    np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("kind, field", FAMILY)
def test_no_logit_depends_on_a_later_token(kind, field):
    model = build_model(kind, field)
    graph, params = split_model(model)
    random = np.random.RandomState(1)
    tokens, factors = jnp.asarray(random.randint(64, size=(1, 16))), normal(random, (64,))

    @jax.jit
    @jax.jacrev
    def influence(x, params, weights):  # of the state at time 0 on a random sum of each position's logits
        model = nnx.merge(graph, params)
        return model.head(walk(model.solver, model.field, weights, x, NO_DROPOUT))[0] @ factors

    influence = influence(model.embed(tokens, NO_DROPOUT), params, model.weights())
    influence = np.abs(influence).sum((1, 3))  # [output position, input position]
    later = np.triu(np.ones((16, 16), bool), 1)
    assert np.all(influence[later] == 0) and np.all(influence[~later] > 0)


def test_masks_are_as_independent_as_drawn_ones():
    """Shares of drops and of pairs of drops are within five standard deviations."""
    rate, shape = 0.1, (4, 256, 512)

    def kept(step=0, depth=1, site=0):
        context = Context(dropout_keys(0, jnp.int32(step), shape[0]), rate)
        return np.asarray(dropout(jnp.ones(shape), context.at_step(depth), site))

    mask = kept() == 0
    others = [kept(**other) == 0 for other in ({"site": 1}, {"depth": 2}, {"step": 1})]
    np.testing.assert_allclose(kept()[~mask], 1 / (1 - rate), rtol=1e-6)
    pairs = [mask[:, distance:] & mask[:, :-distance] for distance in (1, 2, 8, 128)]
    pairs += [mask[..., distance:] & mask[..., :-distance] for distance in (1, 2, 8, 128)]
    pairs += [mask & other for other in (*others, mask[[1, 2, 3, 0]])]
    for found, share in [(mask, rate), *((pair, rate**2) for pair in pairs)]:
        assert abs(found.mean() - share) < 5 * (share * (1 - share) / found.size) ** 0.5


def test_masks_stay_those_of_earlier_versions():
    """A run goes on with the masks with which it began."""
    keys = dropout_keys(7, jnp.int32(3), 3)
    words = random_words(keys, (2, 5))
    np.testing.assert_array_equal(random_words(keys[1:], (2, 5)), words[1:])  # whatever the batch
    assert words[0, 1].tolist() == [3837468225, 3975735303, 1762829187, 2575140885, 2271595897]


def test_every_depth_step_and_both_branches_have_masks_of_their_own():
    context, model, ones = Context(dropout_keys(0, jnp.int32(0), 2), 0.5), build_model("gpt"), jnp.ones((2, 8, 32))
    layers = jax.tree.map(jnp.zeros_like, model.weights().layers)
    for name in ("attention_out", "mlp_down"):
        layers[name]["bias"] = jnp.ones((6, 32))
    weights = model.stack(layers, jnp.ones(6))
    states = walk(SOLVERS["euler"], model.field, weights, ones, context, trajectory=True)
    assert len({step.tobytes() for step in np.diff(states, axis=0)}) == 5
    first = jax.tree.map(lambda leaf: leaf[0], layers)
    masks = [branch(first, ones, context) == 0 for branch in (model.field.attention, model.field.feed_forward)]
    masks.append(model.embed(jnp.ones((2, 8), jnp.int32), context) == 0)
    assert all(abs(float(mask.mean()) - 0.5) < 0.1 for mask in masks)
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 3


@pytest.mark.parametrize("kind, field", [("diffeqformer", "gpt"), ("shared", "llama")])
def test_bfloat16_keeps_times_norms_state_and_logits_in_float32(kind, field):
    model = build_model(kind, field, dtype="bfloat16")
    tokens = jnp.ones((2, 16), jnp.int32)
    weights = model.weights()
    assert weights.layers["mlp_up"]["kernel"].dtype == jnp.bfloat16 and weights.step_sizes.dtype == jnp.float32
    assert weights.layers["norm_mlp"]["scale"].dtype == jnp.float32
    for compute in (model.trajectory, model):
        assert jax.eval_shape(compute, tokens, weights).dtype == jnp.float32
    block = weights.layers if weights.constant else jax.tree.map(lambda leaf: leaf[0], weights.layers)
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    branches = [np.float32(f(block, x, NO_DROPOUT)) for f in (model.field.attention, model.field.feed_forward)]
    np.testing.assert_array_equal(model.field(block, x, NO_DROPOUT), branches[0] + branches[1])  # added up in float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    exact = build_model(kind, field).weights().layers["mlp_up"]["kernel"]  # rounded once, from fp32 h(t)
    np.testing.assert_array_equal(weights.layers["mlp_up"]["kernel"], exact.astype(jnp.bfloat16))


def test_impossible_depths_and_lengths_are_refused():
    model = build_model("gpt")
    with pytest.raises(UserError, match="^num_steps: .* weights for 6 steps and for no other number, but it is 9"):
        model.weights(model.grid(9))
    with pytest.raises(UserError, match="^num_steps: must be at least 1, but it is 0"):
        model.grid(0)
    with pytest.raises(UserError, match="^tokens: 17 positions, but this model has 16"):
        model(jnp.zeros((1, 17), jnp.int32), model.weights())


def lowered_gradient(num_steps: int, remat: str):
    solver = "reversible_euler" if remat == "reversible" else "euler"
    graph, params = nnx.split(build_model("diffeqformer", num_steps=num_steps, remat=remat, solver=solver))
    tokens = jnp.ones((4, 16), jnp.int32)

    def loss(params):
        model = nnx.merge(graph, params)
        return model(tokens, model.weights()).sum()

    return jax.jit(jax.grad(loss)).lower(params)


@pytest.mark.long
def test_the_program_does_not_grow_with_depth_and_remat_saves_memory():
    programs = {(steps, remat): lowered_gradient(steps, remat) for steps in (12, 36) for remat in REMAT}
    for remat in REMAT:
        assert len(programs[36, remat].as_text()) < 1.05 * len(programs[12, remat].as_text())
    compiled = {remat: programs[36, remat].compile() for remat in REMAT}
    assert len(compiled["step"].as_text()) < 1.05 * len(programs[12, "step"].compile().as_text())
    memory = {remat: compiled[remat].memory_analysis().temp_size_in_bytes for remat in REMAT}
    assert memory["step"] < 0.9 * memory["products"] < 0.9 * 0.9 * memory["none"]
    assert memory["step"] < 0.7 * memory["none"] and memory["reversible"] < memory["binomial"] < memory["step"]


def test_layer_norm_is_accurate_and_finite():
    random = np.random.RandomState(0)
    rows = np.stack([normal(random, (1280,)) + mean for mean in (0.0, 10.0, 100.0)])
    weights = {"scale": jnp.ones(1280), "shift": jnp.zeros(1280)}
    exact = np.float64(rows) - np.float64(rows).mean(1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    for used_as, bounds in ((jnp.float32, [1e-6, 1e-5, 1e-4]), (jnp.bfloat16, [1e-6, 5e-5, 5e-3])):
        errors = np.linalg.norm(layer_norm(weights, jnp.asarray(rows), 1e-5, used_as) - exact, axis=1) / np.sqrt(1280)
        assert (errors <= bounds).all(), errors
    constant = jnp.full((1, 1280), 300.3)  # the rounded variance may be negative
    for array in jax.value_and_grad(lambda x: layer_norm(weights, x, 1e-5, jnp.bfloat16).sum())(constant):
        assert np.isfinite(array).all()
