"""Attention maps of every head and step, their rollout over the steps, and gradients for comparison.

@inproceedings{abnar2020quantifying,
  title={Quantifying Attention Flow in Transformers},
  author={Abnar, Samira and Zuidema, Willem},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2020}}
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from diffeqformer.fields import attention
from diffeqformer.fields.layers import Context
from diffeqformer.solvers import walk
from diffeqformer.transformer import Transformer, split_model, weights_at

MEAN_OF_HEADS = functools.partial(jnp.mean, axis=(0, 1))  # of one text's attention [1, H, S, S]


def probabilities(query: Float[Array, "B S H K"], key: Float[Array, "B S G K"]) -> Float[Array, "B H S S"]:
    """The causal attention from each token (rows) to each token (columns), fp32."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)


@functools.partial(jax.jit, static_argnames=("graph", "summary"))
def _maps(graph, params, weights, tokens, summary):
    model = nnx.merge(graph, params)
    solver = model.solver

    def body(state, step):
        layers, dt = weights.at_step(step, len(solver.nodes))
        seen = []

        def attend(query, key, value):
            seen.append(summary(probabilities(query, key)))
            return attention.plain(query, key, value)

        return solver.step(model.field, layers, state, dt, Context(attend=attend)), seen[0]

    state = solver.begin(model.embed(tokens, Context()), weights.step_sizes[0])
    return jax.lax.scan(body, state, jnp.arange(len(weights.step_sizes)))[1]


def maps(
    model: Transformer,
    tokens: Int[Array, "B S"],
    num_steps: int | None = None,
    summary: Callable[[Array], Array] = jnp.asarray,
) -> Array:
    """`summary` of each step's attention [B, H, S, S], stacked to [T, ...]; by default the attention itself.

    If the solver evaluates the attention several times in a step, the first evaluation is used.
    """
    return _maps(*split_model(model), weights_at(model, num_steps), tokens, summary)


def rollout(model: Transformer, tokens: Int[Array, "S"], num_steps: int | None = None) -> Float[np.ndarray, "S"]:
    """Attention rollout: the share of each token in the last token's state. The shares sum to 1.

    It assumes that every step keeps half of a state and takes the other half from what its heads attend to on average.
    """
    share = np.eye(len(tokens))[-1]
    for attended in np.asarray(maps(model, tokens[None], num_steps, MEAN_OF_HEADS), np.float64)[::-1]:
        share = (share + share @ attended) / 2
    return share


@functools.partial(jax.jit, static_argnames="graph")
def _input_gradients(graph, params, weights, tokens, target):
    model = nnx.merge(graph, params)

    def log_probability(x):
        last = walk(model.solver, model.field, weights, x, Context())
        return jax.nn.log_softmax(model.head(last[:, -1:]))[0, 0, target]

    gradient = jax.grad(log_probability)(model.embed(tokens[None], Context()))
    return jnp.linalg.norm(gradient[0], axis=-1)


def input_gradients(
    model: Transformer, tokens: Int[Array, "S"], target: int, num_steps: int | None = None
) -> Float[np.ndarray, "S"]:
    """The length of the gradient of the next id's log p(target | tokens) with respect to each token's x(0)."""
    return np.asarray(_input_gradients(*split_model(model), weights_at(model, num_steps), tokens, target))
