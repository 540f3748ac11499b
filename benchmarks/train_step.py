"""Train step and forward pass of several models side by side, on synthetic tokens, in one run.

    python benchmarks/train_step.py                            # every model against the vanilla one with the same block
    python benchmarks/train_step.py --models=gpt:shared,gpt:gpt --width=768 --heads=12 --batch_size=2
    python benchmarks/train_step.py --models=gpt:diffeqformer,gpt:gpt --shape=large --batch_size=16  # a GPU with 80 GB

A forward pass is the loss of one batch, including weight generation. Memory is XLA's figure for the compiled train
step: arguments (parameters, Adam moments and tokens; donated, so that the new state reuses their memory) and
temporaries. Utilisation is the FLOPs of a vanilla transformer of that shape, divided by the dense bfloat16 peak of the
chip if that is known here. The FLOPs are six for each weight of a matrix product and token, plus the causal half of
attention. Recomputation and the generator aren't counted. Ratios are to the vanilla model of the same field, if it is
among those timed.
"""

import functools
import time

import jax
import numpy as np
from absl import flags
from common import MODEL_NAMES, SHAPE, alternate, make_config, mebibytes, print_table, random_tokens, ratio, seconds

from diffeqformer.config import check_config
from diffeqformer.console import command_line
from diffeqformer.training.run import make_program
from diffeqformer.training.utilisation import utilisation

CLIP_NORM = flags.DEFINE_float("clip_norm", None, "Gradient clipping; 0 is off, as by default without --shape.")


class Run:
    """One model's state and compiled functions."""

    def __init__(self, config):
        if CLIP_NORM.value is not None or not SHAPE.value:
            config.optimizer.clip_norm = CLIP_NORM.value or 0.0
        check_config(config, jax.device_count(), jax.default_backend())
        program = make_program(config)
        self.config, self.program, self.tokens, self.state = config, program, random_tokens(config), program.init()
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state["params"]))

        start = time.perf_counter()
        self.train_step = program.train_step.lower(self.state, self.tokens).compile()
        self.compile_seconds = time.perf_counter() - start

    @functools.cached_property
    def forward(self):
        """The compiled loss of a batch."""

        def forward(params, tokens):
            weights = self.program.weights(params, None)
            return self.program.evaluate(params, weights, tokens, np.ones((len(tokens), 1), bool))

        return jax.jit(forward).lower(self.state["params"], self.tokens).compile()

    def step(self):
        self.state, metrics = self.train_step(self.state, self.tokens)
        return self.state, metrics


def benchmark() -> None:
    configs = {name: make_config(name) for name in MODEL_NAMES.value}
    runs = {name: Run(config) for name, config in configs.items()}
    steps = alternate(lambda run: seconds(run.step), runs)
    forwards = alternate(lambda run: seconds(lambda: run.forward(run.state["params"], run.tokens)), runs)
    memory = {name: mebibytes(run.train_step) for name, run in runs.items()}
    peaks = {name: np.array(sum(both)) for name, both in memory.items()}
    rows = [
        (
            name, run.parameters, run.compile_seconds,
            1e3 * np.median(steps[name]), 1e3 * np.median(forwards[name]), *memory[name],
            100 * utilisation(runs[name].config, np.median(steps[name]), jax.devices()),
            ratio(steps, name), ratio(forwards, name), ratio(peaks, name),
        )
        for name, run in runs.items()
    ]  # fmt: skip
    columns = (
        "model", "parameters", "compile s", "step ms", "forward ms", "arguments MiB", "temporaries MiB",
        "utilisation %", "step", "forward", "memory",
    )  # fmt: skip
    print_table(columns, rows)


if __name__ == "__main__":
    command_line.run(benchmark)
