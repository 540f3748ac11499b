"""Solvers: the order of each, agreement with the models, and which models can use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer import reference
from diffeqformer.depth.generated import time_features
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.fields.field import VectorField
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import ONE_STEP, SOLVERS, walk
from diffeqformer.training.step import Program, training_grid
from diffeqformer.transformer import split_model, weights_at
from helpers import ONE_DEVICE, first_state, lively_model, tokens_of, toy_config


class ReferenceField(VectorField):
    """The vector field of `reference`, in the type of its weights."""

    def __init__(self, heads: int):
        self.heads = heads

    def attention(self, layers, x, context):
        return jax.vmap(lambda x: reference.gpt_attention(layers, x, self.heads))(x)

    def feed_forward(self, layers, x, context):
        return jax.vmap(lambda x: reference.gpt_feed_forward(layers, x))(x)

    def __call__(self, layers, x, context):
        return self.attention(layers, x, context) + self.feed_forward(layers, x, context)


def float64_weights(depth, times, nodes) -> StackedWeights:
    """Of a hypernetwork with 8 frequencies of up to 10 radians, smooth in time."""
    features = np.stack([reference.time_features(t, 8, 10.0) for t in Grid.of(times, nodes).times])
    layers = jax.vmap(lambda e: reference.generated_block(depth, e))(jnp.asarray(features))
    return StackedWeights(layers, jnp.asarray(np.diff(times, prepend=0.0)))


SIZES = dict(width=16, heads=2, mlp=16, time_embed_dim=4, sinusoidal_dim=8, time_frequency=10.0)


def uneven(number: int) -> np.ndarray:
    """The ends of the given (even) number of steps, which are alternately long and short."""
    return np.repeat(np.arange(number // 2) * 2 / number, 2) + np.tile([1.4 / number, 2 / number], number // 2)


def solve(solver, depth, x, times):
    @jax.jit
    def solution(depth, x):
        weights = float64_weights(depth, times, SOLVERS[solver].nodes)
        return walk(SOLVERS[solver], ReferenceField(heads=2), weights, x, Context())

    return np.asarray(solution(depth, x))


@pytest.fixture(scope="module")
def problem():
    """The parameters of a hypernetwork and a state at time 0 and, by two runs of RK4, at time 1; all in float64."""
    params = split_model(lively_model("diffeqformer", **SIZES))[1]
    with jax.enable_x64(True):
        depth = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["depth"])
        x = np.random.RandomState(0).standard_normal((1, 4, 16))
        fine, finer = (solve("rk4", depth, x, np.arange(1, n + 1) / n) for n in (100, 200))
    assert np.abs(fine - finer).max() < 3e-8
    return depth, x, finer + (finer - fine) / 15


@pytest.mark.parametrize("name", SOLVERS)
def test_each_solver_converges_with_its_order(name, problem):
    depth, x, exact = problem
    numbers = (32, 64, 128)
    with jax.enable_x64(True):
        errors = [np.abs(solve(name, depth, x, uneven(number)) - exact).max() for number in numbers]
    slope = -np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    assert slope == pytest.approx(SOLVERS[name].order, abs=0.25), errors


@pytest.mark.long
def test_models_walk_as_in_float64():
    """On a coarse grid, where methods differ. This shows that each takes its own weights at its own times."""
    ours, expected, times = {}, {}, np.arange(1, 5) / 4
    for name in (*ONE_STEP, "adams_bashforth", "reversible_midpoint"):
        model = lively_model("diffeqformer", solver=name, **SIZES)
        start, *_, ours[name] = model.trajectory(jnp.arange(10).reshape(2, 5), weights_at(model, 4))
        params = split_model(model)[1]
        with jax.enable_x64(True):
            depth = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["depth"])
            expected[name] = solve(name, depth, np.asarray(start, np.float64), times)
    for name in ours:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(ours[name], expected[name], atol=1e-5 * scale)
        assert sum(np.abs(expected[name] - other).max() < 1e-3 * scale for other in expected.values()) == 1  # itself


def test_shifted_times_are_the_grid_with_parts_of_a_step_at_its_ends():
    model, shifts = lively_model("diffeqformer", solver="heun"), []
    for step in range(100):
        grid = training_grid(model, "shifted", 0, jnp.int32(step))
        ends, sizes = np.asarray(grid.ends), np.asarray(grid.step_sizes)
        assert len(ends) == 7 and ends[-1] == 1 and np.all(sizes >= 0)
        np.testing.assert_allclose(sizes[1:6], 1 / 6, atol=1e-6)
        np.testing.assert_allclose(grid.times, np.stack([ends - sizes, ends], 1).ravel(), atol=1e-6)
        shifts.append(6 * sizes[-1])
    assert 0.4 < np.mean(shifts) < 0.6 and np.min(shifts) < 0.1 and np.max(shifts) > 0.9
    on_host = time_features(np.asarray(grid.times), 8, 1000.0)
    np.testing.assert_allclose(time_features(grid.times, 8, 1000.0), on_host, atol=2e-4)


@pytest.mark.long
def test_a_training_step_takes_the_weights_of_its_times():
    config = toy_config(model__training_times="shifted", model__num_steps=2, optimizer__warmup_fraction=0.0, seed=3)
    program, losses, tokens = Program(config, ONE_DEVICE), [], jnp.asarray(tokens_of(0, config))
    plain = jax.jit(lambda params, weights: reference.loss(nnx.merge(program.graph, params)(tokens, weights), tokens))
    for step in range(3):
        state = first_state(program) | {"step": jnp.int32(step)}
        model = nnx.merge(program.graph, state["params"])
        grid = training_grid(model, "shifted", config.seed, jnp.int32(step))
        weights = model.weights(Grid(np.asarray(grid.ends), np.asarray(grid.times)))
        expected = plain(state["params"], weights)
        losses.append(float(program.train_step(state, tokens)[1]["loss"]))
        assert losses[-1] == pytest.approx(float(expected), rel=1e-5)
    assert len(set(losses)) == 3
