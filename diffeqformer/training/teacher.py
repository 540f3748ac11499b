"""A teacher: a frozen model whose distributions of the next token another one learns (`config.teacher_weight`)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.about import About
from diffeqformer.config import check_rules, saved_config
from diffeqformer.cross_entropy import SoftTargets
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError
from diffeqformer.fields.attention import fastest
from diffeqformer.parallel.memory import placed
from diffeqformer.parallel.mesh import check_mesh
from diffeqformer.parallel.sharding import EVERYWHERE, shardings
from diffeqformer.rules import RULES
from diffeqformer.training.finetune import base_of, config_of_base, is_base_of
from diffeqformer.training.loss import ShardedLoss, split_batch, without_depth
from diffeqformer.transformer import Transformer, abstract_model, padded_vocabulary, split_model, vector_field


class TeacherState(NamedTuple):
    """What a teacher computes with: its parameters without depth weights, and its weights at the times of its steps."""

    others: dict
    layers: dict
    step_sizes: Float[Array, "L"]


class Teacher:
    """A frozen model on the mesh of the model that it teaches, and in its types.

    specs, shardings: how its state is divided among the devices
    shapes: the shapes and shardings of its state

    Args:
        config: of `config_of_teacher`.
        weight: how much the divergence from it counts beside the loss of the text.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh, weight: float):
        self.weight, model = weight, abstract_model(config)
        width = model.field.head_width
        attend, _ = fastest(mesh.devices.flat[0], config.model.dtype, config.sequence_length, width)
        self.loss = ShardedLoss(*split_model(model), mesh, attend)
        self.specs = TeacherState(self.loss.other_specs, self.loss.layer_specs, EVERYWHERE)
        self.shardings = shardings(mesh, self.specs)
        self.shapes = placed(jax.eval_shape(state_of, model), self.shardings)

    def state(self, model: Transformer) -> TeacherState:
        """Its state, from the model with its parameters."""
        return jax.jit(state_of, out_shardings=self.shardings)(model)

    def soft_targets(
        self, state: TeacherState, tokens: Int[Array, "B S"], rows: int, microbatches: int = 1
    ) -> SoftTargets:
        """On one device: its distributions of the next token, [B, S] of them, with a head of `rows` rows."""
        model = self.loss.model_on_device(state.others)
        weights = StackedWeights(state.layers, state.step_sizes, model.depth.constant, model.dtype)
        weights, context = self.loss.gathering(weights), self.loss.context_on_device(model, None)

        def states(tokens):
            return model.normalize(model.last_state(tokens, weights, context))

        x = jax.lax.map(states, split_batch(tokens, microbatches)).swapaxes(0, 1)
        matrix = model.head_matrix()[: model.vocab_size]  # its padding may be another
        matrix = jnp.pad(matrix, [(0, rows - len(matrix)), (0, 0)])
        return SoftTargets(x.reshape(*tokens.shape, -1), matrix, self.weight)


def state_of(model: Transformer) -> TeacherState:
    """What a teacher computes with, at its own number of steps."""
    weights = model.weights()
    return TeacherState(without_depth(split_model(model)[1]), weights.layers, weights.step_sizes)


def teacher_field(config: ConfigDict) -> str:
    """The field that names a run's teacher: by default its base teaches."""
    return "teacher" if config.teacher else "base"


def config_of_teacher(config: ConfigDict, devices: list, workdir: epath.PathLike) -> ConfigDict | None:
    """The config of a run with the model of its teacher, in the run's types; None if there is no teacher.

    The run's own newest checkpoint has that model, so once there is one, the teacher's run isn't needed. A UserError
    says if it doesn't suit the run or its devices.
    """
    if not config.teacher_weight:
        return None
    field = teacher_field(config)
    about, ours = checkpoint.newest_readable(workdir)
    if ours and about.teacher and is_base_of(config, about, ours, field):
        teacher = saved_config({**config.to_dict(), "model": about.teacher["model"]})
    else:
        teacher = config.copy_and_resolve_references()
        teacher.model = config_of_base(config, field).model
    teacher.model.dtype = config.model.dtype
    ids = config.model.vocab_size, teacher.model.vocab_size
    if ids[0] != ids[1]:
        raise UserError(f"config.{field}: must have {ids[0]:,} ids, as this model has, but it has {ids[1]:,}")
    try:
        check_rules((rule for rule in RULES if rule.field == "sequence_length"), teacher)
        block, rows = vector_field(teacher.model), padded_vocabulary(teacher.model)
        check_mesh(teacher, block, len(devices), devices[0].platform, rows)
    except UserError as error:
        raise UserError(f"config.{field}: {config[field]} doesn't suit this run: {error}") from None
    return teacher


def record_of_teacher(config: ConfigDict, about: About) -> dict:
    """What a new run records of its teacher: that of `base_of`, and its model."""
    field = teacher_field(config)
    record = base_of(config, about, field)
    return {**record, "model": config_of_base(config, field, record["step"]).model.to_dict()}
