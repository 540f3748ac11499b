"""Reversible solvers: the step back, and the gradients of a backward pass that stores no states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_checkpointing import loss_and_gradient

from diffeqformer.fields.field import VectorField
from diffeqformer.inference.reader import with_solver
from diffeqformer.solvers import SOLVERS
from diffeqformer.solvers.reversible import Pair
from diffeqformer.transformer import split_model, weights_at
from helpers import NO_DROPOUT, lively_model, toy_config


def relative_error(found, expected) -> float:
    """The distance of two trees, divided by the length of the second."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    distance = sum(float(np.sum((np.asarray(ours, np.float64) - np.asarray(theirs)) ** 2)) for ours, theirs in pairs)
    return (distance / sum(float(np.sum(np.asarray(theirs, np.float64) ** 2)) for _, theirs in pairs)) ** 0.5


class Decay(VectorField):
    """x' = -0.7 x."""

    def attention(self, weights, x, context):
        return -0.7 * x

    def feed_forward(self, weights, x, context):
        return jnp.zeros_like(x)


def test_a_step_has_its_published_form_and_the_coupling_with_which_models_were_saved():
    x, y, h, a = 1.0, 2.0, 0.25, np.exp(-3 * 0.25)
    pair = Pair(jnp.full((1, 1, 1), x), jnp.full((1, 1, 1), y))
    found = SOLVERS["reversible_euler"].step(Decay(), [{}], pair, jnp.float32(h), NO_DROPOUT)
    x = a * x + (1 - a) * y - 0.7 * h * y
    np.testing.assert_allclose(jnp.ravel(jnp.stack(found)), [x, y - 0.7 * h * x], rtol=1e-6)


@pytest.mark.parametrize(
    "kind, field, solver",
    [("diffeqformer", "gpt", "midpoint"), ("shared", "llama", "heun"), ("discretized", "gpt", "lie_trotter")],
)
def test_gradients_are_those_of_a_backward_pass_that_stores_everything(kind, field, solver):
    expected, gradient = loss_and_gradient(kind, field, f"reversible_{solver}", "none")
    loss, found = loss_and_gradient(kind, field, f"reversible_{solver}", "reversible")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert relative_error(found, gradient) < 1e-4  # rounding, about 20 times


@pytest.mark.long
def test_rounding_grows_by_a_bounded_factor_in_any_number_of_steps():
    """With a constant coupling of 0.99 it would grow by 3e4 in 1,024 steps. Here it grows by e^3, about 20."""
    errors = []
    for steps in (36, 512):
        gradients = [
            loss_and_gradient("diffeqformer", "gpt", "reversible_euler", remat, steps=steps)[1]
            for remat in ("none", "reversible")
        ]
        errors.append(relative_error(*gradients[::-1]))
    assert errors[0] < 1e-5 and errors[1] < 1e-4, errors


@pytest.mark.fast
def test_no_state_is_stored():
    graph, params = split_model(
        lively_model("diffeqformer", num_steps=36, solver="reversible_euler", remat="reversible")
    )
    tokens = jnp.ones((3, 16), jnp.int32)

    def loss(params):
        model = nnx.merge(graph, params)
        return model(tokens, weights_at(model)).sum()

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    assert "f32[3,16,32]" in text and not any(f"f32[{steps},3,16" in text for steps in (35, 36, 37, 72))


def test_a_model_that_steps_back_can_be_read_with_any_solver():
    config = toy_config(model__solver="reversible_euler", model__remat="reversible")
    model = lively_model("diffeqformer", solver="reversible_euler", remat="reversible")
    for name in ("euler", "reversible_heun"):
        other = with_solver(model, name, config.model)
        assert np.isfinite(other(jnp.arange(10).reshape(2, 5), weights_at(other))).all()
