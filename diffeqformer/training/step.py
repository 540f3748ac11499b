"""The pure functions that a run compiles: initial state, train step, weights, evaluation.

The state is a plain tree, {"params": ..., "optimizer": ..., "step": int32}. It is all that a checkpoint needs to hold,
since data and dropout are functions of the seed and the step.
"""

from collections.abc import Callable

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
from diffeqformer.parallel.mesh import divide_generator
from diffeqformer.parallel.sharding import EVERYWHERE, identity, partition, shardings
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


class Program:
    """The compiled functions of one run on one mesh. Each is compiled at its first call.

    depths: the numbers of steps of depth in training, with their shares of the train steps
    graph: the model's structure, to be merged with `state["params"]`
    mesh: the devices; copies of a generator have a place on its axis `generator`
    loss, optimizer: what a train step differentiates, and what updates the parameters
    state_shapes: shapes, types and shardings of the state
    teacher_shapes: those of a teacher's state, if there is a teacher
    init(base) -> state; base: parameters that aren't initialised at random (donated), or None
    train_step(state, tokens [B, S], num_steps) -> (state, scalars); the input state is donated; num_steps: of depth,
        by default as in the config; each number is compiled when it is first needed; a teacher's state
        follows, if there is one
    weights(params, num_steps) -> the stacked weights for a number of steps; None: the config's
    for_evaluation(params, num_steps) -> what `evaluate` takes as weights: these; or only the steps, by which each batch
        generates weights chunk by chunk (`model.generate_chunk`)
    evaluate(params, weights, tokens [B, S], valid [B, 1]) -> clu Average of the loss over the targets of valid rows

    Args:
        attention: causal attention and its description for the log; by default the fastest for the mesh's devices.
        teacher: the config of a model whose distributions this one learns, too (`config.teacher_weight`).
    """

    def __init__(
        self, config, mesh: Mesh, attention: tuple[Callable, str] | None = None, teacher: ConfigDict | None = None
    ):
        model = abstract_model(config)
        self.depths = trained_depths(config.model)
        self.config, self.mesh = config, divide_copies(model, mesh)
        self.graph, abstract = split_model(model)
        attend, self.attention = attention or fastest(
            mesh.devices.flat[0], config.model.dtype, config.sequence_length, model.field.head_width
        )
        chunk, self.config_of_teacher = config.model.generate_chunk, teacher
        self.teacher = teacher and Teacher(teacher, self.mesh, config.teacher_weight)
        loss, kernels = (ChunkedLoss, None) if chunk else (ShardedLoss, config.kernels)
        self.loss = loss(self.graph, abstract, self.mesh, attend, kernels, self.teacher)
        of_params, everywhere = shardings(self.mesh, self.loss.param_specs), NamedSharding(self.mesh, EVERYWHERE)
        decays = self.trained(decay_mask(model, config.optimizer.decay))
        self.optimizer = Optimizer(config, decays, self.loss.projections, self.trained(of_params))
        moments = jax.eval_shape(self.optimizer.whole.init, self.trained(abstract))
        of_moments = optax.tree_map_params(
            self.optimizer.whole,
            lambda leaf, place: leaf if isinstance(leaf, optax.MaskedNode) else place,
            moments,
            self.trained(of_params),
            transform_non_params=lambda _: everywhere,
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
        self.state_shardings = {"params": of_params, "optimizer": of_moments, "step": everywhere}
        shapes = {"params": abstract, "optimizer": moments, "step": jax.ShapeDtypeStruct((), jnp.int32)}
        self.state_shapes = placed(shapes, self.state_shardings)
        self.batch_sharding = by_example = NamedSharding(self.mesh, partition(("batch", None)))
        self.init = jax.jit(self._init, out_shardings=self.state_shardings, donate_argnums=0)
        of_teacher = [self.teacher.shardings] if self.teacher else []
        self.teacher_shapes = (self.teacher.shapes,) if self.teacher else ()
        self.train_step = jax.jit(
            self._train_step,
            in_shardings=(self.state_shardings, by_example, *of_teacher),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
            static_argnames="num_steps",
        )
        self.weights_shardings = StackedWeights(
            shardings(self.mesh, self.loss.layer_specs), everywhere, model.depth.constant, model.dtype
        )
        self.weights = jax.jit(
            self._weights, in_shardings=(of_params,), out_shardings=self.weights_shardings, static_argnames="num_steps"
        )
        self.for_evaluation = self._chunked_steps if chunk else self.weights
        self.evaluate = jax.jit(self._evaluate, in_shardings=(of_params, None, by_example, by_example))

    def weights_shapes(self, num_steps: int | None) -> StackedWeights:
        """The shapes and shardings of `weights`."""
        return placed(jax.eval_shape(self.weights, self.state_shapes["params"], num_steps), self.weights_shardings)

    def batch_to_evaluate(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The shapes of the tokens [B, S] and of the valid rows [B, 1] that `evaluate` takes."""
        rows, place = self.config.batch_size, self.batch_sharding
        tokens = jax.ShapeDtypeStruct((rows, self.config.sequence_length), jnp.int32, sharding=place)
        return tokens, jax.ShapeDtypeStruct((rows, 1), jnp.bool, sharding=place)

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

    def trained(self, tree: dict) -> dict:
        """The trained part of a tree that is shaped like the parameters."""
        return self.loss.trained_and_frozen(tree)[0]

    def frozen(self, tree: dict) -> dict:
        """The frozen part of such a tree."""
        return self.loss.trained_and_frozen(tree)[1]

    def undivided(self, params: dict) -> dict:
        """Parameters whose generator isn't divided among copies, so that weights can be used where they are made."""
        if self.mesh.shape["generator"] == 1:
            return params
        mesh = divide_generator(self.mesh, 1)
        return jax.jit(identity, out_shardings=shardings(mesh, self.loss.param_specs))(params)

    def _init(self, base=None):
        params = merge_trees(nnx.to_pure_dict(nnx.state(new_model(self.config), nnx.Param)), base or {})
        moments = self.optimizer.whole.init(self.trained(params))
        return {"params": params, "optimizer": moments, "step": jnp.zeros((), jnp.int32)}

    def _train_step(self, state, tokens, num_steps=None, teacher_state=None):
        config, params, step = self.config, state["params"], state["step"]
        keys = dropout_keys(config.seed, step, len(tokens)) if config.model.dropout else None
        grid = training_grid(nnx.merge(self.graph, params), config.model.training_times, config.seed, step, num_steps)
        loss, grads = self.loss.value_and_grad(params, tokens, keys, config.microbatches, grid, teacher_state)
        trained, moments, norm = self.optimizer.update(grads, state["optimizer"], self.trained(params))
        params = merge_trees(params, trained)
        scalars = {"loss": loss, "gradient_norm": norm, "learning_rate": self.optimizer.schedule(step)}
        return {"params": params, "optimizer": moments, "step": step + 1}, scalars

    def _weights(self, params, num_steps):
        model = nnx.merge(self.graph, params)
        return model.weights(model.grid(num_steps))

    def _chunked_steps(self, params, num_steps):
        model = nnx.merge(self.graph, params)
        return jax.tree.map(np.asarray, self.loss.chunked(model, model.grid(num_steps)))

    def _evaluate(self, params, weights, tokens, valid):
        total, count = self.loss.sum_and_count(params, weights, tokens, valid, self.config.microbatches)
        return metrics.Average(total=total, count=count)
