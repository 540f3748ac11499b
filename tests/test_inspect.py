"""The inspection of checkpoints with known arrays."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from diffeqformer import inspect
from diffeqformer.checkpoints import checkpoint, stored_arrays
from diffeqformer.config import fields_of
from diffeqformer.console.progress import Progress, TensorBoard, read_curves
from diffeqformer.transformer import abstract_model, select
from helpers import ROOT, save_params, toy_config

BASE = {"workdir": "runs/base", "step": 7, "data_sha256": "another hash"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A run with adapters, all its weights i + 0.5 for one i, saved from eight devices, and the paths that train."""
    workdir, eight = tmp_path_factory.mktemp("adapters"), jax.make_mesh((8,), ("all",))
    config = toy_config("discretized", model__lora_rank=2, base="runs/base")
    model = abstract_model(config)
    shapes = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    params = {}
    for i, (path, leaf) in enumerate(shapes.items()):
        params[path] = np.full(leaf.shape, i + 0.5, np.float32)
        if path[-1] == "a":
            params[path] = jax.device_put(params[path], NamedSharding(eight, PartitionSpec(None, "all")))
    params = traverse_util.unflatten_dict(params)
    save_params(workdir, config, {3: select(params, model.trains)}, base=BASE)
    checkpoint.save_frozen(workdir, select(params, lambda path: not model.trains(path)), BASE)
    return workdir, {"/".join(path): (model.trains(path), i + 0.5) for i, path in enumerate(shapes)}


def test_statistics_are_those_of_the_parameters(run):
    params = nnx.to_pure_dict(nnx.state(checkpoint.load(run).model, nnx.Param))
    found = inspect.inspect_run(run)
    for row in found["parameters"]:
        leaf = np.asarray(traverse_util.flatten_dict(params, sep="/")[row["name"]], np.float64)
        expected = (leaf.mean(), leaf.std(), np.abs(leaf).max(), np.mean(leaf == 0))
        got = [row[name] for name in inspect.STATISTICS]
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
        assert (row["shape"], row["dtype"], row["count"]) == ([*leaf.shape], "float32", leaf.size)
        assert row["trains"] and row["not_finite"] == 0
    assert len(found["parameters"]) == len(jax.tree.leaves(params))
    assert (found["step"], found["steps"], found["kind"], found["num_steps"]) == (12, [12], "diffeqformer", 6)
    assert "toy: diffeqformer, field gpt, 6 steps of depth by euler\nstep 12 of 6" in inspect.text(found)


@pytest.mark.long
def test_the_command_takes_no_tensorflow_and_no_devices_of_the_training(adapters):
    workdir, parameters = adapters
    program = (
        "import runpy, sys; sys.modules['tensorflow'] = None; from diffeqformer.transformer import Transformer; "
        "Transformer.__init__ = None; runpy.run_module('diffeqformer.inspect', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"--workdir={workdir}"],
        cwd=ROOT, env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "tpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == inspect.text(inspect.inspect_run(workdir)) + "\n"


def test_what_is_frozen_is_listed_apart(adapters):
    workdir, parameters = adapters
    found = inspect.inspect_run(workdir)
    rows = {row["name"]: row for row in found["parameters"]}
    assert {name: (row["trains"], row["mean"]) for name, row in rows.items()} == parameters
    assert all(row["deviation"] == 0 and row["largest"] == row["mean"] for row in rows.values())
    sums = [sum(r["count"] for r in rows.values() if r["trains"] == t) for t in (True, False)]
    report = inspect.text(found)
    assert "began with the weights of runs/base at step 7" in report
    train, frozen = report.split(f"{sums[0]:,} which train, in checkpoints/3")[1].split(
        f"{sums[1]:,} frozen, in frozen/0"
    )
    assert "/kernel " not in train and "/kernel " in frozen and "token_embedding" not in frozen


def test_a_step_is_chosen_and_what_is_not_finite_is_said_loudly(tmp_path):
    good = {"token_embedding": np.full((3, 4), 2, jnp.bfloat16), "final_norm": {"scale": np.zeros(4, np.float32)}}
    bad = {**good, "token_embedding": np.array([np.nan, np.inf, -5, 1, 0], np.float32)}
    config = toy_config("gpt", seed=3)
    save_params(tmp_path, config, {5: good, 10: bad})
    found = inspect.inspect_run(tmp_path)
    expected = {"mean": -4 / 3, "deviation": np.std([-5, 1, 0]), "largest": 5, "zeros": 0.2, "not_finite": 2}
    assert {name: found["parameters"][0][name] for name in expected} == pytest.approx(expected)
    assert "left out of the other statistics: token_embedding (2 of 5)" in inspect.text(found)
    found = inspect.inspect_run(tmp_path, step=5)
    assert (found["step"], found["steps"]) == (5, [5, 10]) and "finite" not in inspect.text(found).lower()
    rows = [{name: row[name] for name in ("mean", "zeros", "dtype", "bytes")} for row in found["parameters"]]
    assert rows == [
        {"mean": 2, "zeros": 0, "dtype": "bfloat16", "bytes": 24},
        {"mean": 0, "zeros": 1, "dtype": "float32", "bytes": 16},
    ]  # fmt: skip
    assert "seed" in found["changed"] and not {"name", "model.kind", "model.solver", "base"} & {*found["changed"]}
    assert "\n  base = ''\n" in inspect.text(found, all_fields=True)
    assert list(found["config"]) == list(fields_of(config))
    assert "mean" not in inspect.inspect_run(tmp_path, with_statistics=False)["parameters"][0]


def test_large_arrays_are_taken_in_parts(tmp_path, monkeypatch):
    array = np.float32(1000 + np.random.RandomState(0).randn(50, 7))
    array[20] = np.nan  # also a block with less than others
    found, finite = inspect.statistics([array[:23], array[23:]]), np.float64(np.delete(array, 20, 0))
    np.testing.assert_allclose([found["mean"], found["deviation"]], [np.mean(finite), np.std(finite)])
    monkeypatch.setattr(stored_arrays, "CHUNK_BYTES", 4 * 2 * 5)
    stored = np.arange(6 * 3 * 10, dtype=np.float32).reshape(6, 3, 10)
    save_params(tmp_path, toy_config(), {1: {"array": stored}})
    [array] = checkpoint.open_arrays(*checkpoint.open_to_read(tmp_path)[:2], None).values()
    assert array.shape == stored.shape
    for bytes_at_once in (1, 4 * 40, 10**6):
        blocks, again = array.blocks(bytes_at_once), np.zeros_like(stored)
        for block in blocks:
            again[block] += array[block]
        np.testing.assert_array_equal(again, stored)
        largest = max(stored[block].nbytes for block in blocks)
        assert largest == stored.nbytes if bytes_at_once == 10**6 else largest <= max(bytes_at_once, 4 * 30)


def test_the_history_is_that_of_the_run_as_far_as_it_is_written(tmp_path):
    result = {"loss": 2.5, "perplexity": 8.0, "bits_per_byte": 3.0}
    progress = Progress(0, 3, 8, [TensorBoard(tmp_path, 0)])
    for step, loss in ((1, 2.5), (2, 2.25)):
        progress.train(step, {"loss": 2 * loss})
        progress.validation(step, {**result, "loss": loss})
    progress.close()
    curves = read_curves(tmp_path)
    [newest] = (tmp_path / "tensorboard").iterdir()
    whole = newest.read_bytes()
    newest.write_bytes(whole + b"\3" + bytes(11) + b"\xff" * 7)  # then nonsense of three bytes
    assert read_curves(tmp_path) == curves
    newest.write_bytes(whole[:-3])  # as while it is being written
    assert read_curves(tmp_path) == {**curves, "validation/bits_per_byte": {1: 3.0}}
    save_params(tmp_path, toy_config(), {2: {"token_embedding": np.ones(3, np.float32)}})
    found = inspect.inspect_run(tmp_path)
    assert found["validation"] == [{"step": 1, **result}, {"step": 2, "loss": 2.25, "perplexity": 8.0}]
    report = inspect.text(found)
    assert "bits/byte\n  1     2.5000        8.00     3.0000\n  2     2.2500        8.00\n" in report
    assert "training: step 2, loss 4.5, " in report
