"""Start a run from another's model: go on as the same kind, or as layers at the times of any number of steps.

A model with generated weights keeps its hypernetwork. As the kind `discretized` (section 6.2 of the paper), or with
adapters, it becomes an ordinary transformer with weights per layer, W(t_n) at t_n = (n + 1) / L' for any L'. From then
on it is a run like any other, with its own text, schedule and optimizer.
"""

import contextlib
import re
from collections.abc import Iterator, Set

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import BEST, Damaged, NoSuchStep, Step, work_folder
from diffeqformer.config import base_config, check_rules, place
from diffeqformer.config_fields import CONFIG_FIELDS
from diffeqformer.depth.depths import left_out_layers, trained_depths
from diffeqformer.errors import UserError, counted, reachable
from diffeqformer.inference.discretize import discretize, discretized_config
from diffeqformer.parallel.memory import check_free
from diffeqformer.rules import RULES
from diffeqformer.transformer import MODELS, abstract_model, split_model


def inherit(config: ConfigDict, workdir: epath.PathLike, given: Set[str] | None = None) -> ConfigDict:
    """The config with its base's model, taken from the run's own newest checkpoint or else from `config.base`.

    Args:
        given: names of the fields that a command line sets, maybe to their defaults
            (`diffeqformer.config.given_fields`). Without `base` among them, or with None, all fields that aren't the
            default are meant for this base. A UserError says if one isn't the base's, or there is no base.
    """
    if not config.base:
        return config
    check_rules((rule for rule in RULES if rule.field in ("model.kind", "model.num_steps")), config)
    if meant := given is None or "base" not in given:  # a file or a notebook names this base
        default = base_config("", config.model.kind).model.num_steps
        given = {*(given or ()), *["model.num_steps"] * (config.model.num_steps != default)}
    elif "model.kind" not in given and MODELS[config.model.kind].weights.continuous:
        config = config.copy_and_resolve_references()
        config.model.kind = "diffeqformer"  # which any base suits
    about, ours = checkpoint.newest_readable(workdir)
    if ours and is_base_of(config, about, ours) and _suits(ours.model.kind, config):
        model = ours.model
    else:
        model = _model_of_base(config)
        _check_depth(config, model, given)
    return _with_model(config, model, given, meant)


def _suits(kind: str, config: ConfigDict) -> bool:
    """Whether a run of this config may have a model of that kind. A config that names no kind takes any."""
    named = config.model.kind
    if kind == "discretized" and MODELS[named].weights.continuous:
        return True  # the file that trained a model may fine-tune its layers
    layers = named == "discretized" or config.model.lora_rank  # which have no hypernetwork
    return named in ("diffeqformer", kind) and not (layers and MODELS[kind].weights.continuous)


def _with_model(config: ConfigDict, model: ConfigDict, given: Set[str], meant: bool) -> ConfigDict:
    """The config with a base's `model`, except for what is the run's own. What is `meant` for it must be the base's."""
    config, default = config.copy_and_resolve_references(), base_config("", config.model.kind).model
    sampled = model.kind == "discretized" and MODELS[config.model.kind].weights.continuous
    for field in CONFIG_FIELDS:
        section, _, name = field.name.partition(".")
        if section != "model":
            continue
        ours, theirs, named = config.model[name], model[name], field.name in given
        differs = ours != default[name]
        if name == "num_steps":
            inherits = not named
        elif sampled and not named and (name == "solver" or field.base == "either"):
            inherits = True  # `discretized_config` has reset it, as only generated weights can have some of its values
        else:
            inherits = field.base != "run" and not (field.base == "either" and (named or differs))
            if inherits and name != "kind" and (named or (meant and differs)) and ours != theirs:
                raise UserError(
                    f"config.model.{name}: must be the base's, {theirs!r}, but it is {ours!r}; leave it out"
                )
        if inherits:
            config.model[name] = theirs
    return config


def _check_depth(config: ConfigDict, model: ConfigDict, given: Set[str]) -> None:
    """Check that a base's model is for the number of steps that is given, if any; or name the ways to another one."""
    steps, weights = config.model.num_steps, MODELS[model.kind].weights
    if "model.num_steps" not in given or steps == model.num_steps:
        return
    if weights.fixed_depth:
        smaller = range(model.num_steps - len(left_out_layers(model.left_out)), model.num_steps)
        raise UserError(
            f"config.model.num_steps: must be {model.num_steps}, because {config.base} holds a model of the kind "
            f"{model.kind} with weights for {counted(model.num_steps, 'step')}, but it is {steps}"
            + f"; materialize --num_steps={steps} first, and take that as the base"
            * (steps in smaller)
        )
    if weights.continuous and not (config.model.training_depths or "model.training_depths" in given):
        known = sorted({*(trained_depths(model) if model.training_depths else ()), steps})
        raise UserError(
            f"config.model.num_steps: must be the base's, {model.num_steps}, but it is {steps}; for layers at other "
            "times name the kind after the config, as in --config=tiny:discretized, and to train the hypernetwork at "
            f"other depths add --config.model.training_depths={','.join(map(str, known))}"
        )


def chosen_base(base: str, field: str = "base") -> tuple[str, Step]:
    """The folder that `config.base`, or another field, names, and which checkpoint, as in runs/a@1000 and runs/a@best.

    If there is a folder with such a name, it is that one.
    """
    folder, _, step = base.rpartition("@")
    if not (folder and re.fullmatch("best|[0-9]{1,18}", step)):
        return base, None
    with reachable(f"config.{field}", base):
        return (base, None) if work_folder(base).exists() else (folder, step if step == BEST else int(step))


def is_base_of(config: ConfigDict, about: checkpoint.About, saved: ConfigDict, field: str = "base") -> bool:
    """Whether the config's base, or teacher, is that of a checkpoint, by the config and full path that it has saved."""
    (ours, step), (theirs, of_theirs) = (chosen_base(each[field], field) for each in (config, saved))
    return step == of_theirs and place(ours) in (place(theirs), (getattr(about, field) or {}).get("workdir"))


@contextlib.contextmanager
def reading(config: ConfigDict, field: str = "base") -> Iterator[None]:
    """Another remedy if the checkpoint of a base is damaged, or gone while a base that is being trained replaces it."""
    try:
        yield
    except NoSuchStep as error:
        if chosen_base(config[field], field)[1] == error.step:
            raise
        raise UserError(
            f"config.{field}: {config[field]} is still being trained, and its checkpoint at step {error.step:,} has "
            "been replaced meanwhile; start again, with one that is there"
        ) from error
    except checkpoint.NoCheckpoint:
        raise UserError(
            f"config.{field}: must be the folder of a trained run, but {config[field]} has no checkpoint"
        ) from None
    except Damaged as error:
        remedy = f"restore its files, or begin with another checkpoint (config.{field}=FOLDER@STEP) or run"
        raise UserError(f"config.{field}: {error.found}; {remedy}") from error


def config_of_base(config: ConfigDict, field: str = "base", step: Step = None) -> ConfigDict:
    """The config of the checkpoint that `config.base`, or another field, names, or of one at another step."""
    with reading(config, field):
        folder, chosen = chosen_base(config[field], field)
        return checkpoint.load_config(folder, chosen if step is None else step, f"config.{field}")


def load_base(config: ConfigDict, step: int, mesh: Mesh, field: str = "base") -> checkpoint.Checkpoint:
    """A checkpoint of the run that a field names, on a mesh. All processes call this together."""
    with reading(config, field):
        return checkpoint.load(chosen_base(config[field], field)[0], mesh, step, f"config.{field}")


def _model_of_base(config: ConfigDict) -> ConfigDict:
    """The `model` part of the config of the model that a run starts from."""
    base = config_of_base(config)
    if config.data.tokenizer != base.data.tokenizer:
        raise UserError(
            f"config.data.tokenizer: must be the tokenizer of config.base, {base.data.tokenizer}, but it is "
            f"{config.data.tokenizer}"
        )
    continuous, kind = MODELS[base.model.kind].weights.continuous, config.model.kind
    layers = kind == "discretized" or config.model.lora_rank
    if not (_suits(base.model.kind, config) or (layers and continuous and _suits("discretized", config))):
        needed = "weights that are functions of time" if kind == "discretized" else f"the kind {kind}"
        raise UserError(
            f"config.base: must be the folder of a model of {needed}, but {config.base} has a model of the kind "
            f"{base.model.kind}"
        )
    if continuous and not layers:
        return base.model
    return discretized_config(base, config.model.num_steps if continuous else base.model.num_steps, "float32").model


def base_of(config: ConfigDict, about: checkpoint.About, field: str = "base") -> dict:
    """What a new run records of its base, or teacher, which must have the tokenizer of `about`."""
    with reading(config, field):
        folder, step = chosen_base(config[field], field)
        _, step, theirs, _ = checkpoint.open_to_read(folder, f"config.{field}", step)
        if (theirs.tokenizer, theirs.tokenizer_data) != (about.tokenizer, about.tokenizer_data):
            raise UserError(
                f"config.data.tokenizer: must be the tokenizer of config.{field}, {theirs.tokenizer}, but this one, "
                f"{about.tokenizer}, gives other ids"
            )
        return {"workdir": place(folder), "step": step, "data_sha256": theirs.data_sha256}


def check_base_fits(config: ConfigDict, step: int, mesh: Mesh, field: str = "base") -> None:
    """Check that the parameters of a base's, or teacher's, checkpoint fit into a mesh's memory, before compiling."""
    remedy = "materialize it on a machine with more memory, and take the folder of that"
    params = split_model(abstract_model(config_of_base(config, field, step)))[1]
    check_free(f"config.{field}: the parameters of {config[field]}", params, 1 / mesh.size, remedy)


def initial_params(config: ConfigDict, step: int, mesh: Mesh) -> dict:
    """The initial parameters of a run, without adapters: the base's, or its weights at the times of this config."""
    opened = load_base(config, step, mesh)
    if config.model.solver != (theirs := opened.config.model.solver):
        print(f"it was trained with {theirs}, which needs weights at several times per step; this run uses Euler")
    if MODELS[config.model.kind].weights.continuous:
        return split_model(opened.model)[1]
    return split_model(discretize(opened.model, opened.config, config.model.num_steps, "float32"))[1]
