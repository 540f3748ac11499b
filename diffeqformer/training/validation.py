"""The validation of a run, and the programs of which it consists."""

import collections
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from clu import metrics

from diffeqformer.console.terminal import show_progress
from diffeqformer.data.store import Split
from diffeqformer.training.step import Program


def validate(program: Program, params: dict, split: Split, num_steps: int | None = None) -> dict[str, float]:
    """Loss (nats per token), perplexity and bits per byte of a whole split, in `num_steps` steps (None: the config's).

    Windows are disjoint, as in training. Two things aren't scored: each window's first token, and the end of the text,
    which doesn't fill a window. Bits per byte are the loss in bits times the split's tokens per byte of text; NaN
    if it has unknown ids, behind which can be any text.
    """
    config, weights = program.config, program.weights(params, num_steps)  # once, for all batches
    total, pending, done = metrics.Average.empty(), collections.deque(), 0
    show = show_progress("validation")
    shape = config.batch_size, config.sequence_length
    for number in range(-(-(split.size // config.sequence_length) // config.batch_size)):
        tokens, valid = (
            jax.make_array_from_callback(
                (config.batch_size, width),
                program.shardings.batch,
                lambda index, read=read: read(number, *shape, rows=index[0]),
            )
            for read, width in ((split.evaluation_batch, config.sequence_length), (split.evaluated, 1))
        )
        total = total.merge(program.evaluate(params, weights, tokens, valid))
        pending.append(total)
        if len(pending) > 2:  # keeps two batches queued on the device, and shows only finished ones
            jax.block_until_ready(pending.popleft())
            done += config.batch_size * config.sequence_length
            show(done, split.size)
    loss = float(total.compute())
    bits_per_byte = math.nan if split.unknown else loss / math.log(2) * split.size / split.text_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


def programs_of(program: Program, num_steps: int | None) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The programs of `validate`: (name, what to compile)."""
    params = program.state_shapes["params"]
    if program.config.model.generate_chunk:
        weights = program.weights(params, num_steps)
    else:
        weights = program.weights_shapes(num_steps)
        yield "weights", program.weights.lower(params, num_steps)
    valid = jax.ShapeDtypeStruct((program.config.batch_size, 1), jnp.bool, sharding=program.shardings.batch)
    yield "evaluation", program.evaluate.lower(params, weights, program.tokens, valid)
