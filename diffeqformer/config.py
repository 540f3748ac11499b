"""The fields of a config, each declared once, and the checks that every config must pass."""

import inspect
import io
import os
import re
import textwrap
import tokenize
from typing import Any

from absl import flags
from flax import traverse_util
from ml_collections import ConfigDict

from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.low_rank import adapted_layers
from diffeqformer.errors import UserError, did_you_mean
from diffeqformer.fields import FIELDS
from diffeqformer.parallel.fit import check_mesh
from diffeqformer.rules import IGNORED, RULES, Rule
from diffeqformer.transformer import MODELS, padded_vocabulary, vector_field


def base_config(name: str, model: str, field: str = "gpt") -> ConfigDict:
    """A config with every field at its default (GPT-small's shape). Files in `configs/` change fields but add none.

    Args:
        name: the config's name, which is also the default name of its runs.
        model: the kind of model, a key of `diffeqformer.transformer.MODELS`.
        field: the vector field, gpt or llama, for a kind that doesn't determine its field.
    """
    config = ConfigDict()
    config.name = name if model == "diffeqformer" else f"{name}-{model}"  # also names the folder of its runs
    # Folder of a run to start from, which also sets the model's shape; empty: random weights. runs/a@1000 is its
    # checkpoint of that training step, and runs/a@best that of the best validation, instead of the newest.
    config.base = ""
    config.seed = 0  # of initial parameters, order of data and dropout
    config.steps = 20_000  # optimizer steps
    config.batch_size = 512  # sequences in one step, over all devices
    config.kernels = "auto"  # what computes with a hypernetwork's P: auto, pallas or xla (see docs/scaling.md)
    config.microbatches = 1  # parts of the batch, processed one after the other to save memory for activations
    config.sequence_length = 1024  # tokens in one sequence

    config.model = ConfigDict()
    config.model.kind = model  # diffeqformer, alternative, looped, interpolated, discretized, shared, gpt or llama
    config.model.field = model if model in FIELDS else field  # the type of block: gpt or llama
    # The second norm reads the first one's output, as published. Applies to a llama field, except in the kind llama.
    config.model.norm_of_norm = True
    config.model.width = 768  # D, width of the residual stream
    config.model.heads = 12  # attention heads; must divide the width
    config.model.mlp = 3072  # F, width of the feed-forward's hidden layer
    config.model.num_steps = 12  # solver steps, or layers; the parameters of a diffeqformer don't grow with it
    # The solver through depth: euler, midpoint, heun, rk4, lie_trotter, strang, adams_bashforth, or one that can be
    # undone, such as reversible_euler; see docs/solvers.md.
    config.model.solver = MODELS[model].solver if model in MODELS else "euler"
    # Steps have the length 1, as in a gpt or llama, and not 1 / num_steps; for a shared model, both are possible.
    config.model.unit_steps = MODELS[model].vanilla if model in MODELS else False
    # The length of the whole depth: a step adds span / num_steps times the field, a transformer's layer adds it once.
    config.model.span = 1.0
    config.model.vocab_size = 50_257  # at least the tokenizer's
    config.model.vocab_multiple = 1  # embeddings are padded to a multiple of this; padding gets probability 0
    config.model.max_length = 1024  # tokens of the longest text; a gpt field learns as many positions
    # E, the paper's d_emb: parameters grow as E + 1 times one block. Of interpolated weights: the number of knots.
    config.model.time_embed_dim = 20
    config.model.sinusoidal_dim = 128  # number of frequencies of the time features
    config.model.time_frequency = 1000.0  # c: radians of the fastest feature over the whole depth
    # Times at which weights are trained: fixed, shifted or mixed (see diffeqformer.depth.grid, docs/ode.md).
    config.model.training_times = "fixed"
    # Steps of depth among which each training step draws, such as 2,4,8, or 2:1,4:3,8:1 with weights; empty: num_steps.
    config.model.training_depths = ""
    # Initialisation of the hypernetwork: published, constant, varying or unit (see diffeqformer.depth.generated).
    config.model.generator_start = "published"
    # The width for which the learning rate is meant: kernels and logits are scaled by base_width / width; 0: by 1.
    config.model.base_width = 0
    # Products with a hypernetwork's P when the compute type is bfloat16: default (the device's: bf16 on TPUs, TF32 on
    # GPUs), or highest: fp32. In float32 all products of the model are fp32.
    config.model.generator_precision = "default"
    config.model.lora_rank = 0  # rank of adapters to frozen weights per layer; 0: no adapters, everything is trained
    config.model.lora_alpha = 8.0  # adapters are scaled by alpha / rank
    config.model.lora_layers = ".*"  # a regular expression: the linear layers that get adapters
    config.model.lora_start = "zero"  # initialisation of adapters: zero or published (see diffeqformer.depth.low_rank)
    config.model.dropout = 0.1  # on the embedding and on each branch's output
    # Type of matrix products; parameters and times are float32. float32 means fp32 on every device.
    config.model.dtype = "bfloat16"
    # What the backward pass recomputes. none: nothing; step: every step, of which the states between are stored;
    # products: every step except for its products with weights and, if splash or cuDNN computes it, its attention;
    # binomial: every step, some of them several times, so that only `snapshots` of the states between steps are stored;
    # reversible: every step, from the state after it, so that none is stored; it needs a reversible solver, such as
    # reversible_euler.
    config.model.remat = "step"
    # States between steps that are stored with the remat binomial, the first among them; with chunks, between these.
    config.model.snapshots = 8
    # Training generates the weights of at most so many steps at a time, of the largest number that divides the steps;
    # 0: of all. Saves memory in many steps, with the remat step, binomial or reversible; see docs/memory.md.
    config.model.generate_chunk = 0

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw, or muon for the blocks' matrices (see diffeqformer.training.muon)
    config.optimizer.learning_rate = 6e-4  # peak rate, after the warm-up
    config.optimizer.weight_decay = 0.1  # decoupled
    # What decays: as_published, everything or matrices (see diffeqformer.training.optimizer.decay_mask).
    config.optimizer.decay = "as_published"
    config.optimizer.beta1 = 0.9  # decay of Adam's first moment, per step; that of Muon's is 0.95
    config.optimizer.beta2 = 0.999  # decay of its second moment
    config.optimizer.epsilon = 1e-8  # added to the second moment's root
    config.optimizer.clip_norm = 1.0  # limit of the gradient's global norm; 0 disables clipping
    # After the warm-up, which is linear from 0: cosine, or wsd: stable, then a linear decay. A run with wsd can be
    # given more steps, and goes on from before its decay.
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_fraction = 0.01  # of cosine: part of the steps
    config.optimizer.warmup_steps = 200  # of wsd
    config.optimizer.decay_fraction = 0.2  # of wsd: part of the steps, at their end
    config.optimizer.final_fraction = 0.1  # part of the peak rate at which the run ends

    config.mesh = ConfigDict()  # number of devices on each axis; -1: the rest
    config.mesh.data = -1  # replicates the parameters, but for a hypernetwork's
    config.mesh.fsdp = 1  # shards the parameters, which are gathered step by step
    config.mesh.tensor = 1  # shards heads, hidden units and the vocabulary

    config.data = ConfigDict()
    config.data.task = "openwebtext"  # a corpus in diffeqformer.data.CORPUS_NAMES or data.module; or a name for files
    config.data.module = ""  # your own Python module that calls diffeqformer.data.corpora.add_corpus
    # Local files to use instead of a corpus: comma-separated names or patterns of text, .jsonl or .parquet files.
    config.data.train_files = ""
    config.data.validation_files = ""  # the same for the validation split
    config.data.text_field = "text"  # of JSON lines, or the column of Parquet files, that has the text
    # What separates documents in plain-text files, such as <|endoftext|>; empty: a file is one document.
    config.data.separator = ""
    config.data.tokenizer = "gpt2"  # bytes, gpt2 or sentencepiece
    config.data.tokenizer_file = ""  # a SentencePiece model; or a folder with GPT-2's files, to avoid the download
    config.data.dir = "token_stores"  # folder of the token stores, one subfolder per task and tokenizer
    config.data.remote = ""  # URL of a folder of token stores (gs://bucket/stores), copied to data.dir before use
    config.data.tfds_dir = ""  # download folder for corpora; by default TensorFlow Datasets' own
    config.data.processes = 0  # number of processes that prepare a store; 0: one per core

    config.log_every = 20  # steps between progress lines
    config.eval_every = 500  # steps between evaluations over the whole validation split
    config.dynamics_every = 0  # evaluations between measurements of spectral radii and clustering; 0: none
    config.profile_steps = ""  # steps to trace for TensorBoard's profiler, such as 100-102; empty: none
    config.checkpoint_every = 500  # steps between checkpoints; of validations at such steps the best is kept
    config.checkpoints_kept = 2  # number of newest checkpoints to keep, beside the one that validated best

    config.sample = ConfigDict()  # the text that is generated at the end of training
    config.sample.prompt = "\n"  # the text that it continues
    config.sample.length = 256  # tokens, including the prompt; at most max_length
    config.sample.temperature = 0.8  # 0 takes the likeliest token
    return config.lock()


REMOVED = {
    "model.state_dtype": "float32",
    "model.weights_dtype": "float32",
    "model.step_features": 0,  # once a boolean; False is equal to 0
    "optimizer.moment_dtype": "float32",
    "on_damage": None,
    "mesh.generator": None,
}
"""Fields that configs once had, and the only value that a saved one may have there; None: any, as no result changes."""


def without_removed(fields: dict) -> dict:
    """The fields of a saved config without those that are `REMOVED`.

    Raises:
        ValueError: if one of these has another value than it may have.
    """
    fields = traverse_util.flatten_dict(fields, sep=".")
    if step := fields.pop("base_step", ""):  # now a part of `base`
        fields["base"] += f"@{step}"
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
    if isinstance(fields["model"]["remat"], bool):  # its first type
        remat = "step" if fields["model"]["remat"] else "none"
        fields = {**fields, "model": {**fields["model"], "remat": remat}}
    fields = without_removed(fields)
    with config.unlocked():
        config.update(fields)
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


def field_names(config: ConfigDict, prefix: str = "") -> list[str]:
    """The dotted names of all fields."""
    names = []
    for name, value in config.items():
        names += field_names(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [prefix + name]
    return names


def get_field(config: ConfigDict, name: str) -> Any:
    """The value of the field with a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def explain() -> str:
    """Every field with its default, and the comment on it in `base_config`."""
    fields, lines = base_config("", "diffeqformer"), ["The fields of a config, with their defaults:"]
    for name, comment in comments().items():
        text = textwrap.fill(comment, 120, initial_indent="    ", subsequent_indent="    ")
        lines.append(f"--config.{name}={get_field(fields, name)!r}\n{text}")
    return "\n".join(lines)


def comments() -> dict[str, str]:
    """The comments on fields in `base_config`, each beside or above its field."""
    found, above = {}, []
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(base_config)).readline):
        if token.type == tokenize.COMMENT:
            above.append(token.string.removeprefix("# "))
        elif token.type == tokenize.NEWLINE:
            field = re.match(r"\s+config\.([\w.]+) = (?!ConfigDict)", token.line)
            if field:
                found[field[1]] = " ".join(above)
            above = []
    return found


def check_fields(config: ConfigDict) -> None:
    """Check that a config has exactly the fields that `base_config` declares, of the same types.

    Raises:
        UserError: for the first field that is missing, unknown or of another type.
    """
    base = base_config("", "diffeqformer")
    ours, theirs = field_names(base), field_names(config)
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            raise UserError(f"config.{name}: this field is missing; start a config from base_config")
        if name not in ours:
            raise UserError(f"config.{name}: there is no such field{did_you_mean(name, ours)}")
        check_type(name, config, base)


def check_type(name: str, config: ConfigDict, base: ConfigDict) -> None:
    """Check that a field has the type that it has in `base`. Whole numbers but the seed must fit into 32 bits."""
    needed, value = type(get_field(base, name)), get_field(config, name)
    if not (type(value) is needed or (needed is float and type(value) is int)):
        raise UserError(f"config.{name}: must be of type {needed.__name__}, but it is {value!r}")
    if needed is int and not abs(value) < 2**31 and name != "seed":
        raise UserError(f"config.{name}: must be between -2**31 and 2**31, but it is {value!r}")


def check_rule(rule: Rule, config: ConfigDict) -> None:
    """Check one of `RULES`."""
    value = get_field(config, rule.field)
    if not rule.holds(value, config):
        hint = did_you_mean(str(value), rule.names)
        raise UserError(f"config.{rule.field}: {rule.says.format(c=config)}, but it is {value!r}{hint}")


def check_model(config: ConfigDict) -> None:
    """Check the part of a saved config that describes the model, which can come from elsewhere.

    What depends on several fields isn't checked, but for the heads: an earlier version may have allowed more.

    Raises:
        UserError: for the first error.
    """
    base = base_config("", "diffeqformer")
    for name in field_names(base):
        if name.startswith("model."):
            check_type(name, config, base)
    for rule in RULES:
        if (rule.field.startswith("model.") and rule.alone) or rule.field == "model.heads":
            check_rule(rule, config)


def check_config(config: ConfigDict, num_devices: int | None, platform: str = "cpu") -> None:
    """Check that a config has the right fields, that every rule holds, and that its mesh fits the devices, if any.

    Raises:
        UserError: for the first error, with its field, the value found and the requirement.
    """
    check_fields(config)
    for rule in RULES:
        check_rule(rule, config)
    if config.model.lora_rank:
        adapted_layers(vector_field(config.model).layers(), config.model.lora_layers, config.model.lora_rank)
    if num_devices is not None:
        positions = config.model.max_length if FIELDS[config.model.field].learned_positions else 0
        check_mesh(config, num_devices, platform, padded_vocabulary(config.model), positions)


def check_tokenizer(config: ConfigDict, tokenizer: Tokenizer) -> None:
    """Check the requirements that depend on the config's opened tokenizer.

    Raises:
        UserError: if the model's vocabulary is too small for it, or the sample's prompt too long or empty.
    """
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"config.model.vocab_size: must not be below the {tokenizer.vocab_size:,} ids of the tokenizer "
            f"{tokenizer.name}, but it is {config.model.vocab_size}"
        )
    if not 1 <= len(tokenizer.encode(config.sample.prompt)) < config.sample.length:
        raise UserError(
            f"config.sample.prompt: must have at least one token and fewer than sample.length "
            f"({config.sample.length}), but it is {config.sample.prompt!r}"
        )


def check_overrides(arguments: list[str]) -> None:
    """Check that every `--config.FIELD=VALUE` among the command's arguments names a field, with a value of its type.

    Raises:
        UserError: for one that doesn't, with a suggested field or the required type.
    """
    base = base_config("", "diffeqformer")
    known = {f"config.{name}": get_field(base, name) for name in field_names(base)}
    parsers = {bool: flags.BooleanParser().parse, int: int, float: float, str: str}
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, text = argument.lstrip("-").partition("=")
        if not (argument.startswith("-") and name.startswith("config.")):
            continue
        if name in ("config.model", "config.model.kind"):  # a config's name and learning rate belong to its model
            raise UserError(f"{name}: choose the model in the config's name, for example --config=tiny:gpt")
        if name not in known:
            raise UserError(f"{name}: there is no such field{did_you_mean(name, known)}")
        kind = type(known[name])
        if not equals:  # --config.FIELD VALUE, or a boolean without a value
            text = "true" if kind is bool else following
        try:
            parsers[kind](text)
        except ValueError:
            raise UserError(f"{name}: must be of type {kind.__name__}, but it is {text!r}") from None


def given_fields(arguments: list[str]) -> set[str]:
    """The fields that `--config.FIELD=VALUE` among the command's arguments set."""
    options = [argument.lstrip("-") for argument in arguments if argument.startswith("-")]
    names = {option.removeprefix("no").partition("=")[0] for option in options}
    return {name.removeprefix("config.") for name in names if name.startswith("config.")}


def check_used(arguments: list[str], config: ConfigDict) -> None:
    """Check that no `--config.FIELD=VALUE` among the command's arguments sets a field which the run would ignore.

    Args:
        arguments: those that `check_overrides` has checked.
        config: the config that they make.

    Raises:
        UserError: for the first such field, or for one that is missing, unknown or of another type.
    """
    check_fields(config)
    if config.model.kind not in MODELS or config.model.field not in FIELDS:
        return  # `check_config` refuses it
    given = given_fields(arguments)
    for fields, condition, why in IGNORED:
        for field in fields.split():
            if field in given and condition(config):
                raise UserError(f"config.{field}: must be left out, because {why.format(c=config)}")


OF_ONE_HOST = tuple(
    "data.module data.train_files data.validation_files data.text_field data.separator data.tokenizer_file data.dir "
    "data.remote data.tfds_dir data.processes".split()
)
"""Fields that may differ between the processes of a run."""


CHANGEABLE = OF_ONE_HOST + tuple(
    "name kernels microbatches model.remat model.snapshots model.generate_chunk mesh. log_every eval_every "
    "dynamics_every profile_steps checkpoint_every checkpoints_kept sample.".split()
)
"""Fields (or their prefixes) that may differ when a run is resumed, because they affect the result by rounding at most.
The text is identified by the SHA-256 of its ids instead."""


def place(path: str) -> str:
    """A folder's path, relative to the current folder or a URL, in the one way of writing it; empty if it is empty."""
    scheme, mark, rest = path.rpartition("://")
    return scheme + mark + (os.path.normpath(rest) if mark else os.path.realpath(rest)) if path else ""
