"""Weights sampled once and written as a separate model."""

import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface import write_run

from diffeqformer.checkpoints import checkpoint
from diffeqformer.config import check_config
from diffeqformer.errors import UserError
from diffeqformer.inference.discretize import discretize
from diffeqformer.materialize import materialize
from diffeqformer.transformer import split_model
from helpers import FAMILY, drawn, forward, save_params, some_slow, toy_config
from runs import command


@pytest.mark.long
def test_a_materialized_model_is_small_and_says_the_same(run, tmp_path):
    done = command("materialize", "--workdir", run, "--num_steps=9", "--dtype=bfloat16", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    original, opened = checkpoint.load(run), checkpoint.load(tmp_path / "out")
    assert opened.step == 12 and opened.config.model.kind == "discretized" and opened.config.model.num_steps == 9
    assert opened.about.materialized_from["model"]["kind"] == "diffeqformer"
    params = nnx.state(opened.model, nnx.Param)
    types = {path: value.dtype for path, value in nnx.to_flat_state(params)}
    norms = {path for path in types if path[-1] in ("scale", "shift")}
    assert all(types[path] == ("float32" if path in norms else "bfloat16") for path in types) and len(norms) == 6

    tokens = jnp.arange(32).reshape(2, 16)
    expected, logits = forward(original.model, tokens, 9), forward(opened.model, tokens)
    np.testing.assert_allclose(logits, expected, atol=0.03 * float(jnp.abs(expected).max()))
    size, folder = sum(leaf.nbytes for leaf in jax.tree.leaves(params)), tmp_path / "out" / "checkpoints" / "12"
    assert sum(path.stat().st_size for path in (folder / "params").rglob("*")) < size + 50_000
    assert not (folder / "optimizer").exists()


CASES = [(*row, {}) for row in FAMILY] + [("gpt", "gpt", {"model__lora_rank": 3})]


@pytest.mark.parametrize("kind, field, changes", some_slow(CASES, lambda case: case[1] == "llama" != case[0]))
def test_every_model_can_be_materialized(kind, field, changes, tmp_path):
    """To the same bits as all layers at once."""
    write_run(tmp_path / "run", kind, field, **changes)
    opened, made = (checkpoint.load(folder) for folder in (tmp_path / "run", materialize(tmp_path / "run")))
    expected = split_model(discretize(opened.model, opened.config, 6, "float32"))[1]
    jax.tree.map(np.testing.assert_array_equal, split_model(made.model)[1], expected)


def test_a_run_is_materialized_in_its_own_type_and_nothing_is_left_of_a_save_that_fails(tmp_path):
    config = toy_config(model__dtype="bfloat16", model__training_depths="2,6")
    save_params(tmp_path / "run", config, {1: drawn(config.model)[1]}, time_spent={"steps": 1.0})
    with mock.patch.object(os, "rename", side_effect=OSError("no space left")):
        with pytest.raises(UserError, match="a checkpoint can't be written or deleted: no space left"):
            materialize(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    folder = materialize(tmp_path / "run")  # the same folder, which isn't occupied
    assert folder == tmp_path / "run" / "materialized-6-bfloat16"
    opened = checkpoint.load(folder)
    check_config(opened.config, num_devices=None)
    assert opened.config.model.dtype == "bfloat16" and opened.about.time_spent is None  # it is the run's


def test_materializing_never_overwrites_and_says_what_is_wrong(run, tmp_path):
    materialize(run, 2, "bfloat16", tmp_path / "out")
    config = toy_config(model__solver="heun")
    save_params(tmp_path / "heun", config, {1: drawn(config.model)[1]})
    before = sorted(tmp_path.rglob("*"))
    for arguments, sentence in (
        ((run, 3, "float32", tmp_path / "out"), "--output: .*out already holds a checkpoint"),
        ((run, 0, "float32", tmp_path / "other"), "num_steps: must be at least 1, but it is 0"),
        ((tmp_path / "heun",), "--workdir: .* trained with heun takes weights at several times"),
    ):
        with pytest.raises(UserError, match=sentence):
            materialize(*arguments)
    assert sorted(tmp_path.rglob("*")) == before
