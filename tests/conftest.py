"""Tests run on eight virtual CPU devices, and annotated types and shapes are checked. Or on a GPU, unchecked."""

import gc
import importlib
import os
import pathlib
import sys
import types

from flags import CONTEXTS, PLATFORMS, for_a_process, lower_in_one_context

os.environ["JAX_PLATFORMS"] = PLATFORMS
if PLATFORMS == "cpu":
    os.environ["XLA_FLAGS"] = for_a_process(devices=8)
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes under test need some of the memory

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

pytest_plugins = ["fake_cloud"]  # whose fixtures two modules share
lower_in_one_context()
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")  # TensorBoard then reads without TensorFlow
if PLATFORMS == "cpu":
    # What is imported under the hook can't take its byte code from the usual files, so these come before it.
    for name in "beartype clu.metrics flax.nnx lm_eval.api.model optax orbax.checkpoint tensorboardX".split():
        importlib.import_module(name)
    jaxtyping.install_import_hook("diffeqformer", "beartype.beartype")

MARKERS = ("long", "slow", "faults", "tpu", "gpu", "extras")
gc.set_threshold(100_000)  # with the default, looking for garbage takes 4 % of the time


def pytest_configure(config):
    """End with one sentence if the tests are for a GPU and there is none."""
    if PLATFORMS == "cpu" and config.option.markexpr != "gpu":
        return
    devices = [*pathlib.Path("/dev").glob("nvidia[0-9]*"), *pathlib.Path("/dev").glob("dxg")]
    if not devices or jax.default_backend() != "gpu":
        raise pytest.UsageError("these tests need an NVIDIA GPU, TEST_PLATFORMS=cuda,cpu and jax[cuda]")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the first case of every test as fast, unless it is marked as long."""
    for item in items:
        first = not hasattr(item, "callspec") or not any(item.callspec.indices.values())
        if first and not any(map(item.get_closest_marker, MARKERS)):
            item.add_marker("fast")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Drop compiled functions when there are many. All of them take gigabytes, and more mappings than Linux allows."""
    yield
    vars(CONTEXTS).clear()
    mappings = pathlib.Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def compilations(caplog):
    """The number of times that a function of a given name has been compiled in this test."""
    with jax.log_compiles():
        yield lambda name: sum(r.getMessage().startswith(f"Compiling jit({name})") for r in caplog.records)


@pytest.fixture
def one_device_loop(monkeypatch):
    """Let `loop.train` use one device: XLA's collectives between many virtual ones can starve when steps overlap.

    Runs of one config have the same program, which is then compiled once. Their samples are empty.
    """
    from diffeqformer.training import loop, run
    from helpers import ONE_DEVICE

    programs, new_program = {}, run.Program

    def program(config, mesh, teacher=None):
        key = str((config, teacher))
        if key not in programs:
            programs[key] = new_program(config, mesh, teacher=teacher)
        return programs[key]

    monkeypatch.setattr(loop, "sample", lambda *_: "")
    monkeypatch.setattr(run, "make_mesh", lambda *_: ONE_DEVICE)
    monkeypatch.setattr(run, "Program", program)


@pytest.fixture
def small_store(tmp_path) -> pathlib.Path:
    """A store of three shards, one of them empty."""
    from helpers import TEXTS, make_store

    make_store(tmp_path / "task", {"train": [TEXTS[:40], [], TEXTS[40:]], "validation": [TEXTS[:5]]})
    return tmp_path / "task"


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory) -> pathlib.Path:
    """A SentencePiece model that writes unknown characters as bytes, like Llama's."""
    from helpers import train_sentencepiece

    path = tmp_path_factory.mktemp("model") / "spm.model"
    path.write_bytes(train_sentencepiece())
    return path


@pytest.fixture(scope="session")
def lossy_file(tmp_path_factory) -> pathlib.Path:
    """A SentencePiece model of the trainer's default settings: no newlines, and unknown ids for other scripts."""
    from helpers import train_sentencepiece

    path = tmp_path_factory.mktemp("model") / "lossy.model"
    path.write_bytes(train_sentencepiece({}))
    return path


@pytest.fixture(scope="session")
def short_stores(tmp_path_factory) -> pathlib.Path:
    """A folder with a store that passes for the standard library's. It holds sentences that a model can learn."""
    from helpers import make_store

    folder, random = tmp_path_factory.mktemp("stores"), np.random.RandomState(0)
    words = "def class return import for in while if not else try self print None True".split()
    texts = [" ".join(random.choice(words, 60)) for _ in range(400)]
    make_store(folder / "python_stdlib-bytes", {"train": [texts], "validation": [texts[:8]]})
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run with a checkpoint: an untrained byte-level model with large random weights."""
    from diffeqformer.checkpoints import checkpoint
    from helpers import drawn, toy_config

    workdir, config = tmp_path_factory.mktemp("run"), toy_config(model__max_length=64)
    params = drawn(config.model)[1]
    params["depth"]["layers"]["qkv"]["constant"] += 0.3
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash")
    state = {"params": params, "step": jax.numpy.int32(12), "optimizer": jax.numpy.zeros(99_999)}
    with checkpoint.open_to_write(workdir, kept=1) as checkpoints:
        checkpoint.save(checkpoints, 12, state, about)
    return workdir


@pytest.fixture
def script(monkeypatch):
    """A function that opens a script of experiments/ as a module, whose `main` runs it: its name, and its options.

    Keywords are functions that stand in for those of common.py.
    """
    from helpers import ROOT

    folder, known = ROOT / "experiments", set(flags.FLAGS)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(folder)

    def forget():
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)

    def open_script(name, *options, **stand_ins):
        forget()
        common = importlib.import_module("common")
        for function, stand_in in stand_ins.items():
            monkeypatch.setattr(common, function, stand_in)
        module = importlib.import_module(name)
        flags.FLAGS([name, *options])
        return module

    yield open_script
    forget()
    flags.FLAGS.unparse_flags()
