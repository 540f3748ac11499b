"""Generation speed: tokens per second after the first, with the key-value cache, for several models side by side.

    python benchmarks/generation.py                            # every model against the vanilla one with the same block
    python benchmarks/generation.py --samples=8 --width=768 --heads=12 --sequence_length=1024 --vocab_size=50304

`first` is the time to the first token of a compiled program: it generates the weights for all depths, then reads the
prompt. `uncached` is the time per token if the whole window is recomputed. The ratio compares the time per token with
the vanilla model of the same field: above 1 is slower.
"""

import time

import jax
import numpy as np
from absl import flags
from common import MODEL_NAMES, alternate, make_config, print_table, ratio, seconds
from flax import nnx

from diffeqformer.console import command_line
from diffeqformer.inference.sampling import Choice, write_tokens
from diffeqformer.transformer import new_model, split_model, weights_at

SAMPLES = flags.DEFINE_integer("samples", 1, "Texts generated at once.")
PROMPT = flags.DEFINE_integer("prompt_length", 32, "Tokens of the prompt.")
TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens to generate.", lower_bound=2)


def write(model) -> tuple[float, float]:
    """Seconds to the first token, and seconds for each later one."""
    prompt = np.arange(PROMPT.value) % model.vocab_size
    start = time.perf_counter()
    steps = write_tokens(
        model, prompt.tolist(), count=TOKENS.value, samples=SAMPLES.value, key=jax.random.key(0),
        vocab_size=model.vocab_size, choice=Choice(),
    )  # fmt: skip
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    return first - start, (time.perf_counter() - first) / (TOKENS.value - 1)


def uncached(model):
    """One forward pass over the whole window, compiled."""
    graph, params = split_model(model)
    tokens, weights = np.zeros((SAMPLES.value, model.max_length), np.int32), weights_at(model)
    forward = jax.jit(lambda params, weights, tokens: nnx.merge(graph, params)(tokens, weights)[:, -1])
    return lambda: forward(params, weights, tokens)


def benchmark() -> None:
    models = {name: new_model(make_config(name)) for name in MODEL_NAMES.value}
    times = alternate(write, models)
    plain = alternate(seconds, {name: uncached(model) for name, model in models.items()})
    later = {name: both[:, 1] for name, both in times.items()}
    rows = []
    for name in models:
        first, token, window = (1e3 * np.median(values) for values in (times[name][:, 0], later[name], plain[name]))
        rows.append((name, first, token, 1e3 * SAMPLES.value / token, ratio(later, name), window))
    print_table(("model", "first ms", "then ms/token", "tokens/s", "ratio", "uncached ms/token"), rows)


if __name__ == "__main__":
    command_line.run(benchmark)
