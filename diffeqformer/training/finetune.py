"""Start a run from the weights of another, sampled at the times of any number of steps: section 6.2 of the paper.

A DiffEqFormer becomes an ordinary transformer with weights per layer, W(t_n) at t_n = (n + 1) / L' for any L'. A GPT
is unchanged. From then on it is a run like any other. It trains all weights or, with `config.model.lora_rank`, only
adapters and embeddings.
"""

import contextlib
from collections.abc import Iterator, Set

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffeqformer import checkpoint
from diffeqformer.checkpoint_folder import NoSuchStep, Step
from diffeqformer.config import base_config, check_rule
from diffeqformer.errors import UserError
from diffeqformer.inference.discretize import discretize, discretized_config
from diffeqformer.parallel.memory import check_free
from diffeqformer.rules import RULES
from diffeqformer.transformer import MODELS, abstract_model, split_model

OWN = tuple(
    "num_steps training_times training_depths dropout dtype state_dtype weights_dtype remat snapshots "
    "generate_chunk".split()
)
"""The fields of `config.model` that a run sets itself, besides the `lora_` fields. It inherits all others."""

OF_GENERATED = ("solver", "step_features", "generator_precision", "training_times", "training_depths")
"""Fields that `discretized_config` resets, since only generated weights can have some of their values."""


def inherit(config: ConfigDict, workdir: epath.PathLike, given: Set[str] = frozenset()) -> ConfigDict:
    """The config with its base's model, taken from the run's own newest checkpoint or else from `config.base`.

    Args:
        given: names of fields that a command line sets, maybe to their defaults (`diffeqformer.config.given_fields`).

    Raises:
        UserError: if there is no base, or a field that is given, or isn't the default, isn't the base's.
    """
    if not config.base:
        return config
    for rule in (rule for rule in RULES if rule.field in ("model.kind", "base_step")):
        check_rule(rule, config)
    try:
        ours = checkpoint.newest_readable(workdir, config.on_damage == "older")[1]
    except checkpoint.NoCheckpoint:
        ours = None
    model = ours.model if ours and ours.base == config.base else _model_of_base(config)
    config, default = config.copy_and_resolve_references(), base_config("", config.model.kind).model
    sampled = model.kind == "discretized" and MODELS[config.model.kind].weights.generated
    if config.model.kind not in (model.kind, "diffeqformer") and not sampled:
        kind = MODELS[config.model.kind]
        discretized = kind.weights.fixed_depth and not kind.vanilla
        needed = "a model with generated weights" if discretized else f"a model of the kind {config.model.kind}"
        raise UserError(
            f"config.base: must be the folder of {needed}, but {config.base} has a model of the kind {model.kind}"
        )
    for name in default:
        if sampled and name in OF_GENERATED and f"model.{name}" not in given:
            config.model[name] = model[name]
        if name in OWN or name.startswith("lora_"):
            continue
        theirs = model[name]
        wanted = f"model.{name}" in given or config.model[name] != default[name]
        if name != "kind" and wanted and config.model[name] != theirs:
            raise UserError(
                f"config.model.{name}: must be the base's, {theirs!r}, but it is {config.model[name]!r}; leave it out"
            )
        config.model[name] = theirs
    return config


@contextlib.contextmanager
def _reading_base(config: ConfigDict) -> Iterator[None]:
    """Another remedy if the base's checkpoint is damaged, or gone while a base that is being trained replaces it."""
    try:
        yield
    except NoSuchStep as error:
        if config.base_step.isdecimal():
            raise
        raise UserError(
            f"config.base: {config.base} is still being trained, and its checkpoint at step {error.step:,} has been "
            "replaced meanwhile; start again, with one that is there"
        ) from error
    except checkpoint.Damaged as error:
        remedy = "restore its files, or begin with another checkpoint (config.base_step) or run"
        raise UserError(f"config.base: {error.found}; {remedy}") from error


def step_of_base(config: ConfigDict) -> Step:
    """Which of its base's checkpoints a config asks for."""
    step = config.base_step
    return int(step) if step.isdecimal() else step or None


def _model_of_base(config: ConfigDict) -> ConfigDict:
    """The `model` part of the config of the model that a run starts from."""
    try:
        with _reading_base(config):
            base = checkpoint.load_config(config.base, step_of_base(config), "config.base")
    except checkpoint.NoCheckpoint:
        raise UserError(
            f"config.base: must be the folder of a trained run, but {config.base} has no checkpoint"
        ) from None
    kind, num_steps = base.model.kind, base.model.num_steps
    if MODELS[kind].weights.fixed_depth and config.model.num_steps != num_steps:
        raise UserError(
            f"config.model.num_steps: must be {num_steps}, because {config.base} holds a model of the kind {kind} with "
            f"weights for {num_steps} steps only, but it is {config.model.num_steps}"
        )
    if config.data.tokenizer != base.data.tokenizer:
        raise UserError(
            f"config.data.tokenizer: must be the tokenizer of config.base, {base.data.tokenizer}, but it is "
            f"{config.data.tokenizer}"
        )
    return discretized_config(base, num_steps, "float32").model


def base_of(config: ConfigDict, about: checkpoint.About) -> dict:
    """What a new run records about its base: the workdir, the step of the checkpoint, and the data's hash.

    Args:
        about: what the run's checkpoints will record about the tokenizer.

    Raises:
        UserError: if the base was trained with another tokenizer.
    """
    with _reading_base(config):
        _, step, theirs, _ = checkpoint.open_to_read(config.base, "config.base", step_of_base(config))
        if (theirs.tokenizer, theirs.tokenizer_data) != (about.tokenizer, about.tokenizer_data):
            raise UserError(
                f"config.data.tokenizer: must be the tokenizer of config.base, {theirs.tokenizer}, but this one, "
                f"{about.tokenizer}, gives other ids"
            )
        return {"workdir": config.base, "step": step, "data_sha256": theirs.data_sha256}


def solver_of_base(config: ConfigDict, step: int) -> str:
    """The solver of the base at one of its checkpoints."""
    with _reading_base(config):
        return checkpoint.load_config(config.base, step, "config.base").model.solver


def check_base_fits(config: ConfigDict, step: int, mesh: Mesh) -> None:
    """Check that the base's parameters fit into the devices' memory, before a program is compiled.

    Args:
        step: training step of the base's checkpoint.
        mesh: the devices over which they are sharded.

    Raises:
        UserError: if not.
    """
    with _reading_base(config):
        base = checkpoint.load_config(config.base, step, "config.base")
    remedy = "materialize it on a machine with more memory, and take the folder of that"
    params = split_model(abstract_model(base))[1]
    check_free(f"config.base: the parameters of {config.base}", params, 1 / mesh.size, remedy)


def initial_params(config: ConfigDict, step: int, mesh: Mesh) -> dict:
    """The initial parameters of a run, without adapters: the base's, sampled at the times of this config.

    Args:
        config: the result of `inherit`.
        step: training step of the base's checkpoint.
        mesh: the devices over which the parameters are sharded.
    """
    with _reading_base(config):
        opened = checkpoint.load(config.base, mesh, step, "config.base")
    return split_model(discretize(opened.model, opened.config, config.model.num_steps, "float32"))[1]
