"""The pure functions that a run compiles: initial state, train step, weights, evaluation.

The state is a plain tree, {"params": ..., "optimizer": ..., "step": int32}. It is all that a checkpoint needs to hold,
since data and dropout are functions of the seed and the step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, Key
from ml_collections import ConfigDict

from diffeqformer.depth.depths import chunk_lengths, trained_depths
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.fields.attention import fastest
from diffeqformer.parallel.memory import placed
from diffeqformer.parallel.sharding import EVERYWHERE, partition, shardings
from diffeqformer.training.chunks import ChunkedLoss
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.optimizer import Optimizer, decay_mask
from diffeqformer.training.teacher import Teacher
from diffeqformer.transformer import (
    Transformer,
    abstract_model,
    divide_copies,
    merge_trees,
    new_model,
    random_key,
    split_model,
)


class Shardings(NamedTuple):
    """How the arrays of a run are divided among its devices.

    state: a tree like the state
    weights: of all steps of depth
    batch: of tokens [B, S], and of which windows are valid [B, 1]
    """

    state: dict
    weights: StackedWeights
    batch: NamedSharding


def dropout_keys(seed: int, step: Int[Array, ""], batch_size: int) -> Key[Array, "B"]:
    """One key for each example of the global batch, from (seed, step, index of the example)."""
    key = jax.random.fold_in(random_key(seed, "dropout"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch_size))


def training_grid(model: Transformer, how: str, seed: int, step: Int[Array, ""], num_steps: int | None = None) -> Grid:
    """The grid of one training step, at fixed or random times (`diffeqformer.depth.grid.TRAINING_TIMES`)."""
    grid = model.grid(num_steps)
    if how == "fixed":
        return grid
    key = jax.random.fold_in(random_key(seed, "times"), step)
    ends = jnp.asarray(grid.ends, jnp.float32) - float(grid.ends[0]) * jax.random.uniform(key, (), jnp.float32)
    return Grid.of(jnp.append(ends, jnp.float32(grid.ends[-1])), model.solver.nodes, grid.span)


def make_init(config: ConfigDict, loss: ShardedLoss, optimizer: Optimizer, divided: Shardings) -> Callable:
    """The initial state. `base`: parameters that aren't initialised at random (donated), or None."""

    def init(base=None):
        params = merge_trees(nnx.to_pure_dict(nnx.state(new_model(config), nnx.Param)), base or {})
        moments = optimizer.whole.init(loss.trained_and_frozen(params)[0])
        return {"params": params, "optimizer": moments, "step": jnp.zeros((), jnp.int32)}

    return jax.jit(init, out_shardings=divided.state, donate_argnums=0)


def make_train_step(config: ConfigDict, loss: ShardedLoss, optimizer: Optimizer, divided: Shardings) -> Callable:
    """One update: the state (donated) and tokens [B, S] -> the state after it, and its scalars.

    It is compiled for each `num_steps` of depth when that is first needed; None: the config's. A teacher's state
    follows, if there is a teacher.
    """

    def train_step(state, tokens, num_steps=None, teacher_state=None):
        params, step = state["params"], state["step"]
        keys = dropout_keys(config.seed, step, len(tokens)) if config.model.dropout else None
        grid = training_grid(nnx.merge(loss.graph, params), config.model.training_times, config.seed, step, num_steps)
        mean, grads = loss.value_and_grad(params, tokens, keys, config.microbatches, grid, teacher_state)
        trained, _ = loss.trained_and_frozen(params)
        trained, moments, norm = optimizer.update(grads, state["optimizer"], trained)
        scalars = {"loss": mean, "gradient_norm": norm, "learning_rate": optimizer.schedule(step)}
        return {"params": merge_trees(params, trained), "optimizer": moments, "step": step + 1}, scalars

    of_teacher = [loss.teacher.shardings] if loss.teacher else []
    return jax.jit(
        train_step,
        in_shardings=(divided.state, divided.batch, *of_teacher),
        out_shardings=(divided.state, None),
        donate_argnums=0,
        static_argnames="num_steps",
    )


def make_weights(loss: ShardedLoss, divided: Shardings) -> Callable:
    """What `evaluate` takes as weights for a number of steps of depth; None: the config's.

    They are the stacked weights; or only the steps, by which each batch generates weights chunk by chunk
    (`model.generate_chunk`).
    """
    chunked = isinstance(loss, ChunkedLoss)

    def weights(params, num_steps):
        model = nnx.merge(loss.graph, params)
        grid = model.grid(num_steps)
        return jax.tree.map(np.asarray, loss.chunked(model, grid)) if chunked else model.weights(grid)

    if chunked:
        return weights
    of_params = (divided.state["params"],)
    return jax.jit(weights, in_shardings=of_params, out_shardings=divided.weights, static_argnames="num_steps")


def make_evaluate(config: ConfigDict, loss: ShardedLoss, divided: Shardings) -> Callable:
    """Parameters, weights, tokens [B, S], valid [B, 1] -> clu Average of the loss over the targets of valid rows."""

    def evaluate(params, weights, tokens, valid):
        total, count = loss.sum_and_count(params, weights, tokens, valid, config.microbatches)
        return metrics.Average(total=total, count=count)

    return jax.jit(evaluate, in_shardings=(divided.state["params"], None, divided.batch, divided.batch))


class Program:
    """The functions of one run on one mesh, each compiled at its first call, and what they are made of.

    depths: the numbers of steps of depth in training, with their shares of the train steps
    graph: the model's structure, to be merged with `state["params"]`
    mesh: the devices; copies of a generator have a place on its axis `generator`
    loss, optimizer: what a train step differentiates, and what updates the parameters
    state_shapes, teacher_shapes: shapes, types and shardings of the state, and of a teacher's, if there is one
    tokens: the shape, type and sharding of a batch
    init, train_step, weights, evaluate: of `make_init` and so on

    Args:
        attention: causal attention and its description for the log; by default the fastest for the mesh's devices.
        teacher: the config of a model whose distributions this one learns, too (`config.teacher_weight`).
    """

    def __init__(
        self, config, mesh: Mesh, attention: tuple[Callable, str] | None = None, teacher: ConfigDict | None = None
    ):
        model = abstract_model(config)
        self.config, self.mesh, self.config_of_teacher = config, divide_copies(model, mesh), teacher
        self.depths = trained_depths(config.model)
        self.graph, params = split_model(model)
        attend, self.attention = attention or fastest(
            mesh.devices.flat[0], config.model.dtype, config.sequence_length, model.field.head_width
        )
        teacher = teacher and Teacher(teacher, self.mesh, config.teacher_weight)
        kind, kernels = (ChunkedLoss, None) if config.model.generate_chunk else (ShardedLoss, config.kernels)
        self.loss = loss = kind(self.graph, params, self.mesh, attend, kernels, teacher)
        of_params, everywhere = shardings(self.mesh, loss.param_specs), NamedSharding(self.mesh, EVERYWHERE)
        trained, of_trained, decays = (
            loss.trained_and_frozen(tree)[0] for tree in (params, of_params, decay_mask(model, config.optimizer.decay))
        )
        self.optimizer = Optimizer(config, decays, loss.projections, of_trained)
        moments = jax.eval_shape(self.optimizer.whole.init, trained)
        of_moments = optax.tree_map_params(
            self.optimizer.whole,
            lambda leaf, place: leaf if isinstance(leaf, optax.MaskedNode) else place,
            moments,
            of_trained,
            transform_non_params=lambda _: everywhere,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
        of_layers = shardings(self.mesh, loss.layer_specs)
        self.shardings = Shardings(
            {"params": of_params, "optimizer": of_moments, "step": everywhere},
            StackedWeights(of_layers, everywhere, model.depth.constant, model.dtype),
            NamedSharding(self.mesh, partition(("batch", None))),
        )
        shapes = {"params": params, "optimizer": moments, "step": jax.ShapeDtypeStruct((), jnp.int32)}
        self.state_shapes = placed(shapes, self.shardings.state)
        self.teacher_shapes = (teacher.shapes,) if teacher else ()
        batch = config.batch_size, config.sequence_length
        self.tokens = jax.ShapeDtypeStruct(batch, jnp.int32, sharding=self.shardings.batch)
        self.init = make_init(config, loss, self.optimizer, self.shardings)
        self.train_step = make_train_step(config, loss, self.optimizer, self.shardings)
        self.weights = make_weights(loss, self.shardings)
        self.evaluate = make_evaluate(config, loss, self.shardings)

    def changed(self, config: ConfigDict) -> "Program":
        """The program of another config, with the same devices, attention and teacher."""
        return Program(config, self.mesh, (self.loss.attend, self.attention), self.config_of_teacher)

    def weights_shapes(self, num_steps: int | None) -> StackedWeights:
        """The shapes and shardings of `weights`, unless these are made in chunks."""
        return placed(jax.eval_shape(self.weights, self.state_shapes["params"], num_steps), self.shardings.weights)

    def describe(self) -> str:
        """Its mesh, and what computes attention and the generator's products, for the log."""
        sizes, projections = self.mesh.shape, self.loss.projections
        parts = f" (generator in {sizes['generator']} parts)" if sizes["generator"] > 1 else ""
        mesh = f"data {sizes['data'] * sizes['generator']}{parts}, fsdp {sizes['fsdp']}, tensor {sizes['tensor']}"
        generator = f"; generator: {projections.description}" if projections else ""
        if self.config.model.generate_chunk:
            lengths = sorted(set(chunk_lengths(self.config.model).values()))
            generator = f"; generator: XLA, {' or '.join(map(str, lengths))} steps at a time"
        return f"mesh: {mesh}; attention: {self.attention}{generator}"
