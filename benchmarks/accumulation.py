"""Gradient accumulation: weights generated once per optimizer step, compared with once per microbatch.

    python benchmarks/accumulation.py --models=gpt:diffeqformer --batch_size=16

Both compute the loss and gradient of the same batch. `once` is
`diffeqformer.training.loss.ShardedLoss.value_and_grad`; `each` differentiates the whole model for every microbatch
and sums the parameters' gradients, like accumulation around a train step (a barrier keeps the compiler from moving the
generation out of its loop). Memory is XLA's figure for temporaries, including the gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common import (
    BATCH_SIZE,
    MODEL_NAMES,
    alternate,
    make_config,
    print_table,
    random_tokens,
    seconds,
    with_quartiles,
)

from diffeqformer.console import command_line
from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.loss import ShardedLoss, split_batch
from diffeqformer.training.optimizer import is_factors
from diffeqformer.training.step import dropout_keys
from diffeqformer.transformer import new_model, split_model

MICROBATCHES = flags.DEFINE_list("microbatches", ["1", "2", "4", "8"], "Numbers of microbatches to try.")


def generated_once(losses: ShardedLoss, params, tokens, keys, microbatches: int):
    """As in training, with the gradient of each P written out."""
    loss, gradient = losses.value_and_grad(params, tokens, keys, microbatches)
    return loss, jax.tree.map(lambda leaf: leaf.product() if is_factors(leaf) else leaf, gradient, is_leaf=is_factors)


def generated_for_each(losses: ShardedLoss, params, tokens, keys, microbatches: int):
    """The usual way: the sum over microbatches of whole gradients."""

    def add(total, part):
        own_params, part = jax.lax.optimization_barrier((params, part))
        return jax.tree.map(jnp.add, total, generated_once(losses, own_params, *part, microbatches=1)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0.0), params))
    total, _ = jax.lax.scan(add, zeros, jax.tree.map(lambda array: split_batch(array, microbatches), (tokens, keys)))
    return jax.tree.map(lambda leaf: leaf / microbatches, total)


def benchmark() -> None:
    counts = [int(text) if text.isdigit() else 0 for text in MICROBATCHES.value]
    for count in counts:
        if count < 1 or BATCH_SIZE.value % count:
            raise UserError(
                f"--microbatches: must be numbers that divide the batch size ({BATCH_SIZE.value}), but one is {count}"
            )
    for name in MODEL_NAMES.value:
        measure(name, counts)


def measure(name: str, counts: list[int]) -> None:
    """Print one model's table."""
    config = make_config(name)
    tokens = random_tokens(config)
    graph, params = split_model(new_model(config))
    losses = ShardedLoss(graph, params, make_mesh(), kernels="xla")
    keys = dropout_keys(config.seed, jnp.int32(0), len(tokens)) if config.model.dropout else None
    compiled = {}  # programs that are compared are next to each other
    for count in counts:
        for way, function in (("once", generated_once), ("each", generated_for_each)):
            jitted = jax.jit(function, static_argnums=(0, 4))
            compiled[way, count] = jitted.lower(losses, params, tokens, keys, count).compile()
    times = alternate(lambda program: seconds(lambda: program(params, tokens, keys)), compiled)
    memory = {key: program.memory_analysis() for key, program in compiled.items()}
    memory = {key: (m.temp_size_in_bytes + m.output_size_in_bytes) / 2**20 for key, m in memory.items()}
    rows = [
        (
            str(count), 1e3 * np.median(times["once", count]), 1e3 * np.median(times["each", count]),
            with_quartiles(times["once", count] / times["each", count]), memory["once", count], memory["each", count],
            memory["once", count] / memory["each", count],
        )
        for count in counts
    ]  # fmt: skip
    print(f"{name}, {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, batch {BATCH_SIZE.value}")
    print_table(("microbatches", "once ms", "each ms", "time", "once MiB", "each MiB", "memory"), rows)


if __name__ == "__main__":
    command_line.run(benchmark)
