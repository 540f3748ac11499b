"""Tests run on eight virtual CPU devices, with the types and shapes of annotations checked."""

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

from flags import FAST_COMPILATION

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST_COMPILATION}"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jaxtyping.install_import_hook("diffeqformer", "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Compiled functions go when they are many: all of them take gigabytes, and more mappings than Linux allows (65,530)."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def stdlib_stores(tmp_path_factory) -> pathlib.Path:
    """A folder with the token store of the standard library in bytes, which all workers share: one prepares, others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "token_stores"
    command = [sys.executable, "-m", "diffeqformer.prepare", "--config=configs/tiny.py", f"--config.data.dir={folder}"]
    subprocess.run(command, check=True, capture_output=True, cwd=pathlib.Path(__file__).parent.parent)
    return folder


@pytest.fixture
def small_store(tmp_path) -> pathlib.Path:
    """A store of three shards, one of them empty."""
    from helpers import TEXTS, make_store

    make_store(tmp_path / "task", {"train": [TEXTS[:40], [], TEXTS[40:]], "validation": [TEXTS[:5]]})
    return tmp_path / "task"


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory) -> pathlib.Path:
    """A SentencePiece model with Llama's way of writing unknown characters as bytes."""
    from helpers import train_sentencepiece

    path = tmp_path_factory.mktemp("model") / "spm.model"
    path.write_bytes(train_sentencepiece())
    return path


@pytest.fixture(scope="session")
def short_stores(stdlib_stores, tmp_path_factory) -> pathlib.Path:
    """The standard library's store with a short validation split."""
    from diffeqformer.data.store import open_store, sha256

    folder = tmp_path_factory.mktemp("stores")
    store = pathlib.Path(shutil.copytree(stdlib_stores / "python_stdlib-bytes", folder / "python_stdlib-bytes"))
    about = json.loads((store / "store.json").read_text())
    split = about["splits"]["validation"]
    [shard] = split["shards"]
    with open(store / shard["file"], "r+b") as file:
        file.truncate(2 * 2000)
    split["tokens"] = shard["tokens"] = 2000
    split["sha256"] = shard["sha256"] = sha256(store / shard["file"])
    (store / "store.json").write_text(json.dumps(about))
    assert open_store(store, "bytes", 64)["validation"].size == 2000
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run that has saved a checkpoint: an untrained model of bytes with lively weights."""
    import jax.numpy as jnp

    from diffeqformer import checkpoint
    from diffeqformer.transformer import new_model, split_model
    from helpers import toy_config

    workdir, config = tmp_path_factory.mktemp("run"), toy_config(model__max_length=64)
    params = split_model(new_model(config))[1]
    params["depth"]["layers"]["qkv"]["constant"] += 0.3
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash")
    with checkpoint.open_checkpoints(workdir, kept=1) as manager:
        checkpoint.save(manager, 12, {"params": params, "step": jnp.int32(12), "optimizer": jnp.zeros(99_999)}, about)
    return workdir
