"""The requirements on the fields of a config (`diffeqformer.config`), as a table."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from diffeqformer.data import CORPUS_NAMES, TASK_NAME, TASK_NAME_SAYS
from diffeqformer.data.tokenizers import TOKENIZERS
from diffeqformer.depth.depths import MOST_STEPS, are_depths, chunk_length, longest_grid, trained_depths
from diffeqformer.depth.generated import GENERATOR_STARTS
from diffeqformer.depth.grid import TRAINING_TIMES
from diffeqformer.depth.low_rank import ADAPTER_STARTS
from diffeqformer.depth.projection import KERNELS
from diffeqformer.fields import FIELDS
from diffeqformer.fields.layers import PRECISIONS
from diffeqformer.solvers import SOLVERS
from diffeqformer.solvers.solver import REMAT, x_alone
from diffeqformer.transformer import MODELS, vector_field


class Rule(NamedTuple):
    """One requirement on a field's value, given the whole config.

    `says` may hold {}-fields, filled from the config `c`. `names` are the possible values, if they are names. `alone`:
    it looks at this value alone.
    """

    field: str
    holds: Callable[[Any, ConfigDict], bool]
    says: str
    names: Iterable[str] = ()
    alone: bool = False


def _every(fields: str, holds: Callable[[Any], bool], says: str) -> list[Rule]:
    """The same requirement for each of several fields."""
    return [Rule(field, lambda value, _: holds(value), says, alone=True) for field in fields.split()]


def _without_hypernetwork(field: str, holds: Callable[[Any], bool], must_be: str) -> Rule:
    return Rule(
        field,
        lambda value, c: holds(value) or MODELS[c.model.kind].weights.generated,
        f"must be {must_be} for model.kind {{c.model.kind}}, which has no hypernetwork",
    )


def traced_steps(text: str) -> range:
    """The steps of training in a text such as "100-102", which are three, or "100"; empty: none.

    Raises:
        ValueError: if it is no such text.
    """
    if not re.fullmatch(r"(\d+(-\d+)?)?", text):
        raise ValueError(text)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if text else range(0)


def _are_steps(text: str) -> bool:
    """Whether `traced_steps` can read a text."""
    try:
        traced_steps(text)
    except ValueError:
        return False
    return True


SCHEDULES = ("cosine", "wsd")


def decay_start(config: ConfigDict) -> int | None:
    """The step after which the learning rate of the schedule `wsd` decays; None for another schedule."""
    if config.optimizer.schedule != "wsd":
        return None
    return config.steps - round(config.optimizer.decay_fraction * config.steps)


def _one_of(field: str, names: Iterable[str]) -> Rule:
    return Rule(field, lambda value, _: value in names, f"must be one of {', '.join(names)}", names, alone=True)


def remembers(config: ConfigDict) -> bool:
    """Whether a step of the config's solver depends on the one before."""
    solver = SOLVERS[config.model.solver]
    return solver.begin is not x_alone and not solver.reversible


RULES = [
    *_every(
        "steps batch_size microbatches model.width model.heads model.mlp model.num_steps model.vocab_size "
        "model.vocab_multiple model.max_length model.time_embed_dim model.sinusoidal_dim log_every eval_every "
        "checkpoint_every checkpoints_kept model.snapshots",
        lambda v: v >= 1,
        "must be at least 1",
    ),
    *_every("sequence_length sample.length", lambda v: v >= 2, "must be at least 2"),
    *_every("model.num_steps", lambda v: v <= MOST_STEPS, f"must be at most {MOST_STEPS:,}"),
    *_every("name", lambda v: 0 < len(v) <= 200 and v.isprintable(), "must be printable text of 1 to 200 characters"),
    *_every("seed", lambda v: 0 <= v < 2**32, "must be at least 0 and below 2**32"),
    *_every(
        "optimizer.learning_rate optimizer.epsilon model.time_frequency model.lora_alpha model.span",
        lambda v: 0 < v < math.inf,
        "must be a positive number",
    ),
    *_every(
        "optimizer.weight_decay optimizer.clip_norm sample.temperature",
        lambda v: 0 <= v < math.inf,
        "must not be negative",
    ),
    *_every("model.dropout optimizer.beta1 optimizer.beta2", lambda v: 0 <= v < 1, "must be at least 0 and below 1"),
    _one_of("optimizer.name", ("adamw", "muon")),
    _one_of("optimizer.schedule", SCHEDULES),
    Rule(
        "optimizer.warmup_steps",
        lambda v, c: v <= decay_start(c) if c.optimizer.schedule == "wsd" else True,
        "must not be above the steps before the decay, of which config.steps ({c.steps}) and optimizer.decay_fraction "
        "({c.optimizer.decay_fraction}) leave fewer",
    ),
    *_every(
        "optimizer.warmup_fraction optimizer.decay_fraction optimizer.final_fraction",
        lambda v: 0 <= v <= 1,
        "must be between 0 and 1",
    ),
    _one_of("kernels", KERNELS),
    _one_of("model.kind", MODELS),
    _one_of("model.field", FIELDS),
    Rule(
        "model.field",
        lambda v, c: v == (MODELS[c.model.kind].field or v),
        "must be the same as model.kind, {c.model.kind}",
    ),
    _one_of("model.solver", SOLVERS),
    Rule(
        "model.solver",
        lambda v, c: len(SOLVERS[v].nodes) == 1 or not MODELS[c.model.kind].weights.fixed_depth,
        "must take weights once in each step, as model.kind {c.model.kind} has one set per step "
        f"(such as {', '.join(MODELS['gpt'].solvers(unit_steps=True))})",
    ),
    Rule(
        "model.unit_steps",
        lambda v, c: v or not MODELS[c.model.kind].vanilla,
        "must be True for model.kind {c.model.kind}",
    ),
    Rule(
        "model.unit_steps",
        lambda v, c: not v or not MODELS[c.model.kind].weights.generated,
        "must be False for model.kind {c.model.kind}, whose depth is a time from 0 to 1",
    ),
    Rule(
        "model.span",
        lambda v, c: v == 1 or not c.model.unit_steps,
        "must be 1 where every step has the length 1 (model.unit_steps)",
    ),
    Rule(
        "model.solver",
        lambda v, c: not SOLVERS[v].reversible or not c.model.unit_steps,
        "must not be reversible where every step has the length 1 (model.unit_steps)",
    ),
    Rule(
        "kernels",
        lambda v, c: v != "pallas" or MODELS[c.model.kind].weights.generates_kernels,
        "must be auto or xla for model.kind {c.model.kind}, whose kernels no hypernetwork generates",
    ),
    _without_hypernetwork("model.training_times", lambda v: v == "fixed", "fixed"),
    _one_of("model.training_times", TRAINING_TIMES),
    *_every(
        "model.training_depths",
        are_depths,
        f"must be numbers of steps up to {MOST_STEPS:,}, such as 2,4,8 or, weighted, 2:1,4:3,8:1",
    ),
    Rule(
        "model.training_depths",
        lambda v, c: not v or not MODELS[c.model.kind].weights.fixed_depth,
        "must be left out for model.kind {c.model.kind}, which has weights for one number of steps",
    ),
    Rule(
        "model.training_times",
        lambda v, c: v != "mixed" or max(trained_depths(c.model)) > 2,
        "must be fixed or shifted, since mixed moves grids of more than two steps only",
    ),
    Rule(
        "model.training_times",
        lambda v, c: v == "fixed" or not remembers(c),
        "must be fixed for model.solver {c.model.solver}, which extrapolates from the step before, as the first step "
        "of a moved grid can be much shorter than the second",
    ),
    *_every(
        "dynamics_every optimizer.warmup_steps model.generate_chunk model.lora_rank data.processes model.base_width",
        lambda v: v >= 0,
        "must not be negative",
    ),
    *_every("profile_steps", _are_steps, "must be the first and the last step to trace, such as 100-102, or empty"),
    Rule(
        "profile_steps",
        lambda v, c: not v or 1 <= traced_steps(v).start < traced_steps(v).stop <= c.steps + 1,
        "must be steps of the run, which has {c.steps}, the first one first",
    ),
    Rule(
        "model.lora_rank",
        lambda v, c: not v or MODELS[c.model.kind].weights.fixed_depth,
        "must be 0 for model.kind {c.model.kind}, which has no weights per layer to adapt",
    ),
    Rule("model.lora_layers", lambda v, c: v == ".*" or c.model.lora_rank, "must be left out without model.lora_rank"),
    Rule(
        "model.lora_rank",
        lambda v, c: not v or c.base,
        "must come with config.base, the run whose weights it adapts",
    ),
    _one_of("model.lora_start", ADAPTER_STARTS),
    _one_of("model.generator_start", GENERATOR_STARTS),
    Rule(
        "model.base_width",
        lambda v, c: not v or MODELS[c.model.kind].weights.generates_kernels or c.model.kind == "discretized",
        "must be 0 for model.kind {c.model.kind}, whose kernels no hypernetwork generates",
    ),
    *_every(
        "model.dtype",
        lambda v: v in ("float32", "bfloat16"),
        "must be float32 or bfloat16",
    ),
    _one_of("model.generator_precision", PRECISIONS),
    Rule(
        "model.generator_precision",
        lambda v, c: v == "default" or MODELS[c.model.kind].weights.generates_kernels,
        "must be default for model.kind {c.model.kind}, whose kernels no hypernetwork generates",
    ),
    Rule(
        "model.generator_precision",
        lambda v, c: v == "default" or c.model.dtype == "bfloat16",
        "must be default for model.dtype {c.model.dtype}, in which all products are at the highest",
    ),
    _one_of("model.remat", REMAT),
    Rule(
        "model.remat",
        lambda v, c: v != "reversible" or SOLVERS[c.model.solver].reversible,
        "must not be reversible for model.solver {c.model.solver}; a solver that can be undone is one of "
        f"{', '.join(name for name, solver in SOLVERS.items() if solver.reversible)}",
    ),
    _without_hypernetwork("model.generate_chunk", lambda v: not v, "0"),
    Rule(
        "model.generate_chunk",
        lambda v, c: not v or not remembers(c),
        "must be 0 for model.solver {c.model.solver}, which remembers more than states",
    ),
    Rule(
        "model.generate_chunk",
        lambda v, c: (
            v < 2
            or all(
                steps == 1 or chunk_length(steps, v) > 1
                for steps in (
                    c.model.num_steps,  # of the validation
                    *(n for depth in trained_depths(c.model) for n in (depth, longest_grid(c.model, depth))),
                )
            )
        ),
        "must be 0, 1, or no less than a divisor above 1 of model.num_steps and the steps at every depth of training "
        "(of shifted grids, which have one more, too), or else each chunk would be one step",
    ),
    Rule(
        "kernels",
        lambda v, c: v != "pallas" or not c.model.generate_chunk,
        "must be auto or xla with model.generate_chunk ({c.model.generate_chunk}), which adds up each P's gradient",
    ),
    Rule(
        "model.remat",
        lambda v, c: v in ("step", "binomial", "reversible") or not c.model.generate_chunk,
        "must be step, binomial or reversible with model.generate_chunk ({c.model.generate_chunk})",
    ),
    _one_of("optimizer.decay", ("as_published", "everything", "matrices")),
    Rule(
        "data.task",
        lambda v, c: v in CORPUS_NAMES or c.data.module or c.data.train_files,
        f"must be one of {', '.join(CORPUS_NAMES)}, one that config.data.module adds, or a name for your "
        "config.data.train_files",
    ),
    *_every("data.task", lambda v: re.fullmatch(TASK_NAME, v), TASK_NAME_SAYS),
    Rule("data.train_files", lambda v, c: not v or c.data.validation_files, "must come with data.validation_files"),
    Rule("data.validation_files", lambda v, c: not v or c.data.train_files, "must come with data.train_files"),
    *_every("data.text_field", bool, "must name the field or column that has the text"),
    _one_of("data.tokenizer", TOKENIZERS),
    Rule(
        "data.tokenizer_file",
        lambda v, c: v or c.data.tokenizer != "sentencepiece",
        "must name the file of a SentencePiece model",
    ),
    Rule(
        "data.tokenizer_file",
        lambda v, c: not v or c.data.tokenizer != "bytes",
        "must be empty for the tokenizer bytes, which needs none",
    ),
    *_every(
        "data.dir data.train_files data.validation_files data.tokenizer_file",
        lambda v: "://" not in v,
        "must be on this machine's disk, and not a URL; data.remote takes a URL of token stores",
    ),
    *_every("data.remote", lambda v: not v or "://" in v, "must be a URL such as gs://bucket/stores, or empty"),
    Rule("model.heads", lambda v, c: c.model.width % v == 0, "must divide model.width ({c.model.width})"),
    Rule(
        "model.heads",
        lambda v, c: not FIELDS[c.model.field].rotary or c.model.width // v % 2 == 0,
        "must leave an even width for each head, whose halves are rotated (model.width is {c.model.width})",
    ),
    *(
        Rule(
            field,
            lambda v, c: v <= c.model.max_length,
            "must not exceed the number of positions, model.max_length ({c.model.max_length})",
        )
        for field in ("sequence_length", "sample.length")
    ),
]
"""Every requirement on a config, in the order in which they are checked."""


class Ignored(NamedTuple):
    """Fields that a run doesn't use if its config satisfies a condition.

    `why` may hold {}-fields, filled from the config `c`.
    """

    fields: str
    condition: Callable[[ConfigDict], bool]
    why: str


IGNORED = [
    Ignored(
        "model.time_embed_dim",
        lambda c: not (c.base or MODELS[c.model.kind].weights.generated),
        "model.kind {c.model.kind} has no hypernetwork",
    ),
    Ignored(
        "model.sinusoidal_dim model.time_frequency",
        lambda c: not (c.base or MODELS[c.model.kind].weights.sinusoidal),
        "model.kind {c.model.kind} reads no sines of the time",
    ),
    Ignored(
        "kernels",
        lambda c: c.base and (c.model.kind == "discretized" or c.model.lora_rank),
        "layers and adapters generate no weights",
    ),
    Ignored(
        "model.generator_start kernels",
        lambda c: not c.base and not MODELS[c.model.kind].weights.generates_kernels,
        "model.kind {c.model.kind} generates no kernels",
    ),
    Ignored(
        "data.tfds_dir",
        lambda c: c.data.train_files or c.data.task == "python_stdlib",
        "this text doesn't come from TensorFlow Datasets",
    ),
    Ignored("data.text_field data.separator", lambda c: not c.data.train_files, "this text doesn't come from files"),
    Ignored("model.lora_alpha model.lora_layers model.lora_start", lambda c: not c.model.lora_rank, "lora_rank is 0"),
    Ignored(
        "model.norm_of_norm",
        lambda c: not c.base and (MODELS[c.model.kind].vanilla or not hasattr(vector_field(c.model), "norm_of_norm")),
        "model.kind {c.model.kind} with the block of model.field {c.model.field} has no such norm",
    ),
    Ignored("model.snapshots", lambda c: c.model.remat != "binomial", "model.remat is {c.model.remat}"),
    Ignored("optimizer.warmup_fraction", lambda c: c.optimizer.schedule == "wsd", "wsd takes optimizer.warmup_steps"),
    Ignored(
        "optimizer.warmup_steps optimizer.decay_fraction",
        lambda c: c.optimizer.schedule != "wsd",
        "optimizer.schedule is {c.optimizer.schedule}; give optimizer.schedule=wsd as well",
    ),
    Ignored("optimizer.decay", lambda c: not c.optimizer.weight_decay, "optimizer.weight_decay is 0"),
]
"""What a command line may not set, because nothing would come of it. A file may: it serves several kinds of model. With
a base, the model's fields are the base's, and another value is refused (`diffeqformer.training.finetune.inherit`)."""
