"""The requirements on a config as a table: on each field by itself, then on several together."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from diffeqformer.config_fields import CONFIG_FIELDS, traced_steps
from diffeqformer.data.texts import CORPORA
from diffeqformer.depth.depths import chunk_length, left_out_layers, longest_grid, trained_depths
from diffeqformer.depth.weights import DepthWeights
from diffeqformer.solvers import SOLVERS
from diffeqformer.solvers.solver import x_alone
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


def decay_start(config: ConfigDict) -> int | None:
    """The step after which the learning rate of the schedule `wsd` decays; None for another schedule."""
    if config.optimizer.schedule != "wsd":
        return None
    return config.steps - round(config.optimizer.decay_fraction * config.steps)


def weights_of_kind(config: ConfigDict) -> type[DepthWeights]:
    """The class of the config's depth weights."""
    return MODELS[config.model.kind].weights


def remembers(config: ConfigDict) -> bool:
    """Whether a step of the config's solver depends on the one before."""
    solver = SOLVERS[config.model.solver]
    return solver.begin is not x_alone and not solver.reversible


def rotated(config: ConfigDict) -> int:
    """The number of a head's entries that positions rotate in pairs, so that it must be even."""
    rotary = vector_field(config.model).rotary
    return rotary.rotated if rotary else 0


def chunks_have_steps(config: ConfigDict) -> bool:
    """Whether chunks of weights have more than one step, in training and in the validation, if they may."""
    model, most = config.model, config.model.generate_chunk
    depths = trained_depths(model)
    lengths = {model.num_steps, *depths, *(longest_grid(model, depth) for depth in depths)}
    return all(steps == 1 or chunk_length(steps, most) > 1 for steps in lengths)


def layers_suffice(config: ConfigDict) -> bool:
    """Whether every number of layers in training is that of the model, less some that it can leave out."""
    most = len(left_out_layers(config.model.left_out))
    return all(0 <= config.model.num_steps - depth <= most for depth in trained_depths(config.model))


OF_HEADS = ("model.heads", "model.head_width", "model.key_value_heads", "model.rotary_fraction")
"""Fields whose rules a saved config must satisfy, too, even those that depend on other fields."""

NO_GENERATOR = "for model.kind {c.model.kind}, which has no hypernetwork"
REVERSIBLE = ", ".join(name for name, solver in SOLVERS.items() if solver.reversible)
EVERY_STEP = ", ".join(MODELS["gpt"].solvers(unit_steps=True))

# fmt: off
RULES = [
    *(
        Rule(name, lambda value, _, holds=values.holds: holds(value), values.says, values.names, alone=True)
        for name, _, values, *_ in CONFIG_FIELDS
        if values
    ),
    Rule("optimizer.warmup_steps", lambda v, c: c.optimizer.schedule != "wsd" or v <= decay_start(c),
        "must not be above the steps before the decay, of which config.steps ({c.steps}) and optimizer.decay_fraction "
        "({c.optimizer.decay_fraction}) leave fewer"),
    Rule("model.field", lambda v, c: v == (MODELS[c.model.kind].field or v),
        "must be the same as model.kind, {c.model.kind}"),
    Rule("model.solver", lambda v, c: len(SOLVERS[v].nodes) == 1 or not weights_of_kind(c).fixed_depth,
        f"must take weights once in each step, as model.kind {{c.model.kind}} has one set per step (such as "
        f"{EVERY_STEP})"),
    Rule("model.span", lambda v, c: not v or not MODELS[c.model.kind].vanilla,
        "must be 0 for model.kind {c.model.kind}, all of whose steps have the length 1"),
    Rule("model.span", lambda v, c: v or not weights_of_kind(c).continuous,
        "must be a positive number for model.kind {c.model.kind}, whose depth is a time from 0 to 1"),
    Rule("model.solver", lambda v, c: not SOLVERS[v].reversible or c.model.span,
        "must not be reversible where every step has the length 1 (model.span is 0)"),
    Rule("kernels", lambda v, c: v != "pallas" or weights_of_kind(c).generates_kernels,
        "must be auto or xla for model.kind {c.model.kind}, whose kernels no hypernetwork generates"),
    Rule("model.training_times", lambda v, c: v == "fixed" or weights_of_kind(c).continuous,
        f"must be fixed {NO_GENERATOR}"),
    Rule("model.left_out", lambda v, c: not v or (weights_of_kind(c).fixed_depth and not c.model.span),
        "must be empty for model.kind {c.model.kind}, which has no weights per layer whose steps have the length 1"),
    Rule("model.left_out", lambda v, c: not v or max(left_out_layers(v)) < c.model.num_steps > len(left_out_layers(v)),
        "must be layers of the {c.model.num_steps}, counted from 0, and not all of them"),
    Rule("model.training_depths", lambda v, c: not v or not weights_of_kind(c).fixed_depth or c.model.left_out,
        "must be empty for model.kind {c.model.kind}, which has weights for one number of steps, or come with "
        "model.left_out"),
    Rule("model.training_depths", lambda v, c: not (v and c.model.left_out) or layers_suffice(c),
        "must be at most the {c.model.num_steps} layers, and at least those that model.left_out leaves"),
    Rule("model.training_times", lambda v, c: v == "fixed" or not remembers(c),
        "must be fixed for model.solver {c.model.solver}, which extrapolates from the step before, as the first step "
        "of a moved grid can be much shorter than the second"),
    Rule("profile_steps", lambda v, c: not v or 1 <= traced_steps(v).start < traced_steps(v).stop <= c.steps + 1,
        "must be steps of the run, which has {c.steps}, the first one first"),
    Rule("model.lora_rank", lambda v, c: not v or weights_of_kind(c).fixed_depth,
        "must be 0 for model.kind {c.model.kind}, which has no weights per layer to adapt"),
    Rule("model.lora_layers", lambda v, c: v == ".*" or c.model.lora_rank, "must be left out without model.lora_rank"),
    Rule("model.lora_rank", lambda v, c: not v or c.base,
        "must come with config.base, the run whose weights it adapts"),
    Rule("teacher_weight", lambda v, c: not v or c.teacher or c.base,
        "must come with config.teacher or config.base, whose model teaches"),
    Rule("teacher", lambda v, c: not v or c.teacher_weight, "must come with a config.teacher_weight above 0"),
    Rule("model.base_width",
        lambda v, c: not v or weights_of_kind(c).generates_kernels or c.model.kind == "discretized",
        "must be 0 for model.kind {c.model.kind}, whose kernels no hypernetwork generates"),
    Rule("model.remat", lambda v, c: v != "reversible" or SOLVERS[c.model.solver].reversible,
        f"must not be reversible for model.solver {{c.model.solver}}; a solver that can be undone is one of "
        f"{REVERSIBLE}"),
    Rule("model.generate_chunk", lambda v, c: not v or weights_of_kind(c).continuous, f"must be 0 {NO_GENERATOR}"),
    Rule("microbatches", lambda v, c: v or not (c.model.generate_chunk or c.model.left_out),
        "must be at least 1 with model.generate_chunk or model.left_out, whose memory isn't known beforehand"),
    Rule("model.generate_chunk", lambda v, c: not v or not remembers(c),
        "must be 0 for model.solver {c.model.solver}, which remembers more than states"),
    Rule("model.generate_chunk", lambda v, c: v < 2 or chunks_have_steps(c),
        "must be 0, 1, or no less than a divisor above 1 of model.num_steps and the steps at every depth of training "
        "(of shifted grids, which have one more, too), or else each chunk would be one step"),
    Rule("kernels", lambda v, c: v != "pallas" or not c.model.generate_chunk,
        "must be auto or xla with model.generate_chunk ({c.model.generate_chunk}), which adds up each P's gradient"),
    Rule("model.remat", lambda v, c: v in ("step", "binomial", "reversible") or not c.model.generate_chunk,
        "must be step, binomial or reversible with model.generate_chunk ({c.model.generate_chunk})"),
    Rule("data.task", lambda v, c: v in CORPORA or c.data.module or c.data.train_files,
        f"must be one of {', '.join(CORPORA)}, one that config.data.module adds, or a name for your "
        "config.data.train_files"),
    Rule("data.train_files", lambda v, c: not v or c.data.validation_files, "must come with data.validation_files"),
    Rule("data.validation_files", lambda v, c: not v or c.data.train_files, "must come with data.train_files"),
    Rule("data.tokenizer_file", lambda v, c: v or c.data.tokenizer not in ("sentencepiece", "huggingface"),
        "must name the file of a SentencePiece model, or a tokenizer.json"),
    Rule("data.tokenizer_file", lambda v, c: not v or c.data.tokenizer != "bytes",
        "must be empty for the tokenizer bytes, which needs none"),
    Rule("model.heads", lambda v, c: c.model.head_width or c.model.width % v == 0,
        "must divide model.width ({c.model.width})"),
    Rule("model.rotary_fraction", lambda v, c: c.model.field != "neox" or (rotated(c) > 0 and rotated(c) % 2 == 0),
        "must leave an even number of entries of each head to rotate"),
    Rule("model.heads", lambda v, c: rotated(c) % 2 == 0,
        "must leave an even width for each head, whose halves are rotated (model.width is {c.model.width}, "
        "model.head_width {c.model.head_width})"),
    Rule("model.key_value_heads", lambda v, c: not v or c.model.heads % v == 0,
        "must divide model.heads ({c.model.heads}), which share them evenly"),
    Rule("sequence_length", lambda v, c: v <= c.model.max_length,
        "must not exceed the number of positions, model.max_length ({c.model.max_length})"),
]
# fmt: on
"""Every requirement on a config, in the order in which they are checked."""
