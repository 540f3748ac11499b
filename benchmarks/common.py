"""What the benchmarks share: flags for the model's shape, alternating rounds, a table.

Rounds of calls alternate between the subjects that are compared, so that other load on the machine affects all of them
equally. A time is the median over all timed calls. A ratio of times is the median over pairs of calls from the same
round, with the quartiles in brackets.
"""

import pathlib
import runpy
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from diffeqformer.config import base_config, check_config
from diffeqformer.errors import UserError
from diffeqformer.fields import FIELDS
from diffeqformer.solvers.solver import REMAT as REMAT_KINDS
from diffeqformer.transformer import MODELS

MODEL_NAMES = flags.DEFINE_list(
    "models",
    ["gpt:diffeqformer", "gpt:alternative", "gpt:shared", "gpt:gpt", "llama:diffeqformer", "llama:llama"],
    "Models to measure, as FIELD:KIND, or FIELD:KIND:REMAT to choose what the backward pass recomputes.",
)
WIDTH = flags.DEFINE_integer("width", 256, "Model width; the feed-forward is four times as wide.")
HEADS = flags.DEFINE_integer("heads", 8, "Attention heads.")
NUM_STEPS = flags.DEFINE_integer("num_steps", 12, "Solver steps or layers.")
TIME_EMBED_DIM = flags.DEFINE_integer("time_embed_dim", 48, "E of the hypernetwork.")
SINUSOIDAL_DIM = flags.DEFINE_integer("sinusoidal_dim", 64, "K of the time features.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 512, "Vocabulary.")
SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 256, "Tokens per sequence; positions of the model.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences per step (training).")
DROPOUT = flags.DEFINE_float("dropout", None, "Dropout rate (training); by default 0, or with --shape the config's.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Compute type.")
FSDP = flags.DEFINE_integer("fsdp", 1, "Devices over which the parameters are sharded (training).")
SHAPE = flags.DEFINE_string(
    "shape",
    None,
    "A config of configs/, such as large: its model, sequence length and types override the other flags.",
)
REMAT = flags.DEFINE_enum("remat", "step", list(REMAT_KINDS), "What the backward pass recomputes (training).")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternating rounds.")
CALLS = flags.DEFINE_integer("calls", 3, "Timed calls in each round.")


def make_config(name: str):
    """The benchmark's config of one model, FIELD:KIND or FIELD:KIND:REMAT, from the flags.

    Raises:
        UserError: if the model or the shape is unknown.
    """
    field, kind, remat = [*name.split(":"), REMAT.value, REMAT.value][:3]
    if remat not in REMAT_KINDS or field not in FIELDS or kind not in MODELS or MODELS[kind].field not in (None, field):
        raise UserError(
            f"--models: {name!r} is not a model; join a field and a kind that fit, for example gpt:diffeqformer"
        )
    if SHAPE.value:
        return shape_of_a_run(SHAPE.value, kind, field, remat)
    config = base_config("benchmark", kind, field)
    config.update(steps=1000, batch_size=BATCH_SIZE.value, sequence_length=SEQUENCE_LENGTH.value)
    config.mesh.fsdp = FSDP.value
    config.model.update(
        width=WIDTH.value, heads=HEADS.value, mlp=4 * WIDTH.value, num_steps=NUM_STEPS.value,
        vocab_size=VOCAB_SIZE.value, max_length=SEQUENCE_LENGTH.value, time_embed_dim=TIME_EMBED_DIM.value,
        sinusoidal_dim=SINUSOIDAL_DIM.value, dropout=DROPOUT.value or 0.0, dtype=DTYPE.value, remat=remat,
    )  # fmt: skip
    check_config(config, jax.device_count())
    return config


def shape_of_a_run(name: str, kind: str, field: str, remat: str):
    """The config of `configs/<name>.py`, except for field, batch, mesh, dropout and rematerialisation, set by flags."""
    path = pathlib.Path(__file__).parent.parent / "configs" / f"{name}.py"
    if not path.is_file():
        raise UserError(f"--shape: there is no file {path}")
    config = runpy.run_path(str(path))["get_config"](kind)
    config.batch_size, config.model.remat, config.model.field = BATCH_SIZE.value, remat, field
    if DROPOUT.value is not None:
        config.model.dropout = DROPOUT.value
    config.mesh.update(data=-1, fsdp=FSDP.value, tensor=1)
    check_config(config, jax.device_count(), jax.default_backend())
    return config


def ratio(values: dict[str, np.ndarray], name: str) -> str:
    """A model's values divided by those of its field's vanilla model, call by call; "-" without a vanilla model."""
    field = name.partition(":")[0]
    vanilla = values.get(f"{field}:{field}")
    return "-" if vanilla is None else with_quartiles(values[name] / vanilla)


def with_quartiles(values: np.ndarray) -> str:
    """The median, with the quartiles in brackets if there are several values."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f}" + f" ({low:.2f} to {high:.2f})" * (values.size > 1)


def random_tokens(config) -> np.ndarray:
    """A batch [B, S] of synthetic tokens."""
    return np.random.RandomState(0).randint(config.model.vocab_size, size=(config.batch_size, config.sequence_length))


def seconds(call: Callable[[], object]) -> float:
    """The seconds that a call takes until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def alternate(measure: Callable[[object], object], subjects: dict) -> dict[str, np.ndarray]:
    """The results of `measure` for each subject, call by call, after a first call that isn't counted."""
    results = {name: [] for name in subjects}
    for round in range(ROUNDS.value + 1):
        for name, subject in subjects.items():
            for _ in range(CALLS.value if round else 1):
                result = measure(subject)
                if round:
                    results[name].append(result)
    return {name: np.array(values) for name, values in results.items()}


def mebibytes(compiled) -> tuple[float, float]:
    """XLA's figures for a compiled program: arguments and temporaries."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes / 2**20, memory.temp_size_in_bytes / 2**20


def print_table(columns: tuple[str, ...], rows: list[tuple]) -> str:
    """Print a Markdown table below a line that names the devices, and return both. Numbers get the digits they need."""

    def show(cell) -> str:
        if isinstance(cell, float):
            return f"{cell:,.2f}" if cell < 10 else f"{cell:,.0f}"
        return f"{cell:,}" if isinstance(cell, int) else str(cell)

    device = jax.devices()[0]
    lines = [f"{len(jax.devices())} x {device.device_kind} ({device.platform}), jax {jax.__version__}", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(show, row)) + " |" for row in rows]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    return text
