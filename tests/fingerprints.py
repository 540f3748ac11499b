"""Fingerprints of every program that a run compiles, which a refactoring must not change.

    python tests/fingerprints.py > before.txt            # lowered programs, in a few minutes
    python tests/fingerprints.py --steps=20 > before.txt # the state after training, to the last bit of this machine

Run it before and after a change, on one machine, and compare the two files. Names of functions are left out.
"""

import argparse
import hashlib
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from diffeqformer.parallel.mesh import make_mesh  # noqa: E402
from diffeqformer.training.step import Program  # noqa: E402
from helpers import FAMILY, ONE_DEVICE, tokens_of, toy_config  # noqa: E402

MESHES = {"1": ONE_DEVICE, "2x2x2": make_mesh((2, 2, 2)), "1x2x1": make_mesh((1, 2, 1), jax.devices()[:2])}
COMMON = {"model__dropout": 0.1, "model__vocab_multiple": 16, "steps": 100}
ADAPTERS = {"base": "base", "model__lora_rank": 2}
WHOLE_TILES = {"model__width": 256, "model__mlp": 256, "model__time_embed_dim": 8}  # for the kernels, also on a part
VARIANTS = [
    ("discretized", "gpt", ADAPTERS),
    ("discretized", "llama", {**ADAPTERS, "model__lora_layers": "mlp.*", "model__dtype": "bfloat16"}),
    ("diffeqformer", "gpt", {"microbatches": 2, "model__remat": "step"}),
    ("diffeqformer", "gpt", {"model__training_times": "shifted", "model__solver": "rk4"}),
    ("diffeqformer", "llama", {"model__dtype": "bfloat16", "model__remat": "products"}),
    ("diffeqformer", "llama", {"model__norm_of_norm": False, "model__solver": "midpoint"}),
    ("shared", "llama", {"model__solver": "strang"}),
    ("diffeqformer", "gpt", {"kernels": "pallas", **WHOLE_TILES}),
    ("diffeqformer", "llama", {"model__training_depths": "4,6", "model__training_times": "mixed"}),
]
CASES = [(kind, field, {}) for kind, field in FAMILY] + VARIANTS


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def program_text(lowered) -> str:
    """A lowered program, with functions numbered in the order in which their names occur."""
    names = {}
    return re.sub(r"@[\w.]+", lambda name: names.setdefault(name[0], f"@{len(names)}"), lowered.as_text())


def lowered_programs(config, mesh) -> dict:
    program = Program(config, mesh)
    state = program.state_shapes
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), np.int32)
    valid = jax.ShapeDtypeStruct((config.batch_size, 1), bool)
    weights = jax.eval_shape(lambda params: program.weights(params, None), state["params"])
    return {
        "init": program.init.lower(),
        "train_step": program.train_step.lower(state, tokens),
        "weights": program.weights.lower(state["params"], None),
        "evaluate": program.evaluate.lower(state["params"], weights, tokens, valid),
    }


def trained_state(config, mesh, steps: int) -> bytes:
    program = Program(config, mesh)
    state = program.init()
    for step in range(steps):
        state, _ = program.train_step(state, tokens_of(step % 2, config))
        jax.block_until_ready(state)
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="train that many steps instead of lowering")
    options = parser.parse_args()
    for kind, field, changes in CASES:
        config = toy_config(kind, field, **{**COMMON, **changes})
        for size, mesh in MESHES.items():
            name = " ".join([kind, field, *(f"{key}={value}" for key, value in changes.items()), f"mesh={size}"])
            if options.steps:
                print(name, digest(trained_state(config, mesh, options.steps)), flush=True)
            else:
                for part, lowered in lowered_programs(config, mesh).items():
                    print(name, part, digest(program_text(lowered).encode()), flush=True)


if __name__ == "__main__":
    main()
