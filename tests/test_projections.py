"""A train step whose gradient of P is a pair of factors is that of optax, with and without the Pallas kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diffeqformer.depth.depths import drawn_depth
from diffeqformer.depth.projection import sum_of_squares
from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.optimizer import decay_mask, make_optimizer
from diffeqformer.training.projections import Projections
from diffeqformer.training.step import Program, dropout_keys, training_grid
from diffeqformer.transformer import abstract_model, merge_trees
from helpers import ONE_DEVICE, first_state, run_steps, tokens_of, toy_config

SIZES = {
    "batch_size": 16, "optimizer__warmup_fraction": 0.0, "optimizer__epsilon": 1e-6, "model__vocab_multiple": 16,
    "model__time_embed_dim": 8, "model__width": 128, "model__mlp": 256, "optimizer__weight_decay": 10.0,
}  # fmt: skip


def steps_of_optax(config, mesh, steps: int) -> tuple[dict, list[float]]:
    """The state after some steps, with dP itself and optax alone, and the norms of the gradients."""
    program = Program(config, mesh)
    loss = ShardedLoss(program.graph, program.state_shapes["params"], program.mesh)
    optimizer = make_optimizer(config, program.trained(decay_mask(abstract_model(config), config.optimizer.decay)))

    @functools.partial(jax.jit, static_argnames="depth")
    def train_step(params, moments, tokens, step, depth):
        keys = dropout_keys(config.seed, step, len(tokens)) if config.model.dropout else None
        grid = training_grid(nnx.merge(program.graph, params), config.model.training_times, config.seed, step, depth)
        _, gradient = loss.value_and_grad(params, tokens, keys, config.microbatches, grid)
        updates, moments = optimizer.update(gradient, moments, program.trained(params))
        params = merge_trees(params, optax.apply_updates(program.trained(params), updates))
        return params, moments, optax.tree.norm(gradient)

    state = first_state(program)
    params, moments, norms = state["params"], state["optimizer"], []
    for step in range(steps):
        depth = drawn_depth(program.depths, config.seed, step)
        params, moments, norm = train_step(params, moments, tokens_of(step % 2, config), step, depth)
        norms.append(float(norm))
    return {"params": params, "optimizer": moments}, norms


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, shape, changes",
    [
        (
            "alternative",
            "gpt",
            (2, 2, 1),
            {"microbatches": 2, "model__training_times": "shifted", "optimizer__clip_norm": 1e-2},
        ),
        pytest.param(
            "diffeqformer",
            "llama",
            (2, 2, 2),
            {"model__width": 256, "model__training_depths": "2,3", "seed": 1, "optimizer__clip_norm": 0.0},
            marks=pytest.mark.slow,
        ),
        pytest.param("discretized", "gpt", (2, 2, 1), {"model__lora_rank": 2}, marks=pytest.mark.slow),
        pytest.param(
            "diffeqformer",
            "gpt",
            (2, 2, 1),
            {"microbatches": 2, "model__dtype": "bfloat16"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_three_steps_are_those_of_optax(kind, field, shape, changes, monkeypatch):
    """By XLA, by XLA as on accelerators (where the norm comes from Gram matrices), and by the kernels.

    A gpt's P doesn't decay, and a llama's does, by a decay that would show.

    Only one step where weights are bfloat16: the next one's may be rounded up instead of down.
    """
    config = toy_config(kind, field, **{**SIZES, **changes})
    mesh = make_mesh(shape, jax.devices()[: np.prod(shape)]) if shape else ONE_DEVICE
    steps = 1 if config.model.dtype == "bfloat16" else 3
    expected, norms = steps_of_optax(config, mesh, steps)
    for kernels, on_cpu in (("xla", True), ("xla", False), ("pallas", False)):
        config.kernels = kernels
        fixed = property(lambda _, value=on_cpu: value, lambda *_: None)
        monkeypatch.setattr(Projections, "on_cpu", fixed, raising=False)
        program, state, scalars = run_steps(config, mesh, steps)
        np.testing.assert_allclose(scalars[:, 1], norms, rtol=3e-6)
        if projections := program.loss.projections:  # none in a model with weights per layer
            assert projections.fused == (list(projections.shapes) if kernels == "pallas" else [])
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
        jax.tree.map(close, state["params"], expected["params"])
        jax.tree.map(assert_equal_moments, state["optimizer"], expected["optimizer"])


def assert_equal_moments(mine, theirs):
    """Up to a part of the largest."""
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * abs(np.asarray(theirs)).max())


def test_squares_are_summed_without_their_terms():
    """Also if h hardly varies and the gradients of different times cancel, where a plain Gram form is wrong."""
    generator = np.random.default_rng(0)
    d_kernel = generator.normal(size=(12, 16, 24))
    for h in (generator.normal(size=(12, 8)), 1 + 1e-3 * generator.normal(size=(12, 8))):
        for terms in (d_kernel, d_kernel - (1 - 1e-4) * d_kernel.mean(0)):
            expected = np.sum(np.einsum("te,tio->ieo", h, terms) ** 2)
            found = sum_of_squares(jnp.asarray(h, jnp.float32), jnp.asarray(terms, jnp.float32))
            assert float(found) == pytest.approx(expected, rel=1e-4)


def test_kernels_that_do_not_fit_are_not_taken():
    refused = r"^config.kernels: must be auto or xla .*\(.*qkv: E = 12 .*\), but it is 'pallas'"
    with pytest.raises(UserError, match=refused):
        Program(toy_config(kernels="pallas"), ONE_DEVICE)
    with pytest.raises(UserError, match="outputs = 64 isn't a multiple of 128"):  # of a device's part of 256
        Program(toy_config(kernels="pallas", **SIZES), make_mesh((1, 1, 4), jax.devices()[:4]))
    assert Program(toy_config(), ONE_DEVICE).loss.projections.description == "XLA"
    assert Program(toy_config("gpt"), ONE_DEVICE).loss.projections is None
    program = Program(toy_config(kernels="pallas", **SIZES), ONE_DEVICE)
    assert program.loss.projections.description == "Pallas, interpreted"
