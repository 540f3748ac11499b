"""The model of all kinds: embedding, [times -> depth weights -> solver over the vector field], norm, head."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from diffeqformer.depth.depths import MOST_STEPS, longest_grid, trained_depths
from diffeqformer.depth.generated import AlternativeWeights, GeneratedWeights, LoopedWeights, gain_of
from diffeqformer.depth.grid import Grid
from diffeqformer.depth.low_rank import of_adapters_type
from diffeqformer.depth.plain import InterpolatedWeights, PerLayerWeights, SharedWeights, plain_layer
from diffeqformer.depth.weights import DepthWeights, StackedWeights, in_type, weight_axes
from diffeqformer.errors import UserError, counted
from diffeqformer.fields import FIELDS
from diffeqformer.fields.field import Block
from diffeqformer.fields.layers import Context, Linear, at_its_precision, dropout, parameter, precision_in, rows_from
from diffeqformer.parallel.memory import check_free
from diffeqformer.parallel.mesh import divide_generator
from diffeqformer.parallel.sharding import GENERATOR_ROWS, ROWS, generator_parts, partition
from diffeqformer.solvers import SOLVERS, KeyValueCache, walk

Path = tuple[str, ...]
"""The path of a parameter in a tree."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table of models.

    weights: the kind of depth weights.
    solver: the name of the default solver.
    vanilla: a usual transformer: always with steps of the length 1 (`model.span` 0), and the norms of the usual block.
    field: the only vector field that this kind can have; None: any.
    """

    weights: type[DepthWeights]
    solver: str
    vanilla: bool = False
    field: str | None = None

    def solvers(self, unit_steps: bool) -> list[str]:
        """The solvers that this kind can have. With one set of weights per step, a solver can use only one per step.

        Args:
            unit_steps: every step has the length 1. Reversible solvers need steps whose lengths add up to 1.
        """
        return [
            name
            for name, solver in SOLVERS.items()
            if not (self.weights.fixed_depth and len(solver.nodes) > 1) and not (unit_steps and solver.reversible)
        ]


MODELS = {
    "diffeqformer": Kind(GeneratedWeights, "euler"),
    "alternative": Kind(AlternativeWeights, "euler"),
    "looped": Kind(LoopedWeights, "euler"),
    "interpolated": Kind(InterpolatedWeights, "lie_trotter"),
    "discretized": Kind(PerLayerWeights, "euler"),  # a diffeqformer's weights at the times of one grid
    "shared": Kind(SharedWeights, "euler"),
    "gpt": Kind(PerLayerWeights, "lie_trotter", vanilla=True, field="gpt"),
    "llama": Kind(PerLayerWeights, "lie_trotter", vanilla=True, field="llama"),
    "neox": Kind(PerLayerWeights, "euler", vanilla=True, field="neox"),  # both branches read the same state
}
"""The kinds of models by name (`model.kind`)."""


def vector_field(config) -> Block:
    """The vector field of the `model` part of a config."""
    return FIELDS[config.field].from_config(config, MODELS[config.kind].vanilla)


class Transformer(nnx.Module):
    """A language model in two phases: `weights = model.weights()`, then `logits = model(tokens, weights)`.

    The cost of the first phase doesn't depend on the number of tokens. Accumulation, generation and evaluation run the
    second phase many times, so they run the first only once.

    Args:
        config: the `model` part of a config (`diffeqformer.config`).
        rngs: source of the initial parameters.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        kind = MODELS[config.kind]
        self.num_steps, self.unit_steps, self.span = config.num_steps, not config.span, config.span or 1.0
        self.most_steps = max(longest_grid(config, depth) for depth in trained_depths(config))  # in training
        self.solver = SOLVERS[config.solver]
        self.dtype, self.dropout, self.remat = jnp.dtype(config.dtype), config.dropout, config.remat
        self.snapshots, self.generate_chunk = config.snapshots, config.generate_chunk
        self.max_length, self.vocab_size, self.head_gain = config.max_length, config.vocab_size, gain_of(config)
        self.field = field = vector_field(config)
        embedding, rows = {"decays": True, "always_trains": True}, padded_vocabulary(config)
        axes = ("vocab", "embed")
        self.token_embedding = parameter(rngs, (rows, config.width), axes, stddev=field.embedding_stddev, **embedding)
        if field.learned_positions:
            shape, axes = (config.max_length, config.width), ("sequence", "embed")
            self.position_embedding = parameter(rngs, shape, axes, stddev=0.01, **embedding)
        self.depth = kind.weights(config, field.layers(), rngs)
        self.final_norm = plain_layer(rngs, field.final_norm(), ())
        if not field.tied_head:
            shape, axes = (config.width, rows), ("embed", "vocab")
            self.lm_head = parameter(rngs, shape, axes, stddev=0.02, always_trains=True)
        self.has_adapters = config.lora_rank > 0
        always = traverse_util.flatten_dict(parameter_metadata(self, "always_trains"))
        self.trained_beside_adapters = frozenset(path for path, flag in always.items() if flag)

    @property
    def precision(self) -> str:
        """The precision of all products."""
        return precision_in(self.dtype)

    def replace(self, **changes) -> "Transformer":
        """A copy with other attributes, such as `solver` or `dtype`. It shares the parameters."""
        copy = nnx.merge(*nnx.split(self))
        for name, value in changes.items():
            setattr(copy, name, value)
        return copy

    def trains(self, path: Path) -> bool:
        """Whether the parameter with that path is trained. With adapters, only these, embeddings and the head are."""
        return not self.has_adapters or path in self.trained_beside_adapters

    def grid(self, num_steps: int | None = None) -> Grid:
        """The steps of this model's solver through depth, in float64.

        Args:
            num_steps: the number of steps, of equal length; by default as in training. Others raise a UserError.
        """
        num_steps = self.num_steps if num_steps is None else num_steps
        if not 1 <= num_steps <= MOST_STEPS:
            bound = "at least 1" if num_steps < 1 else f"at most {MOST_STEPS:,}"
            raise UserError(f"num_steps: must be {bound}, but it is {num_steps}")
        ends = np.arange(1, num_steps + 1) / (1 if self.unit_steps else num_steps)
        return Grid.of(ends, self.solver.nodes, self.span)

    @at_its_precision
    def weights(self, grid: Grid | None = None) -> StackedWeights:
        """First phase: the weights at the times of a grid (`self.grid`), by default the grid of training.

        A UserError if the model only has weights for another number of steps.
        """
        grid = self.grid() if grid is None else grid
        return self.stack(of_adapters_type(in_type(self.depth(grid), self.dtype)), grid.step_sizes)

    def stack(self, layers: dict, step_sizes: Float[Array, "L"]) -> StackedWeights:
        """The input of the second phase, from the output of `self.depth` for a grid with these step sizes.

        Layers that all steps share keep their type until each step, so that their gradient is summed in it.
        """
        constant = self.depth.constant
        return StackedWeights(layers if constant else in_type(layers, self.dtype), step_sizes, constant, self.dtype)

    def __call__(
        self, tokens: Int[Array, "B S"], weights: StackedWeights, dropout_keys: Key[Array, "B"] | None = None
    ) -> Float[Array, "B S V"]:
        """Second phase: fp32 logits of the next token at every position.

        Args:
            tokens: ids below the vocabulary size; a UserError says if S exceeds `max_length`.
            weights: from `self.weights`, with any number of steps.
            dropout_keys: one random key per example; None turns dropout off.
        """
        return self.head(self.last_state(tokens, weights, Context(dropout_keys, self.dropout)))

    @at_its_precision
    def last_state(self, tokens: Int[Array, "B S"], weights: StackedWeights, context: Context) -> Float[Array, "B S D"]:
        """x(1), the state that `head` reads. A UserError if S exceeds `max_length`."""
        check_length(tokens.shape[1], self.max_length)
        x = self.embed(tokens, context)
        return walk(self.solver, self.field, weights, x, context, remat=self.remat, snapshots=self.snapshots)

    @at_its_precision
    def trajectory(self, tokens: Int[Array, "B S"], weights: StackedWeights) -> Float[Array, "states B S D"]:
        """The states at time 0 and after all L steps, without dropout. A UserError if S exceeds `max_length`."""
        check_length(tokens.shape[1], self.max_length)
        x = self.embed(tokens, Context())
        after = walk(self.solver, self.field, weights, x, Context(), trajectory=True)
        return jnp.concatenate([x[None], after])

    @at_its_precision
    def extend(
        self, tokens: Int[Array, "B S"], weights: StackedWeights, cache: KeyValueCache, position: Int[Array, "*each"]
    ) -> tuple[Float[Array, "B S D"], KeyValueCache]:
        """Second phase for tokens that follow others: their final states (for `head`), and the updated cache.

        Args:
            tokens: the ids at `position`, `position` + 1, ...
            weights: the same weights with which the cache was filled.
            cache: holds every earlier position; at the start, of zeros.
            position: number of tokens before these, of each example or of all; with S it must not exceed the cache's
                length.
        """
        context = Context(position=position)
        x = self.embed(tokens, context)
        return walk(self.solver, self.field, weights, x, context, cache=cache)

    def embed(self, tokens: Int[Array, "B S"], context: Context) -> Float[Array, "B S D"]:
        """x(0): token embedding, plus position embedding if it is learned; with dropout if `context` has keys."""
        x = self.token_embedding[...][tokens].astype(jnp.float32)
        if self.field.learned_positions:
            x = x + rows_from(self.position_embedding[...], context.position, tokens.shape[1])
        return dropout(x, context.at_step(0), site=0)

    @at_its_precision
    def head(self, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Logits of the final state: norm, then the transposed token embedding or a separate matrix.

        Rows that pad the vocabulary to a multiple have the logit -inf, so they get no probability and no gradient.
        """
        logits = jnp.einsum("bsd,vd->bsv", self.normalize(x), self.head_matrix(), preferred_element_type=jnp.float32)
        if logits.shape[-1] == self.vocab_size:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)

    def normalize(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The final norm of the last state, in the compute type."""
        return self.field.normalize(nnx.to_pure_dict(nnx.state(self.final_norm)), x, self.dtype)

    def head_matrix(self) -> Float[Array, "V D"]:
        """The matrix that maps a normalized state to logits, in the compute type."""
        matrix = self.token_embedding[...] if self.field.tied_head else self.lm_head[...].T
        return (matrix if self.head_gain == 1 else self.head_gain * matrix).astype(self.dtype)


def check_length(length: int, max_length: int) -> None:
    """Check that a model with `max_length` positions can read that many tokens."""
    if length > max_length:
        raise UserError(f"tokens: {length} positions, but this model has {max_length}")


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, dict]:
    """The structure of a model or a part of one, and its parameters as a plain tree; `nnx.merge` reverses this."""
    graph, params = nnx.split(model, nnx.Param)
    return graph, nnx.to_pure_dict(params)


def weights_at(model: Transformer, num_steps: int | None = None) -> StackedWeights:
    """`model.weights(model.grid(num_steps))` in one compiled program.

    This way, weights in a small compute type need not exist in fp32 all at once. A UserError if this model can't take
    that number of steps, or its weights don't fit into memory.
    """
    check_weights(model, num_steps)
    return weights_of(*split_model(model), num_steps)


def check_weights(model: Transformer, num_steps: int | None = None) -> None:
    """Raise a `NoRoom` if the weights of a number of steps don't fit into memory."""
    graph, params = split_model(model)
    what = f"num_steps: the weights of {counted(len(model.grid(num_steps).ends), 'step')}"
    shapes = jax.eval_shape(lambda params: jax.tree.leaves(weights_of(graph, params, num_steps)), params)
    arrays = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "sharding")]  # none in a derivative
    devices = max((len(array.sharding.device_set) for array in arrays), default=1)
    check_free(what, shapes, 1 / devices)  # they are divided at most as much


@functools.partial(jax.jit, static_argnames=("graph", "num_steps"))
def weights_of(graph: nnx.GraphDef, params: dict, num_steps: int | None) -> StackedWeights:
    """`weights_at` of a model that is split."""
    model = nnx.merge(graph, params)
    return model.weights(model.grid(num_steps))


def random_key(seed: int, purpose: str) -> Key[Array, ""]:
    """The random root key for one purpose: parameters, dropout, sample or times."""
    return jax.random.fold_in(jax.random.key(seed), ("parameters", "dropout", "sample", "times").index(purpose))


def new_model(config) -> Transformer:
    """The model of a config with its initial parameters."""
    return Transformer(config.model, nnx.Rngs(random_key(config.seed, "parameters")))


def abstract_model(config) -> Transformer:
    """The model of a config with shapes in place of values. It takes no memory, however large the model is."""
    return nnx.eval_shape(lambda: new_model(config))


def padded_vocabulary(config) -> int:
    """The number of rows of the embedding: the vocabulary size, padded to a multiple, from a config's `model` part."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def parameter_metadata(model: nnx.Module, name: str) -> dict:
    """One argument of `fields.layers.parameter` (axes, decays or always_trains) of a module's parameters, as a tree."""
    return nnx.to_pure_dict(nnx.map_state(lambda _, variable: getattr(variable, name), nnx.state(model, nnx.Param)))


def partition_specs(model: Transformer) -> dict:
    """The partition specs of a model's parameters, as a tree."""
    depth_rows = GENERATOR_ROWS if model.depth.continuous else ROWS
    return {
        name: jax.tree.map(
            functools.partial(partition, rows=depth_rows if name == "depth" else ROWS),
            axes,
            is_leaf=lambda leaf: isinstance(leaf, tuple),
        )
        for name, axes in parameter_metadata(model, "axes").items()
    }


def divide_copies(model: Transformer, mesh: Mesh) -> Mesh:
    """The mesh with its copies of the model in groups that share a generator, if the model has one."""
    if not model.depth.continuous:
        return divide_generator(mesh, 1)
    kernels = [layer for layer in model.field.layers().values() if isinstance(layer, Linear)]
    rows = [(layer.inputs, layer.axes[0]) for layer in kernels]
    return divide_generator(mesh, generator_parts(mesh, rows))


def layer_specs(model: Transformer, rows: tuple[str, ...]) -> dict:
    """The partition specs of a model's weights at all times (`model.depth(...)`), as a tree.

    Args:
        rows: the axes of the mesh over which the rows of kernels are sharded.
    """
    field_layers, time = model.field.layers(), () if model.depth.constant else ("time",)
    layers = jax.eval_shape(lambda depth: nnx.merge(*depth)(model.grid()), nnx.split(model.depth))
    return {
        layer: {name: partition((*time, *weight_axes(field_layers[layer], name)), rows) for name in weights}
        for layer, weights in layers.items()
    }


def select(tree: dict, wanted: Callable[[Path], bool]) -> dict:
    """The leaves of nested dictionaries whose path satisfies `wanted`."""
    leaves = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({path: leaf for path, leaf in leaves.items() if wanted(path)})


def merge_trees(*trees: dict) -> dict:
    """Nested dictionaries merged into one."""
    leaves = [traverse_util.flatten_dict(tree) for tree in trees]
    return traverse_util.unflatten_dict({path: leaf for each in leaves for path, leaf in each.items()})
