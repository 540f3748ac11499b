"""Every field of a config, one row each: look fields up here, or with `--help_config`.

What several fields must satisfy together is in `diffeqformer.rules`.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict

from diffeqformer.data.tokenizers import TOKENIZERS
from diffeqformer.depth.depths import MOST_STEPS, left_out_layers, shares_of_depths
from diffeqformer.depth.generated import GENERATOR_STARTS
from diffeqformer.depth.grid import TRAINING_TIMES
from diffeqformer.depth.low_rank import ADAPTER_STARTS
from diffeqformer.depth.projection import KERNELS
from diffeqformer.fields import FIELDS
from diffeqformer.fields.llama import BIASES
from diffeqformer.fields.rotary import read_scaling
from diffeqformer.solvers import SOLVERS
from diffeqformer.solvers.solver import REMAT
from diffeqformer.transformer import MODELS


class Values(NamedTuple):
    """A requirement on a field's value, whatever the other fields are. `names` are all values, if they are names."""

    holds: Callable[[Any], bool]
    says: str
    names: Iterable[str] = ()


def at_least(least: int) -> Values:
    return Values(lambda value: value >= least, f"must be at least {least}")


def one_of(names: Iterable[str]) -> Values:
    return Values(lambda value: value in names, f"must be one of {', '.join(names)}", names)


def traced_steps(text: str) -> range:
    """The steps of training in a text such as "100-102", which are three, or "100"; empty: none. Or a ValueError."""
    if not re.fullmatch(r"(\d+(-\d+)?)?", text):
        raise ValueError(text)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if text else range(0)


def readable(read: Callable[[str], Any], says: str) -> Values:
    """Texts that a function can read."""

    def reads(text):
        with contextlib.suppress(ValueError):
            read(text)
            return True
        return False

    return Values(reads, says)


TRACKERS = ("tensorboard", "wandb", "trackio")
KIND = Values(
    lambda v: v in MODELS, f"must be one of {', '.join(MODELS)}, or recipe after a config's name", (*MODELS, "recipe")
)
NOT_NEGATIVE = Values(lambda v: 0 <= v < math.inf, "must not be negative")
POSITIVE = Values(lambda v: 0 < v < math.inf, "must be a positive number")
BELOW_ONE = Values(lambda v: 0 <= v < 1, "must be at least 0 and below 1")
FRACTION = Values(lambda v: 0 <= v <= 1, "must be between 0 and 1")
PRINTABLE = Values(lambda v: 0 < len(v) <= 200 and v.isprintable(), "must be printable text of 1 to 200 characters")
NUM_STEPS = Values(lambda v: 0 < v <= MOST_STEPS, f"must be at least 1 and at most {MOST_STEPS:,}")
DEPTHS = readable(
    shares_of_depths, f"must be numbers of steps up to {MOST_STEPS:,}, such as 2,4,8 or, weighted, 2:1,4:3,8:1"
)
LAYERS = readable(left_out_layers, "must be different layers, counted from 0, such as 16,17,14, or empty")
TRACE = readable(traced_steps, "must be the first and the last step to trace, such as 100-102, or empty")
SCALING = readable(
    read_scaling, "must be four positive numbers, the second below the third, such as 8,1,4,8192, or empty"
)
TRACKER = Values(
    lambda v: len({*v.split(",")} & {*TRACKERS}) == len(v.split(",")),
    f"must be one of {', '.join(TRACKERS)}, or several, such as tensorboard,wandb",
)
TASK_NAME = Values(
    lambda v: re.fullmatch(r"\w[\w.-]{0,99}", v),
    "must be a name of letters, digits, dots, hyphens and underscores, at most 100 of them",
)
LOCAL = Values(
    lambda v: "://" not in v, "must be on this machine's disk, and not a URL; data.remote takes a URL of token stores"
)


class Unused(NamedTuple):
    """A case in which a run doesn't use a field, so that a command line may not set it.

    A file may: it serves other models, too.

    holds: (config, name of the field) -> whether it is the case.
    why: may hold {}-fields, filled from the config `c`.
    """

    holds: Callable[[ConfigDict, str], Any]
    why: str


def block_lacks(config: ConfigDict, name: str) -> bool:
    """Whether the block doesn't read a field of the model. With a base, which decides the block, it may."""
    block = FIELDS[config.model.field]
    read = {*block.settings, *(field.name for field in dataclasses.fields(block))}
    return not config.base and name.removeprefix("model.") not in read


def may_have(config: ConfigDict, what: str) -> bool:
    """Whether the config's depth weights have a property. With a base, which decides, they may."""
    return bool(config.base) or getattr(MODELS[config.model.kind].weights, what)


ADAPTS = Unused(
    lambda c, _: c.base and (c.model.kind == "discretized" or c.model.lora_rank),
    "layers and adapters generate no weights",
)
NO_KERNELS = Unused(lambda c, _: not may_have(c, "generates_kernels"), "model.kind {c.model.kind} generates no kernels")
NO_HYPERNETWORK = Unused(lambda c, _: not may_have(c, "continuous"), "model.kind {c.model.kind} has no hypernetwork")
NO_SINES = Unused(lambda c, _: not may_have(c, "sinusoidal"), "model.kind {c.model.kind} reads no sines of the time")
NO_SUCH_NORM = Unused(
    lambda c, name: block_lacks(c, name) or (not c.base and MODELS[c.model.kind].vanilla),
    "model.kind {c.model.kind} with the block of model.field {c.model.field} has no such norm",
)
NOT_READ = Unused(block_lacks, "the block of model.field {c.model.field} doesn't read it")
NO_ADAPTERS = Unused(lambda c, _: not c.model.lora_rank, "lora_rank is 0")
NOT_BINOMIAL = Unused(lambda c, _: c.model.remat != "binomial", "model.remat is {c.model.remat}")
NO_DECAY = Unused(lambda c, _: not c.optimizer.weight_decay, "optimizer.weight_decay is 0")
IS_WSD = Unused(lambda c, _: c.optimizer.schedule == "wsd", "wsd takes optimizer.warmup_steps")
NOT_WSD = Unused(
    lambda c, _: c.optimizer.schedule != "wsd",
    "optimizer.schedule is {c.optimizer.schedule}; give optimizer.schedule=wsd as well",
)
NO_FILES = Unused(lambda c, _: not c.data.train_files, "this text doesn't come from files")


class ConfigField(NamedTuple):
    """One field.

    name: dotted.
    default: also says the type.
    values: what any value of it must satisfy, if anything.
    help: unit, consequence or choices.
    change: what may change it after a run began. resuming: it affects results by rounding at most; host: even each
        process of a run may have its own (the text is identified by the SHA-256 of its ids); decay: it decides the end
        of the schedule wsd, and may change while that hasn't begun; nothing: nothing.
    base: where a run from a base takes it, if it is a field of the model. base: from there; run: from its own config;
        either: from its own config if that sets it.
    unused: the cases in which it isn't used.
    """

    name: str
    default: bool | int | float | str
    values: Values | None
    help: str
    change: Literal["nothing", "decay", "resuming", "host"] = "nothing"
    base: Literal["base", "run", "either"] = "base"
    unused: tuple[Unused, ...] = ()


# fmt: off
CONFIG_FIELDS = [
    ConfigField("name", "", PRINTABLE, "also names the folder of its runs", change="resuming"),
    ConfigField("base", "", None,
        "Folder of a run to start from, which also sets the model's shape; empty: random weights. runs/a@1000 is its "
        "checkpoint of that training step, and runs/a@best that of the best validation, instead of the newest."),
    ConfigField("teacher", "", None,
        "Folder of a run with the same tokenizer whose distributions of the next token this one learns, too, named as "
        "in base; empty: the base's."),
    ConfigField("teacher_weight", 0.0, NOT_NEGATIVE,
        "adds this times KL(teacher || model) in nats to the loss of training, also as it is shown; 0: there is no "
        "teacher"),
    ConfigField("seed", 0, Values(lambda v: 0 <= v < 2**32, "must be at least 0 and below 2**32"),
        "of initial parameters, order of data and dropout"),
    ConfigField("steps", 20_000, at_least(1), "optimizer steps", change="decay"),
    ConfigField("batch_size", 512, at_least(1), "sequences in one step, over all devices"),
    ConfigField("kernels", "auto", one_of(KERNELS),
        "what computes with a hypernetwork's P: auto, pallas or xla (see docs/scaling.md)", change="resuming",
        unused=(ADAPTS, NO_KERNELS)),
    ConfigField("microbatches", 1, NOT_NEGATIVE,
        "parts of the batch, processed one after the other to save memory for activations; 0: the fewest that fit the "
        "devices", change="resuming"),
    ConfigField("sequence_length", 1024, at_least(2), "tokens in one sequence"),

    # The model
    ConfigField("model.kind", "diffeqformer", KIND,
        "diffeqformer, alternative, looped, interpolated, discretized, shared, gpt, llama or neox"),
    ConfigField("model.field", "gpt", one_of(FIELDS), "the type of block: gpt, llama or neox"),
    ConfigField("model.norm_of_norm", True, None,
        "The second norm reads the first one's output, as published. Applies to a llama field, except in the kind "
        "llama.", unused=(NO_SUCH_NORM,)),
    ConfigField("model.width", 768, at_least(1), "D, width of the residual stream"),
    ConfigField("model.heads", 12, at_least(1), "attention heads; must divide the width, unless head_width is given"),
    ConfigField("model.head_width", 0, NOT_NEGATIVE, "K, width of a head; 0: width / heads"),
    ConfigField("model.key_value_heads", 0, NOT_NEGATIVE,
        "of a llama field: keys and values, each shared by as many heads; 0: heads", unused=(NOT_READ,)),
    ConfigField("model.mlp", 3072, at_least(1), "F, width of the feed-forward's hidden layer"),
    ConfigField("model.biases", "none", one_of(BIASES),
        "linear layers of a llama field that have a bias: none, qkv, attention or all", unused=(NOT_READ,)),
    ConfigField("model.norm_epsilon", 0.0, NOT_NEGATIVE,
        "of all norms; 0: 1e-5, but 1e-6 within a llama field, except in the kind llama"),
    ConfigField("model.tied_head", False, None,
        "logits come from the token embedding in a llama or neox field, too, as in a gpt", unused=(NOT_READ,)),
    ConfigField("model.rope_theta", 10_000.0, POSITIVE,
        "of a llama or neox field: pair k of R / 2 turns by theta^(-2 k / R) per position", unused=(NOT_READ,)),
    ConfigField("model.rope_scaling", "", SCALING,
        "Slower rotations as in Llama 3: factor, low_freq_factor, high_freq_factor and "
        "original_max_position_embeddings, such as 8,1,4,8192; empty: none.", unused=(NOT_READ,)),
    ConfigField("model.rotary_fraction", 0.25, Values(lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        "part of a head that positions rotate in a neox field; a llama's is 1", unused=(NOT_READ,)),
    ConfigField("model.num_steps", 12, NUM_STEPS,
        "solver steps, or layers; the parameters of a diffeqformer don't grow with it"),
    ConfigField("model.solver", "euler", one_of(SOLVERS),
        f"The solver through depth: {', '.join(name for name in SOLVERS if not SOLVERS[name].reversible)}, or one that "
        "can be undone, such as reversible_euler; see docs/solvers.md."),
    ConfigField("model.span", 1.0, NOT_NEGATIVE,
        "The length of the whole depth: a step adds span / num_steps times the field. 0: every step adds it once, as "
        "the layers of a gpt or llama always do; a shared model can have both."),
    ConfigField("model.vocab_size", 50_257, at_least(1), "at least the tokenizer's"),
    ConfigField("model.vocab_multiple", 1, at_least(1),
        "embeddings are padded to a multiple of this; padding gets probability 0"),
    ConfigField("model.max_length", 1024, at_least(1),
        "tokens of the longest text; a gpt field learns as many positions"),
    ConfigField("model.time_embed_dim", 20, at_least(1),
        "E, the paper's d_emb: parameters grow as E + 1 times one block. Of interpolated weights: their knots.",
        unused=(NO_HYPERNETWORK,)),
    ConfigField("model.sinusoidal_dim", 128, at_least(1), "number of frequencies of the time features",
        unused=(NO_SINES,)),
    ConfigField("model.time_frequency", 1000.0, POSITIVE, "c: radians of the fastest feature over the whole depth",
        unused=(NO_SINES,)),
    ConfigField("model.training_times", "fixed", one_of(TRAINING_TIMES),
        "Times at which weights are trained: fixed or shifted (see diffeqformer.depth.grid, docs/ode.md).",
        base="either"),
    ConfigField("model.training_depths", "", DEPTHS,
        "Steps of depth among which each training step draws, such as 2,4,8, or 2:1,4:3,8:1 with weights; empty: "
        "num_steps.", base="either"),
    ConfigField("model.left_out", "", LAYERS,
        "Of weights per layer: the layers that fewer steps leave out, in this order, such as 16,17,14: with 30 layers, "
        "28 steps leave out 16 and 17. Empty: there is one number of steps (see diffeqformer.leave_out).",
        base="either"),
    ConfigField("model.generator_start", "published", one_of(GENERATOR_STARTS),
        "Initialisation of the hypernetwork: published, constant, varying or unit (see diffeqformer.depth.generated).",
        unused=(NO_KERNELS,)),
    ConfigField("model.base_width", 0, NOT_NEGATIVE,
        "The width for which the learning rate is meant: kernels and logits are scaled by base_width / width; 0: by "
        "1."),
    ConfigField("model.lora_rank", 0, NOT_NEGATIVE,
        "rank of adapters to frozen weights per layer; 0: no adapters, everything is trained", base="run"),
    ConfigField("model.lora_alpha", 8.0, POSITIVE, "adapters are scaled by alpha / rank", base="run",
        unused=(NO_ADAPTERS,)),
    ConfigField("model.lora_layers", ".*", None, "a regular expression: the linear layers that get adapters",
        base="run", unused=(NO_ADAPTERS,)),
    ConfigField("model.lora_start", "zero", one_of(ADAPTER_STARTS),
        "initialisation of adapters: zero or published (see diffeqformer.depth.low_rank)", base="run",
        unused=(NO_ADAPTERS,)),
    ConfigField("model.dropout", 0.1, BELOW_ONE, "on the embedding and on each branch's output", base="run"),
    ConfigField("model.dtype", "bfloat16",
        Values(lambda v: v in ("float32", "bfloat16"), "must be float32 or bfloat16"),
        "Type of matrix products; parameters and times are float32. float32 means fp32 on every device.", base="run"),
    ConfigField("model.remat", "step", one_of(REMAT),
        "What the backward pass recomputes. none: nothing; step: every step, of which the states between are stored; "
        "products: every step except for its products with weights and, if splash or cuDNN computes it, its attention; "
        "binomial: every step, some of them several times, so that only `snapshots` of the states between steps are "
        "stored; reversible: every step, from the state after it, so that none is stored; it needs a reversible "
        "solver, such as reversible_euler.", change="resuming", base="run"),
    ConfigField("model.snapshots", 8, at_least(1),
        "States between steps that are stored with the remat binomial, the first among them; with chunks, between "
        "these.", change="resuming", base="run", unused=(NOT_BINOMIAL,)),
    ConfigField("model.generate_chunk", 0, NOT_NEGATIVE,
        "Training generates the weights of at most so many steps at a time, of the largest number that divides the "
        "steps; 0: of all. Saves memory in many steps, with the remat step, binomial or reversible; see "
        "docs/memory.md.", change="resuming", base="run"),

    # The optimizer
    ConfigField("optimizer.name", "adamw", one_of(("adamw", "muon")),
        "adamw, or muon for the blocks' matrices (see diffeqformer.training.optimizer)"),
    ConfigField("optimizer.learning_rate", 6e-4, POSITIVE, "peak rate, after the warm-up", change="decay"),
    ConfigField("optimizer.weight_decay", 0.1, NOT_NEGATIVE, "decoupled"),
    ConfigField("optimizer.decay", "as_published", one_of(("as_published", "everything", "matrices")),
        "What decays: as_published, everything or matrices (see diffeqformer.training.optimizer.decay_mask).",
        unused=(NO_DECAY,)),
    ConfigField("optimizer.beta2", 0.999, BELOW_ONE, "decay of Adam's second moment, per step"),
    ConfigField("optimizer.epsilon", 1e-8, POSITIVE, "added to the second moment's root"),
    ConfigField("optimizer.clip_norm", 1.0, NOT_NEGATIVE,
        "limit of the gradient's global norm; 0 disables clipping"),
    ConfigField("optimizer.schedule", "cosine", one_of(("cosine", "wsd")),
        "After the warm-up, which is linear from 0: cosine, or wsd: stable, then a linear decay. A run with wsd can be "
        "given more steps, and goes on from before its decay."),
    ConfigField("optimizer.warmup_fraction", 0.01, FRACTION, "the warm-up of cosine, as a part of the steps",
        unused=(IS_WSD,)),
    ConfigField("optimizer.warmup_steps", 200, NOT_NEGATIVE, "the warm-up of wsd, in steps", unused=(NOT_WSD,)),
    ConfigField("optimizer.decay_fraction", 0.2, FRACTION, "the decay of wsd, as a part of the steps, at their end",
        change="decay", unused=(NOT_WSD,)),
    ConfigField("optimizer.final_fraction", 0.1, FRACTION, "part of the peak rate at which the run ends",
        change="decay"),

    # The number of devices on each axis of the mesh
    ConfigField("mesh.data", -1, None,
        "devices that each hold all parameters, but for a hypernetwork's; -1: all the rest", change="resuming"),
    ConfigField("mesh.fsdp", 1, None,
        "devices that divide the parameters, which are gathered step by step; -1: all the rest", change="resuming"),
    ConfigField("mesh.tensor", 1, None, "devices that divide heads, hidden units and the vocabulary; -1: all the rest",
        change="resuming"),

    # The text
    ConfigField("data.task", "openwebtext", TASK_NAME,
        "a corpus in diffeqformer.data.texts.CORPORA or data.module; or a name for files"),
    ConfigField("data.module", "", None,
        "your own Python module that calls diffeqformer.data.tasks.add_corpus", change="host"),
    ConfigField("data.train_files", "", LOCAL,
        "Local files to use instead of a corpus: comma-separated names or patterns of text, .jsonl or .parquet files.",
        change="host"),
    ConfigField("data.validation_files", "", LOCAL, "the same for the validation split", change="host"),
    ConfigField("data.text_field", "text", Values(bool, "must name the field or column that has the text"),
        "of JSON lines, or the column of Parquet files, that has the text", change="host", unused=(NO_FILES,)),
    ConfigField("data.separator", "", None,
        "What separates documents in plain-text files, such as <|endoftext|>; empty: a file is one document.",
        change="host", unused=(NO_FILES,)),
    ConfigField("data.tokenizer", "gpt2", one_of(TOKENIZERS), "bytes, gpt2, sentencepiece or huggingface"),
    ConfigField("data.tokenizer_file", "", LOCAL,
        "a SentencePiece model, a tokenizer.json, or a folder with GPT-2's files", change="host"),
    ConfigField("data.dir", "token_stores", LOCAL,
        "folder of the token stores, one subfolder per task and tokenizer", change="host"),
    ConfigField("data.remote", "",
        Values(lambda v: not v or "://" in v, "must be a URL such as gs://bucket/stores, or empty"),
        "URL of a folder of token stores (gs://bucket/stores), copied to data.dir before use", change="host"),
    ConfigField("data.processes", 0, NOT_NEGATIVE,
        "number of processes that prepare a store; 0: one per core", change="host"),

    # What a run shows and stores
    ConfigField("log_every", 20, at_least(1), "steps between progress lines", change="resuming"),
    ConfigField("eval_every", 500, at_least(1), "steps between evaluations over the whole validation split",
        change="resuming"),
    ConfigField("tracker", "tensorboard", TRACKER,
        "where curves go: tensorboard, wandb, trackio, or several, such as tensorboard,wandb", change="resuming"),
    ConfigField("profile_steps", "", TRACE,
        "steps to trace for TensorBoard's profiler, such as 100-102; empty: none", change="resuming"),
    ConfigField("checkpoint_every", 500, at_least(1),
        "steps between checkpoints; of validations at such steps the best is kept", change="resuming"),
    ConfigField("checkpoints_kept", 2, at_least(1),
        "number of newest checkpoints to keep, beside the one that validated best", change="resuming"),
    ConfigField("sample.prompt", "\n", None, "the text that the sample at the end of training continues",
        change="resuming"),
]
# fmt: on

OF_ONE_HOST = {field.name for field in CONFIG_FIELDS if field.change == "host"}
"""Fields that may differ between the processes of a run."""

CHANGEABLE = OF_ONE_HOST | {field.name for field in CONFIG_FIELDS if field.change == "resuming"}
"""Fields that may differ when a run is resumed."""

OF_DECAY = {field.name for field in CONFIG_FIELDS if field.change == "decay"}
"""Fields that may differ as well if the schedule is `wsd` and the run goes on from before its decay. The rate may only
be lowered."""
