"""Backward passes that store few states: optimal checkpointing, and the steps back of reversible solvers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.fields.field import VectorField
from diffeqformer.inference.reader import with_solver
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.solvers import SOLVERS
from diffeqformer.solvers.checkpointing import NOWHERE, fewest_advances, schedule
from diffeqformer.solvers.reversible import Pair
from diffeqformer.transformer import split_model, weights_at
from helpers import NO_DROPOUT, lively_model, run_steps, toy_config


@pytest.mark.fast
def test_the_schedule_has_the_fewest_advances_and_leads_every_turn_to_its_state():
    for steps, snapshots in itertools.product(range(1, 65), range(1, 13)):
        plan, held = schedule(steps, snapshots), {}
        advances = steps - 1 + plan.counts.sum()  # the forward pass makes one more, for x(1)
        assert advances == fewest_advances(steps, snapshots)
        assert max(*plan.kept, *plan.stored) <= snapshots
        for state, slot in enumerate(plan.stored):
            held |= {slot: state} if slot != NOWHERE else {}
        for step in reversed(range(steps)):
            state = held[plan.slots[step]]
            for index in range(plan.offsets[step], plan.offsets[step] + plan.counts[step]):
                assert plan.advanced[index] == state
                state += 1
                if plan.kept[index] != NOWHERE:
                    held[plan.kept[index]] = state
            assert state == step


def loss_and_gradient(kind, field, solver, remat, snapshots=1, steps=7):
    sizes = dict(width=16, heads=2, mlp=16, num_steps=steps, solver=solver, remat=remat, snapshots=snapshots)
    adapters = {"lora_rank": 2} if kind == "discretized" else {}
    graph, params = split_model(lively_model(kind, field, **sizes, **adapters))
    tokens = jnp.arange(24).reshape(2, 12)

    def loss(params):
        model = nnx.merge(graph, params)
        return jnp.sin(model(tokens, weights_at(model))).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


CASES = [("diffeqformer", "gpt", name) for name in ("euler", "adams_bashforth", "reversible_euler")]
CASES += [("shared", "llama", "heun"), ("discretized", "gpt", "lie_trotter")]  # the last with adapters


@pytest.mark.parametrize("kind, field, solver", CASES)
def test_gradients_by_checkpointing_are_those_of_a_backward_pass_that_stores_everything(kind, field, solver):
    expected, gradient = loss_and_gradient(kind, field, solver, "none")
    for snapshots in (1, 3, 20) if solver == "euler" else (2,):
        loss, found = loss_and_gradient(kind, field, solver, "binomial", snapshots)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-9)


def relative_error(found, expected) -> float:
    """The distance of two trees, divided by the length of the second."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    distance = sum(float(np.sum((np.asarray(ours, np.float64) - np.asarray(theirs)) ** 2)) for ours, theirs in pairs)
    return (distance / sum(float(np.sum(np.asarray(theirs, np.float64) ** 2)) for _, theirs in pairs)) ** 0.5


@pytest.mark.parametrize(
    "kind, field, solver",
    [("diffeqformer", "gpt", "midpoint"), ("shared", "llama", "heun"), ("discretized", "gpt", "lie_trotter")],
)
def test_gradients_by_steps_back_are_those_of_a_backward_pass_that_stores_everything(kind, field, solver):
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


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, changes",
    [
        ((1, 1, 1), {"model__dropout": 0.3, "microbatches": 2, "model__dtype": "bfloat16"}),
        ((2, 2, 1), {"model__dropout": 0.3, "model__training_times": "shifted"}),
        ((1, 2, 2), {"field": "llama"}),
    ],
)
@pytest.mark.parametrize(
    "remat, solver",
    [("binomial", "euler"), pytest.param("reversible", "reversible_euler", marks=pytest.mark.slow)],
)
def test_training_is_the_same_on_meshes_with_dropout_and_accumulation(mesh, changes, remat, solver):
    """Masks and drawn times are those of the steps, however often a step is computed.

    After a step back, a state that is one rounding error off can be another number in bf16.
    """
    devices = make_mesh(mesh, jax.devices()[: math.prod(mesh)])
    changes = {"model__vocab_multiple": 16, "model__snapshots": 2, "model__solver": solver, **changes}
    ours, theirs = (run_steps(toy_config(**changes, model__remat=how), devices, 3)[2] for how in (remat, "step"))
    in_bf16 = remat == "reversible" and "model__dtype" in changes
    np.testing.assert_allclose(ours, theirs, rtol=2e-4 if in_bf16 else 2e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    "changes, stored",
    [
        ({"remat": "binomial", "snapshots": 5}, "[6,3,16,32]"),  # and that before the last step
        ({"remat": "reversible", "solver": "reversible_euler"}, "[3,16,32]"),
    ],
)
def test_no_more_states_are_stored(changes, stored):
    """Arrays of the compiled program that have the state's shape, with a leading axis."""
    graph, params = split_model(lively_model("diffeqformer", num_steps=36, **changes))
    tokens = jnp.ones((3, 16), jnp.int32)

    def loss(params):
        model = nnx.merge(graph, params)
        return model(tokens, weights_at(model)).sum()

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    assert f"f32{stored}" in text and not any(f"[{steps},3,16," in text for steps in (35, 36, 37, 72))


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


def test_a_model_that_steps_back_can_be_read_with_any_solver():
    config = toy_config(model__solver="reversible_euler", model__remat="reversible")
    model = lively_model("diffeqformer", solver="reversible_euler", remat="reversible")
    for name in ("euler", "reversible_heun"):
        other = with_solver(model, name, config.model)
        assert np.isfinite(other(jnp.arange(10).reshape(2, 5), weights_at(other))).all()
