"""Lyapunov sensitivity: the authors' numbers, and full Jacobians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import authors
from diffeqformer.analysis import flow, lyapunov
from diffeqformer.depth import generated
from diffeqformer.fields.layers import Context
from diffeqformer.transformer import weights_at, weights_of
from helpers import lively_model, normal

TOKENS = jnp.arange(3, 9)


@pytest.mark.parametrize("name, last", [("last", 15), ("eighth", 8)])
def test_the_authors_pairing_gives_the_authors_numbers(name, last, monkeypatch):
    """Given their time features, whose rounding moves a number by 3e-5. Exponents of tokens after the output are 0."""
    arrays, (reference, params, _) = np.load(authors.DATA / "authors_lyapunov.npz"), authors.load("diffeqformer", "gpt")
    model = authors.build(authors.model_config("diffeqformer", "gpt"), params)
    rows = np.concatenate([model.depth.features(np.zeros(1)), reference["out.time_embed"]])  # at 0, 1/6, ..., 1
    monkeypatch.setattr(generated, "time_features", lambda times, *_: rows[np.rint(6 * times).astype(int)])
    weights_of.clear_cache()  # other tests compile it with our own features
    tokens = jnp.asarray(arrays["tokens"][: last + 1])
    found = lyapunov.exponents(model, tokens, published=True)
    np.testing.assert_allclose(found, arrays[name][:, : last + 1], atol=1e-5)
    assert not arrays[name][:, last + 1 :].any()
    assert np.abs(lyapunov.exponents(model, tokens) - found).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("kind, field, solver", [("diffeqformer", "llama", "euler"), ("shared", "gpt", "heun")])
def test_exponents_and_derivatives_are_those_of_full_jacobians(kind, field, solver, monkeypatch):
    model = lively_model(kind, field, num_steps=3, width=16, heads=2, mlp=16, solver=solver)
    weights, nodes = weights_at(model), len(model.solver.nodes)
    states = model.trajectory(TOKENS[None], weights)[:, 0]
    tangents, whole, added = np.tile(np.eye(16), (6, 1, 1)), np.eye(6 * 16), []

    def step(x, layers, dt):
        return model.solver.step(model.field, layers, x[None], dt, Context())[0]

    jacobian_of = jax.jit(jax.jacfwd(step))
    for number in range(3):
        layers, dt = weights.at_step(number, nodes)
        jacobian = np.asarray(jacobian_of(states[number], layers, dt), np.float64)  # [S, D, S, D]
        whole = jacobian.reshape(6 * 16, 6 * 16) @ whole
        blocks = jacobian[-1].swapaxes(0, 1)  # of the last token, by input token
        blocks[:-1] += np.eye(16)  # the last token's block has its identity already
        tangents, triangle = np.linalg.qr(blocks @ tangents)
        added.append(np.log(np.abs(np.diagonal(triangle, axis1=1, axis2=2))))
    np.testing.assert_allclose(lyapunov.exponents(model, TOKENS), added, atol=2e-3)
    expected = whole.reshape(6, 16, 6, 16)[-1].swapaxes(0, 1)
    with monkeypatch.context() as changed:
        changed.setattr(lyapunov, "CHUNK", 6)  # and a rest of 4 rows
        found = lyapunov.total_derivative(model, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    singular = np.log(np.linalg.svd(whole, compute_uv=False))
    for count in (5, 30):
        np.testing.assert_allclose(flow.flow_exponents(model, TOKENS, count=count), singular[:count], atol=1e-4)


def test_the_total_derivative_of_many_tokens_is_that_of_forward_mode():
    """XLA of jaxlib 0.10 for CPUs gets it wrong if rows are pulled back together."""
    model, tokens = lively_model("diffeqformer", num_steps=2, width=64, mlp=16, max_length=64), jnp.arange(64)
    weights, x = weights_at(model), model.embed(tokens[None], Context())[0]
    tangent = jnp.asarray(normal(np.random.RandomState(0), x.shape))
    expected = flow.push_forward(model.solver, model.field, weights, x, tangent)[-1]
    found = np.einsum("soi,si->o", lyapunov.total_derivative(model, tokens), tangent)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
