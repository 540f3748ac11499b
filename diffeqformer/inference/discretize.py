"""A model's weights at the times of one grid, as a model without a hypernetwork."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from ml_collections import ConfigDict

from diffeqformer.checkpoints.stored_arrays import BYTES_AT_ONCE, StoredArray
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import merge
from diffeqformer.depth.weights import DepthWeights, in_type, weight_axes
from diffeqformer.fields.layers import Linear, Norm, multiplying
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, Path, Transformer, abstract_model, parameter_metadata, split_model


def discretized_config(config: ConfigDict, num_steps: int, dtype: str) -> ConfigDict:
    """The config of the model with `num_steps` steps, computed in `dtype`, that stores the generated weights.

    It keeps the solver of training, unless that solver needs weights at several times per step. Then it uses Euler.
    """
    config = config.copy_and_resolve_references()
    if config.model.left_out and num_steps != config.model.num_steps:
        config.model.update(left_out="", training_depths="")
    config.model.update(num_steps=num_steps, dtype=dtype, lora_rank=0)
    if MODELS[config.model.kind].weights.generated:
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
    grid = Grid.of(model.grid(num_steps).ends, SOLVERS[solver].nodes)
    made = {name: value.astype(dtype) for name, value in params.items() if name not in ("depth", "final_norm")}
    made |= in_type({"final_norm": params["final_norm"]}, dtype)
    return {**made, "depth": {"layers": stored_layers(model.depth, grid, dtype)}}


def stored_layers(depth: DepthWeights, grid: Grid, dtype: jnp.dtype) -> dict:
    """The weights of every layer at the times of a grid, as a discretized model stores them. Adapters are merged."""
    layers = depth(grid)
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


def discretized_arrays(
    config: ConfigDict,
    stored: dict[Path, StoredArray],
    num_steps: int,
    dtype: str,
    progress: Callable[[int, int], None],
    bytes_at_once: int = BYTES_AT_ONCE,
) -> Iterator[tuple[Path, np.ndarray]]:
    """The parameters of `discretize` with their paths, one layer after the other, from arrays on disk.

    In memory are, at a time, the weights of one layer at all times, a block of its parameters, and those of its
    parameters that are no larger than a block.
    """
    model, solver = abstract_model(config), discretized_config(config, num_steps, dtype).model.solver
    shapes = jax.eval_shape(discretized_params, *split_model(model), num_steps, jnp.dtype(dtype), solver)
    leaves = traverse_util.flatten_dict(shapes)
    how = {"ends": tuple(model.grid(num_steps).ends), "nodes": SOLVERS[solver].nodes, "dtype": jnp.dtype(dtype)}
    return _arrays(model, stored, leaves, how, progress, bytes_at_once)


def _arrays(model: Transformer, stored, leaves, how, progress, bytes_at_once) -> Iterator[tuple[Path, np.ndarray]]:
    for path, leaf in leaves.items():
        if path[0] != "depth":
            yield path, np.asarray(jnp.asarray(stored[path][...]).astype(leaf.dtype))
    layers = model.field.layers()
    for done, (name, layer) in enumerate(layers.items(), 1):
        depth = nnx.merge(*nnx.split(model.depth))
        depth.layers = nnx.Dict(layer=depth.layers[name])  # equal layers have equal structures, which compile once
        graph, axes = split_model(depth)[0], traverse_util.flatten_dict(parameter_metadata(depth, "axes"))
        arrays = {path: stored["depth", *(name if key == "layer" else key for key in path)] for path in axes}
        blocks = _blocks(layer, arrays, axes, bytes_at_once)
        arrays |= {path: array[...] for path, array in arrays.items() if array.nbytes <= bytes_at_once}
        weights = {path: leaf for path, leaf in leaves.items() if path[:3] == ("depth", "layers", name)}
        weights = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in weights.items()}
        for block in blocks:
            params = {path: array[_index(axes[path], block)] for path, array in arrays.items()}
            made = _weights_of_layer(graph, traverse_util.unflatten_dict(params), **how)
            for path, array in weights.items():
                array[..., *_index(weight_axes(layer, path[-1]), block)] = made[path[-1]]
            del params, made, array  # not kept while the next are read
        progress(done, len(layers))
        del arrays
        while weights:
            yield weights.popitem()  # what has been taken isn't kept


def _blocks(
    layer: Linear | Norm, arrays: dict[Path, StoredArray], axes: dict[Path, tuple[str | None, ...]], bytes_at_once: int
) -> list[dict[str, slice]]:
    """What a layer is made from at a time: parts of its kernel's axes, by the blocks of its largest array on disk."""
    cut = layer.axes if isinstance(layer, Linear) else ()
    largest = max((path for path in axes if {*cut} <= {*axes[path]}), key=lambda path: arrays[path].nbytes)
    places = tuple(axes[largest].index(axis) for axis in cut)
    return [
        {axis: block[place] for axis, place in zip(cut, places)}
        for block in arrays[largest].blocks(bytes_at_once, places)
    ]


def _index(axes: tuple[str | None, ...], block: dict[str, slice]) -> tuple[slice, ...]:
    return tuple(block.get(axis, slice(None)) for axis in axes)


@functools.partial(jax.jit, static_argnames=("graph", "ends", "nodes", "dtype"))
def _weights_of_layer(
    graph: nnx.GraphDef, params: dict, ends: tuple[float, ...], nodes: tuple[float, ...], dtype: jnp.dtype
) -> dict:
    """`stored_layers` for depth weights that have only one layer."""
    return stored_layers(nnx.merge(graph, params), Grid.of(np.array(ends), nodes), dtype)["layer"]
