"""Configs: new and saved ones, and the checks that every config must pass."""

import os
import textwrap
from collections.abc import Iterable
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from diffeqformer.config_fields import CONFIG_FIELDS
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.low_rank import adapted_layers
from diffeqformer.errors import UserError, did_you_mean
from diffeqformer.fields import FIELDS
from diffeqformer.parallel.mesh import check_mesh
from diffeqformer.rules import OF_HEADS, RULES, Rule
from diffeqformer.transformer import MODELS, padded_vocabulary, vector_field


def base_config(name: str, model: str, field: str = "gpt") -> ConfigDict:
    """A config with every field at its default (GPT-small's shape). Files in `configs/` change fields but add none.

    Args:
        name: the config's name, which is also the default name of its runs.
        model: the kind of model, a key of `diffeqformer.transformer.MODELS`.
        field: the vector field, gpt, llama or neox, for a kind that doesn't determine its field.
    """
    defaults = {field.name: field.default for field in CONFIG_FIELDS}
    config = ConfigDict(traverse_util.unflatten_dict(defaults, sep="."))
    config.name = name if model == "diffeqformer" else f"{name}-{model}"
    config.model.kind, config.model.field = model, model if model in FIELDS else field
    if model in MODELS:
        config.model.update(solver=MODELS[model].solver, span=0.0 if MODELS[model].vanilla else 1.0)
    return config.lock()


REMOVED = {
    "model.generator_precision": "default",
    "model.state_dtype": "float32",
    "model.weights_dtype": "float32",
    "model.step_features": 0,  # once a boolean; False is equal to 0
    "optimizer.beta1": 0.9,
    "optimizer.moment_dtype": "float32",
    "dynamics_every": None,
    "on_damage": None,
    "mesh.generator": None,
    "data.tfds_dir": None,
    "sample.length": None,
    "sample.temperature": None,
}
"""Fields that configs once had, and the only value that a saved one may have there; None: any, as no result changes."""


def of_this_version(fields: dict) -> dict:
    """The fields of a saved config as they are called now. A ValueError if `REMOVED` ones have other values."""
    fields = traverse_util.flatten_dict(fields, sep=".")
    if isinstance(fields["model.remat"], bool):  # its first type
        fields["model.remat"] = "step" if fields["model.remat"] else "none"
    if step := fields.pop("base_step", ""):  # now a part of `base`
        fields["base"] += f"@{step}"
    if fields.pop("model.unit_steps", False):  # steps of the length 1
        fields["model.span"] = 0.0
    for name, only in REMOVED.items():
        if (value := fields.pop(name, only)) != only is not None:
            raise ValueError(f"config.{name} is {value!r}, but this version only knows {only!r}")
    return traverse_util.unflatten_dict(fields, sep=".")


def saved_config(fields: dict) -> ConfigDict:
    """The config of a checkpoint. A field newer than the checkpoint gets the value that keeps the old behaviour.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is none, or describes no model.
    """
    config = base_config(fields["name"], fields["model"]["kind"])
    config.data.tokenizer = "bytes"  # once the only one
    with config.unlocked():
        config.update(of_this_version(fields))
    try:
        check_model(config)
    except UserError as error:
        raise ValueError(str(error)) from None  # whose config it is, the caller says
    return config


def as_recipe(config: ConfigDict) -> ConfigDict:
    """The config with the best form that is known (docs/recipe.md): a Llama's layers as knots of depth, and Muon."""
    steps = config.model.num_steps
    config.model.update(kind="interpolated", field="llama", norm_of_norm=False, solver="lie_trotter")
    config.model.update(time_embed_dim=steps, span=float(steps))  # steps of length 1, as a Llama's
    config.optimizer.update(name="muon", beta2=0.95)
    return config


def fields_of(config: ConfigDict) -> dict[str, Any]:
    """The values of all fields by their dotted names, in the order of these."""
    return dict(sorted(traverse_util.flatten_dict(config.to_dict(), sep=".").items()))


def get_field(config: ConfigDict, name: str) -> Any:
    """The value of the field with a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def explain() -> str:
    """Every field with its default and what it is."""
    lines = ["The fields of a config, with their defaults:"]
    for field in CONFIG_FIELDS:
        text = textwrap.fill(field.help, 120, initial_indent="    ", subsequent_indent="    ")
        lines.append(f"--config.{field.name}={field.default!r}\n{text}")
    return "\n".join(lines)


def check_fields(config: ConfigDict) -> None:
    """Check that a config has exactly the fields of `CONFIG_FIELDS`, of the same types."""
    ours, theirs = fields_of(base_config("", "diffeqformer")), fields_of(config)
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            raise UserError(f"config.{name}: this field is missing; start a config from base_config")
        if name not in ours:
            raise UserError(f"config.{name}: there is no such field{did_you_mean(name, ours)}")
        check_type(name, theirs[name], ours[name])


def check_type(name: str, value: Any, default: Any) -> None:
    """Check that a field has the type of its default. Whole numbers but the seed must fit into 32 bits."""
    needed = type(default)
    if not (type(value) is needed or (needed is float and type(value) is int)):
        raise UserError(f"config.{name}: must be of type {needed.__name__}, but it is {value!r}")
    if needed is int and not abs(value) < 2**31 and name != "seed":
        raise UserError(f"config.{name}: must be between -2**31 and 2**31, but it is {value!r}")


def check_rules(rules: Iterable[Rule], config: ConfigDict) -> None:
    """Check some of `RULES`, in their order."""
    for rule in rules:
        value = get_field(config, rule.field)
        if not rule.holds(value, config):
            hint = did_you_mean(str(value), rule.names)
            raise UserError(f"config.{rule.field}: {rule.says.format(c=config)}, but it is {value!r}{hint}")


def check_model(config: ConfigDict) -> None:
    """Check the part of a saved config that describes the model, which can come from elsewhere.

    What depends on several fields isn't checked, but for the heads: an earlier version may have allowed more.
    """
    for name, default in fields_of(base_config("", "diffeqformer")).items():
        if name.startswith("model."):
            check_type(name, get_field(config, name), default)
    of_model = (rule for rule in RULES if (rule.alone and rule.field.startswith("model.")) or rule.field in OF_HEADS)
    check_rules(of_model, config)


def check_config(config: ConfigDict, num_devices: int | None, platform: str = "cpu") -> None:
    """Check that a config has the right fields, that every rule holds, and that its mesh fits the devices, if any.

    The UserError for the first field at fault has its name, the value found and the requirement.
    """
    check_fields(config)
    check_rules(RULES, config)
    if config.model.lora_rank:
        adapted_layers(vector_field(config.model).layers(), config.model.lora_layers, config.model.lora_rank)
    if num_devices is not None:
        check_mesh(config, vector_field(config.model), num_devices, platform, padded_vocabulary(config.model))


def check_tokenizer(config: ConfigDict, tokenizer: Tokenizer) -> None:
    """Raise a UserError if a vocabulary is too small for the tokenizer, or the sample's prompt too long or empty."""
    size, prompt = config.model.vocab_size, config.sample.prompt
    if size < tokenizer.vocab_size:
        needed = f"the {tokenizer.vocab_size:,} ids of the tokenizer {tokenizer.name}"
        raise UserError(f"config.model.vocab_size: must not be below {needed}, but it is {size}")
    if not 1 <= len(tokenizer.encode(prompt)) < sample_length(config):
        needed = f"at least one token and fewer than a sample's {sample_length(config)}"
        raise UserError(f"config.sample.prompt: must have {needed}, but it is {prompt!r}")


def sample_length(config: ConfigDict) -> int:
    """The tokens of the sample at the end of training, with its prompt."""
    return min(256, config.model.max_length)


def overridden(arguments: list[str]) -> set[str]:
    """The names in every `--config.FIELD=VALUE` among the command's arguments."""
    names = (text.partition("=")[0].lstrip("-").removeprefix("no") for text in arguments if text.startswith("-"))
    return {name.removeprefix("config.") for name in names if name.startswith("config.")}


def check_overrides(arguments: list[str]) -> None:
    """Check that every `--config.FIELD=VALUE` among the command's arguments names a field."""
    known = fields_of(base_config("", "diffeqformer"))
    for name in sorted(overridden(arguments)):
        if name in ("model", "model.kind"):  # a config's name and learning rate belong to its model
            raise UserError(f"config.{name}: choose the model in the config's name, for example --config=tiny:gpt")
        if name not in known:
            raise UserError(f"config.{name}: there is no such field{did_you_mean(name, known)}")


def given_fields(arguments: list[str]) -> set[str]:
    """The fields that a command's arguments set: `overridden` ones, and model.kind if it is named after the config."""
    names = overridden(arguments)
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, equals, value = argument.partition("=")
        if option in ("-config", "--config") and ":" in os.path.basename(value if equals else following):
            names.add("model.kind")
    return names


def check_used(arguments: list[str], config: ConfigDict) -> None:
    """Check that no `--config.FIELD=VALUE` among a command's arguments, which make a config, sets an ignored field."""
    check_fields(config)
    if config.model.kind not in MODELS or config.model.field not in FIELDS:
        return  # `check_config` refuses it
    given = given_fields(arguments)
    for name, unused in ((field.name, unused) for field in CONFIG_FIELDS for unused in field.unused):
        if name in given and unused.holds(config, name):
            raise UserError(f"config.{name}: must be left out, because {unused.why.format(c=config)}")


def place(path: str) -> str:
    """A folder's path, relative to the current folder or a URL, in the one way of writing it; empty if it is empty."""
    scheme, mark, rest = path.rpartition("://")
    return scheme + mark + (os.path.normpath(rest) if mark else os.path.realpath(rest)) if path else ""
