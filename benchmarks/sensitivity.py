"""Time and memory of the Lyapunov sensitivity: a token's exponents for all earlier tokens, and the total derivative.

    python benchmarks/sensitivity.py            # GPT-small's shape as a DiffEqFormer, 256 tokens

The weights are random. Memory is the peak of the whole process, including the model.
"""

import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from diffeqformer.analysis import lyapunov
from diffeqformer.config import base_config
from diffeqformer.transformer import Transformer

TOKENS = flags.DEFINE_integer("tokens", 256, "Tokens of the text.")
STEPS = flags.DEFINE_integer("steps", None, "Steps of depth; by default GPT-small's 12.")
TOTAL = flags.DEFINE_bool("total", True, "Also compute the total derivative.")


def peak() -> float:
    """The peak memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(_) -> None:
    config = base_config("small", "diffeqformer").model
    config.dtype = "float32"
    model = jax.jit(lambda: nnx.split(Transformer(config, nnx.Rngs(0))))
    model = nnx.merge(*model())
    tokens = jnp.asarray(np.random.RandomState(0).randint(config.vocab_size, size=TOKENS.value))
    print(f"model: {peak():.1f} GiB", flush=True)
    start = time.monotonic()
    added = lyapunov.exponents(model, tokens, STEPS.value)
    print(f"exponents {added.shape}: {time.monotonic() - start:.0f} s, peak {peak():.1f} GiB", flush=True)
    if TOTAL.value:
        start = time.monotonic()
        derivative = lyapunov.total_derivative(model, tokens, STEPS.value)
        print(f"total derivative {derivative.shape}: {time.monotonic() - start:.0f} s, peak {peak():.1f} GiB")


if __name__ == "__main__":
    app.run(main)
