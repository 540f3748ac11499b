"""Make half-trained runs, which later versions of the code and of JAX must open and resume.

    python tests/data/make_runs.py runs-jax-0.12.tar.xz diffeqformer alternative lora

- runs.tar.xz: of every kind of model, made on 2026-11-22 with the code of commit 1455846, jax 0.10.2 and version 0 of
  Orbax's interface
- runs-jax-0.10.tar.xz, runs-jax-0.12.tar.xz: of some, made on 2026-11-27 with jax 0.10.2 and 0.12.0.1, on Python 3.11
  and 3.13, and version 1 of that interface

Make them again only for a change that is meant to break old runs.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile

import jax
import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from diffeqformer.checkpoints import checkpoint  # noqa: E402
from diffeqformer.config import base_config  # noqa: E402
from diffeqformer.console.progress import read_curves  # noqa: E402
from diffeqformer.errors import Stopped  # noqa: E402
from diffeqformer.orbax import ocp  # noqa: E402
from diffeqformer.training import loop, run  # noqa: E402
from helpers import ONE_DEVICE, TEXTS, change, make_store, toy_config  # noqa: E402

SHAPE = dict(  # as small as it gets: a run in 40 kB
    width=2, heads=1, mlp=8, num_steps=2, max_length=16, time_embed_dim=2, sinusoidal_dim=2, dropout=0.1
)
FIELDS = {"diffeqformer": "llama", "llama": "llama"}  # of the others: gpt
KINDS = ("diffeqformer", "alternative", "discretized", "shared", "gpt", "llama", "lora")
STEPS, SAVED = 8, 4


def config_of(name: str):
    """The config of one run."""
    kind = "diffeqformer" if name == "lora" else name
    config = toy_config(kind, FIELDS.get(kind, "gpt"), steps=STEPS, batch_size=4, eval_every=4, checkpoint_every=4)
    config.model.update(SHAPE)
    change(config, data__dir="stores", optimizer__learning_rate=1e-2, optimizer__beta2=0.95)
    if name == "lora":
        config = base_config("toy-lora", "diffeqformer")  # whose shape is the base's
        config.update(base="alternative", steps=STEPS, batch_size=4, sequence_length=16, log_every=1, eval_every=4)
        config.model.update(dtype="float32", num_steps=3, lora_rank=2)
        config.data.update(task="python_stdlib", tokenizer="bytes", dir="stores")
        config.sample.prompt = "def "
        change(config, optimizer__learning_rate=1e-2, optimizer__beta2=0.95, checkpoint_every=4)
    return config


def digest(workdir) -> str:
    """Of all that the newest checkpoint holds of the state, to the last bit."""
    folder, step, _, _ = checkpoint.open_to_read(workdir)
    state = ocp.load_checkpointables(folder / str(step), {"params": None, "optimizer": None})
    sum = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        sum.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return sum.hexdigest()


def main(archive: str, *names: str) -> None:
    run.make_mesh = lambda *_: ONE_DEVICE
    target, expected, calls = HERE / archive, {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_store(pathlib.Path("stores/python_stdlib-bytes"), {"train": [TEXTS], "validation": [TEXTS[:9]]})
        now = loop.hosts.Notice.now
        for name in names:
            calls.clear()
            loop.hosts.Notice.now = lambda notice, _: calls.append(notice) or len(calls) == SAVED
            with contextlib.suppress(Stopped):
                loop.train(config_of(name), name)
            shutil.copytree(name, f"{name}-whole")
            saved = digest(name)
            loop.hosts.Notice.now = now
            loop.train(config_of(name), f"{name}-whole")
            curves = read_curves(f"{name}-whole")
            expected[name] = {
                "saved": saved,
                "ended": digest(f"{name}-whole"),  # on the machine on which it was made
                "train": curves["train/loss"],
                "validation": curves["validation/loss"],
            }
        pathlib.Path("expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(target, "w:xz", preset=9) as tar:
            for name in (*names, "expected.json"):
                tar.add(name)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
