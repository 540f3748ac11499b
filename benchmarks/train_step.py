"""Train steps of several models side by side, on synthetic tokens, in one run.

    python benchmarks/train_step.py                      # DiffEqFormer against GPT, on the CPU's default shape
    python benchmarks/train_step.py --models=gpt,shared --width=768 --heads=12 --num_steps=12 --batch_size=8

Each model is compiled once; then rounds of steps alternate between the models, so that whatever else
the machine is doing falls on all of them alike. The step time is the median over all timed steps.
Ratios are to the model named last. Memory is XLA's own account of the compiled step: arguments
(parameters, Adam moments, tokens; donated, so the new state takes their place), temporaries, and
their sum as the peak.
"""

import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags
from flax import nnx

from diffeqformer.config import base_config, check_config
from diffeqformer.errors import UserError
from diffeqformer.models.transformer import MODELS
from diffeqformer.sharding import make_mesh
from diffeqformer.step import abstract_model, make_program

MODEL_NAMES = flags.DEFINE_list("models", ["diffeqformer", "gpt"], "Models to time; ratios are to the last one.")
WIDTH = flags.DEFINE_integer("width", 256, "Model width; the feed-forward is four times as wide.")
HEADS = flags.DEFINE_integer("heads", 8, "Attention heads.")
NUM_STEPS = flags.DEFINE_integer("num_steps", 12, "Solver steps or layers.")
TIME_EMBED_DIM = flags.DEFINE_integer("time_embed_dim", 48, "E of the hypernetwork.")
SINUSOIDAL_DIM = flags.DEFINE_integer("sinusoidal_dim", 64, "K of the time features.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 512, "Vocabulary.")
SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 256, "Tokens per sequence.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences per step.")
DROPOUT = flags.DEFINE_float("dropout", 0.0, "Dropout rate.")
CLIP_NORM = flags.DEFINE_float("clip_norm", 0.0, "Gradient clipping; 0 is off.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Compute type.")
REMAT = flags.DEFINE_boolean("remat", True, "Recompute each step in the backward pass.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternating rounds.")
STEPS = flags.DEFINE_integer("steps", 3, "Timed steps per model and round.")


def make_config(model: str):
    """The benchmark's config of one model, from the flags."""
    config = base_config("benchmark", model)
    config.steps, config.batch_size, config.sequence_length = 1000, BATCH_SIZE.value, SEQUENCE_LENGTH.value
    config.model.update(
        width=WIDTH.value, heads=HEADS.value, mlp=4 * WIDTH.value, num_steps=NUM_STEPS.value,
        vocab_size=VOCAB_SIZE.value, max_length=SEQUENCE_LENGTH.value, time_embed_dim=TIME_EMBED_DIM.value,
        sinusoidal_dim=SINUSOIDAL_DIM.value, dropout=DROPOUT.value, dtype=DTYPE.value, remat=REMAT.value,
    )  # fmt: skip
    config.optimizer.clip_norm = CLIP_NORM.value
    config.data.task, config.sample.length = "python_stdlib", min(256, SEQUENCE_LENGTH.value)
    check_config(config, jax.device_count())
    return config


class Run:
    """One model's compiled step, state and measurements."""

    def __init__(self, model: str):
        config = make_config(model)
        program = make_program(config, make_mesh())
        self.tokens = np.random.RandomState(0).randint(VOCAB_SIZE.value, size=(BATCH_SIZE.value, SEQUENCE_LENGTH.value))
        self.state = program.init()
        start = time.perf_counter()
        self.step = program.train_step.lower(self.state, self.tokens).compile()
        self.compile_seconds = time.perf_counter() - start
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_model(config), nnx.Param)))
        self.seconds = []
        self.round(timed=False)

    def round(self, timed: bool = True):
        for _ in range(STEPS.value):
            start = time.perf_counter()
            self.state, metrics = self.step(self.state, self.tokens)
            jax.block_until_ready((self.state, metrics))
            if timed:
                self.seconds.append(time.perf_counter() - start)


def main(argv):
    for name in MODEL_NAMES.value:
        if name not in MODELS:
            sys.exit(f"--models: '{name}' is not a model; choose from {', '.join(MODELS)}")
    try:
        runs = {name: Run(name) for name in MODEL_NAMES.value}
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    for _ in range(ROUNDS.value):
        for run in runs.values():
            run.round()
    device = jax.devices()[0]
    print(f"{len(jax.devices())} x {device.device_kind} ({device.platform}), jax {jax.__version__}, {DTYPE.value}")
    columns = (
        "model",
        "parameters",
        "compile s",
        "step ms",
        "tokens/s",
        "arguments MiB",
        "temporaries MiB",
        "peak MiB",
        "step ratio",
        "peak ratio",
    )
    rows = []
    for name, run in runs.items():
        memory, seconds = run.step.memory_analysis(), statistics.median(run.seconds)
        rows.append((
            name, run.parameters, run.compile_seconds, 1e3 * seconds, run.tokens.size / seconds,
            memory.argument_size_in_bytes / 2**20, memory.temp_size_in_bytes / 2**20,
            (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20,
        ))  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, parameters, *numbers in rows:
        step_ratio, peak_ratio = numbers[1] / rows[-1][3], numbers[5] / rows[-1][7]
        print(
            f"| {name} | {parameters:,} | "
            + " | ".join(f"{n:,.1f}" for n in numbers)
            + f" | {step_ratio:.2f} | {peak_ratio:.2f} |"
        )


if __name__ == "__main__":
    app.run(main)
