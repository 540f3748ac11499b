"""A teacher: a frozen model whose distributions of the next token another one learns (`config.teacher_weight`)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.config import check_rule
from diffeqformer.cross_entropy import SoftTargets
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError
from diffeqformer.parallel.fit import check_mesh
from diffeqformer.parallel.memory import placed
from diffeqformer.parallel.sharding import EVERYWHERE, shardings
from diffeqformer.rules import RULES
from diffeqformer.training.finetune import chosen_base, reading
from diffeqformer.training.loss import ShardedLoss, without_depth
from diffeqformer.transformer import Transformer, abstract_model, padded_vocabulary, split_model, vector_field


class Taught(NamedTuple):
    """What a teacher computes with: its parameters without depth weights, and its weights at the times of its steps."""

    others: dict
    layers: dict
    step_sizes: jax.Array


class Teacher:
    """A model of its own config, on the mesh of the model that it teaches and in its types.

    specs: the partition specs of what it computes with
    shapes: their shapes and shardings

    Args:
        config: a complete config.
        weight: how much the divergence from it counts beside the loss of the text.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh, attend: Callable, weight: float):
        self.weight = weight
        model = abstract_model(config)
        graph, params = split_model(model)
        self.loss = ShardedLoss(graph, params, mesh, attend)
        self.specs = Taught(self.loss.other_specs, self.loss.layer_specs, EVERYWHERE)
        self.shardings = shardings(mesh, self.specs)
        self.shapes = placed(jax.eval_shape(taught, model), self.shardings)

    def load(self, model: Transformer) -> Taught:
        """What it computes with, from the model with its parameters."""
        return jax.jit(taught, out_shardings=self.shardings)(model)

    def soft_targets(self, taught: Taught, tokens: Int[Array, "B S"], rows: int) -> SoftTargets:
        """On one device: its distributions of the next token, with a head of `rows` rows, as the student's."""
        model = self.loss.model_on_device(taught.others)
        weights = StackedWeights(taught.layers, taught.step_sizes, model.depth.constant, model.dtype)
        x = model.last_state(tokens, self.loss.gathering(weights), self.loss.context_on_device(model, None))
        matrix = model.head_matrix()[: model.vocab_size]  # its padding may be another
        return SoftTargets(model.normalize(x), jnp.pad(matrix, [(0, rows - len(matrix)), (0, 0)]), self.weight)


def config_of_teacher(config: ConfigDict, devices: list) -> ConfigDict | None:
    """The config of the model that teaches, on a run's own batches, mesh and types; None if there is no teacher.

    Raises:
        UserError: if it can't be read, or doesn't suit the run or its devices.
    """
    if not config.teacher_weight:
        return None
    field = field_of(config)
    with reading(config, field):
        teacher = checkpoint.load_config(*chosen_base(config[field]), f"config.{field}")
    for name in ("batch_size", "microbatches", "sequence_length", "mesh"):
        teacher[name] = config[name]
    teacher.model.dtype = config.model.dtype
    ids = config.model.vocab_size, teacher.model.vocab_size
    if ids[0] != ids[1]:
        raise UserError(
            f"config.{field}: must have {ids[0]:,} ids, like the model that it teaches, but it has {ids[1]:,}"
        )
    try:
        for rule in (rule for rule in RULES if rule.field == "sequence_length"):
            check_rule(rule, teacher)
        field_of_teacher, rows = vector_field(teacher.model), padded_vocabulary(teacher.model)
        check_mesh(teacher, field_of_teacher, len(devices), devices[0].platform, rows)
    except UserError as error:
        raise UserError(f"config.{field}: {config[field]} doesn't suit this run: {error}") from None
    return teacher


def field_of(config: ConfigDict) -> str:
    """The field that names a run's teacher."""
    return "teacher" if config.teacher else "base"


def taught(model: Transformer) -> Taught:
    """What a teacher computes with, at its own number of steps."""
    weights = model.weights()
    return Taught(without_depth(split_model(model)[1]), weights.layers, weights.step_sizes)
