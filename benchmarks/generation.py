"""Writing speed: tokens per second after the first, with the key-value cache, of several models side by side.

    python benchmarks/generation.py                            # every model against the vanilla one of its flavour
    python benchmarks/generation.py --samples=8 --width=768 --heads=12 --sequence_length=1024 --vocab_size=50304

`first` is the time to the first token of a compiled program: weights generated for all depths, then the
prompt read. `uncached` is what a token costs if the whole window is computed anew. Ratios are times per
token to that of the vanilla model of the same flavour: above 1 is slower.
"""

import time

import jax
import numpy as np
from absl import flags
from common import (
    CALLS,
    MODEL_NAMES,
    ROUNDS,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    make_config,
    median_seconds,
    print_table,
    ratio,
)
from flax import nnx

from diffeqformer import cli
from diffeqformer.models.transformer import split, weights_at
from diffeqformer.sampling import Choice, write_tokens
from diffeqformer.step import new_model

SAMPLES = flags.DEFINE_integer("samples", 1, "Texts written at once.")
PROMPT = flags.DEFINE_integer("prompt_length", 32, "Tokens of the prompt.")
TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens to write.", lower_bound=2)


def write(model) -> tuple[float, float]:
    """Seconds to the first token, and for each later one."""
    prompt = np.arange(PROMPT.value) % VOCAB_SIZE.value
    start = time.perf_counter()
    steps = write_tokens(
        model, prompt.tolist(), count=TOKENS.value, samples=SAMPLES.value, key=jax.random.key(0),
        vocab_size=VOCAB_SIZE.value, choice=Choice(),
    )  # fmt: skip
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    return first - start, (time.perf_counter() - first) / (TOKENS.value - 1)


def uncached_seconds(model) -> float:
    """Seconds of one forward pass over the whole window."""
    graph, params = split(model)
    tokens, weights = np.zeros((SAMPLES.value, SEQUENCE_LENGTH.value), np.int32), weights_at(model)
    forward = jax.jit(lambda params, weights, tokens: nnx.merge(graph, params)(tokens, weights)[:, -1])
    return median_seconds({"forward": lambda: forward(params, weights, tokens)})["forward"]


def benchmark() -> None:
    models = {name: new_model(make_config(name)) for name in MODEL_NAMES.value}
    times = {name: [] for name in models}
    for round in range(ROUNDS.value + 1):
        for name, model in models.items():
            for _ in range(CALLS.value if round else 1):
                both = write(model)
                if round:
                    times[name].append(both)
    first, later = ({name: float(np.median([both[n] for both in times[name]])) for name in models} for n in (0, 1))
    rows = [
        (
            name, 1e3 * first[name], 1e3 * later[name], SAMPLES.value / later[name], ratio(later, name),
            1e3 * uncached_seconds(model),
        )
        for name, model in models.items()
    ]  # fmt: skip
    print_table(("model", "first ms", "then ms/token", "tokens/s", "ratio", "uncached ms/token"), rows)


if __name__ == "__main__":
    cli.run(benchmark)
