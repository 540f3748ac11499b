"""A model's weights at the times of one grid, as a model without a hypernetwork."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from diffeqformer.checkpoints.stored_arrays import StoredArray
from diffeqformer.console.terminal import show_progress
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import merge
from diffeqformer.depth.weights import in_type
from diffeqformer.fields.layers import multiplying
from diffeqformer.parallel.memory import bytes_of, check_enough, free_on_host
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, Path, Transformer, abstract_model, split_model


def discretized_config(config: ConfigDict, num_steps: int, dtype: str) -> ConfigDict:
    """The config of the model with `num_steps` steps, computed in `dtype`, that stores the generated weights.

    It keeps the solver of training, unless that solver needs weights at several times per step. Then it uses Euler.
    """
    config = config.copy_and_resolve_references()
    if config.model.left_out and num_steps != config.model.num_steps:
        config.model.update(left_out="", training_depths="")
    config.model.update(num_steps=num_steps, dtype=dtype, lora_rank=0)
    if MODELS[config.model.kind].weights.continuous:
        config.model.update(kind="discretized", training_times="fixed", training_depths="", generate_chunk=0)
        if config.model.solver not in MODELS["discretized"].solvers(unit_steps=not config.model.span):
            config.model.solver = "euler"
    if config.model.remat == "reversible" and not SOLVERS[config.model.solver].reversible:
        config.model.remat = "step"
    return config


@functools.partial(jax.jit, static_argnames=("graph", "num_steps", "dtype", "solver"))
def discretized_params(graph: nnx.GraphDef, params: dict, num_steps: int, dtype: jnp.dtype, solver: str) -> dict:
    """The parameters of the model of `discretize`, from those of a model that is split."""
    model = nnx.merge(graph, params)
    made = {name: value.astype(dtype) for name, value in params.items() if name not in ("depth", "final_norm")}
    made |= in_type({"final_norm": params["final_norm"]}, dtype)
    ends = tuple(model.grid(num_steps).ends)
    return {**made, "depth": {"layers": stored_layers(*split_model(model.depth), ends, solver, dtype)}}


@functools.partial(jax.jit, static_argnames=("graph", "ends", "solver", "dtype"))
def stored_layers(
    graph: nnx.GraphDef, params: dict, ends: tuple[float, ...], solver: str, dtype: jnp.dtype
) -> dict[str, dict[str, Float[Array, "..."]]]:
    """The layers of depth weights that are split, as a discretized model stores them. Adapters are merged."""
    layers = nnx.merge(graph, params)(Grid.of(np.array(ends), SOLVERS[solver].nodes))
    with multiplying("highest"):
        return in_type(merge(layers), dtype)


def discretize(model: Transformer, config: ConfigDict, num_steps: int, dtype: str) -> Transformer:
    """The model of `discretized_config` that computes the same as `model` in `num_steps` steps, in `dtype`.

    If the model's solver needs weights at several times of a step, it computes the same as `model` by Euler's method.
    Kernels, biases, embeddings and head are rounded to `dtype`; norms stay in fp32.
    """
    target = discretized_config(config, num_steps, dtype).model
    params = discretized_params(*split_model(model), num_steps, jnp.dtype(dtype), target.solver)
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Transformer(target, nnx.Rngs(0)))), params)


def discretized_arrays(config: ConfigDict, stored: dict[Path, StoredArray], num_steps: int, dtype: str) -> dict:
    """The parameters of `discretize`, from arrays on disk. Beside them, memory holds what one layer is made from."""
    model, solver = abstract_model(config), discretized_config(config, num_steps, dtype).model.solver
    shapes = jax.eval_shape(discretized_params, *split_model(model), num_steps, jnp.dtype(dtype), solver)
    remedy = "take fewer with --num_steps, or a machine with more memory"
    check_enough(f"--num_steps: the weights of {num_steps} steps", bytes_of(shapes), free_on_host(), remedy)
    how = {"ends": tuple(model.grid(num_steps).ends), "solver": solver, "dtype": jnp.dtype(dtype)}
    names, made, show = list(model.field.layers()), {}, show_progress("weights", "layers")
    for path, leaf in traverse_util.flatten_dict(shapes).items():
        if path[0] != "depth":
            made[path] = stored[path].whole().astype(leaf.dtype)
    for done, name in enumerate(names, 1):
        depth = nnx.merge(*nnx.split(model.depth))
        depth.layers = nnx.Dict(layer=depth.layers[name])  # equal layers have equal structures, which compile once
        graph, params = split_model(depth)
        read = {
            path: stored["depth", *(name if key == "layer" else key for key in path)].whole()
            for path in traverse_util.flatten_dict(params)
        }
        weights = jax.device_get(stored_layers(graph, traverse_util.unflatten_dict(read), **how)["layer"])
        made |= {("depth", "layers", name, leaf): array for leaf, array in weights.items()}
        show(done, len(names))
    return traverse_util.unflatten_dict(made)
