"""The share of a chip's peak that a large matrix product reaches by the compiler's cycles, as JSON by kind of chip.

`test_tpu.py` runs this in a separate process.
"""

import json

import jax

from diffeqformer.planning.chips import TPUS
from diffeqformer.planning.programs import compile_for_tpu, tpu_devices
from diffeqformer.planning.times import seconds_by_cause

TOKENS, WIDTH, MLP = 16_384, 2048, 8192  # of Llama-1B


def share_of_peak(kind: str) -> float:
    """For bfloat16 on one chip."""
    device = tpu_devices(f"{kind}:{'2x2x1' if kind in ('v5p', 'tpu7x') else '2x2'}", slices=1)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    x, kernel = (jax.ShapeDtypeStruct(shape, "bfloat16", sharding=place) for shape in ((TOKENS, WIDTH), (WIDTH, MLP)))
    compiled = compile_for_tpu("product", jax.jit(jax.numpy.dot).lower(x, kernel))
    seconds = sum(seconds_by_cause(compiled.module, TPUS[kind], slice_size=1).values())
    return 2 * TOKENS * WIDTH * MLP / TPUS[kind].peak / seconds


if __name__ == "__main__":
    print(json.dumps({kind: share_of_peak(kind) for kind in TPUS}))
