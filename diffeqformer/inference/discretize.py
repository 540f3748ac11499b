"""A model's weights at the times of one grid, as a model without a hypernetwork."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import merge
from diffeqformer.depth.weights import in_type
from diffeqformer.fields.layers import multiplying
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, Transformer, split_model


def discretized_config(config: ConfigDict, num_steps: int, dtype: str) -> ConfigDict:
    """The config of the model with `num_steps` steps, computed in `dtype`, that stores the generated weights.

    It keeps the solver of training, unless that solver needs weights at several times per step. Then it uses Euler.
    """
    config = config.copy_and_resolve_references()
    config.model.update(num_steps=num_steps, dtype=dtype, lora_rank=0)
    if MODELS[config.model.kind].weights.generated:
        config.model.update(kind="discretized", training_times="fixed", training_depths="", step_features=0)
        config.model.generator_precision = "default"
        if config.model.solver not in MODELS["discretized"].solvers():
            config.model.solver = "euler"
    return config


@functools.partial(jax.jit, static_argnames=("graph", "num_steps", "dtype", "solver"))
def discretized_params(graph: nnx.GraphDef, params: dict, num_steps: int, dtype: jnp.dtype, solver: str) -> dict:
    """The parameters of the model of `discretize`, from those of a model that is split."""
    model = nnx.merge(graph, params)
    layers = model.depth(Grid.of(model.grid(num_steps).ends, SOLVERS[solver].nodes))
    others = {name: value for name, value in params.items() if name not in ("depth", "final_norm")}
    with multiplying(model.precision):
        layers = merge(layers)
    return {
        **{name: value.astype(dtype) for name, value in others.items()},  # embeddings and head
        **in_type({"final_norm": params["final_norm"]}, dtype),
        "depth": {"layers": in_type(layers, dtype)},
    }


def discretize(model: Transformer, config: ConfigDict, num_steps: int, dtype: str) -> Transformer:
    """The model of `discretized_config` that computes the same as `model` in `num_steps` steps, in `dtype`.

    Kernels, biases, embeddings and head are rounded to `dtype`; norms stay in fp32.

    Raises:
        UserError: if the model can't take that number of steps.
    """
    target = discretized_config(config, num_steps, dtype).model
    params = discretized_params(*split_model(model), num_steps, jnp.dtype(dtype), target.solver)
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Transformer(target, nnx.Rngs(0)))), params)
