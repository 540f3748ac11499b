"""Weights sampled once and written as a separate model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer import checkpoint
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.sampling import (
    generate,
)
from diffeqformer.materialize import materialize
from diffeqformer.training.loop import validate
from diffeqformer.training.step import Program
from diffeqformer.transformer import split_model
from helpers import FAMILY, ONE_DEVICE, build_model, drawn, toy_config
from runs import command


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_materialized_model_is_small_and_says_the_same(run, dtype, tmp_path):
    done = command("materialize", "--workdir", run, "--num_steps=9", f"--dtype={dtype}", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    original, opened = checkpoint.load(run), checkpoint.load(tmp_path / "out")
    assert opened.step == 12 and opened.config.model.kind == "discretized" and opened.config.model.num_steps == 9
    assert opened.about.materialized_from["model"]["kind"] == "diffeqformer"
    sizes = {path: value.dtype for path, value in nnx.state(opened.model, nnx.Param).flat_state()}
    norms = {path for path in sizes if path[-1] in ("scale", "shift")}
    assert all(sizes[path] == (jnp.float32 if path in norms else dtype) for path in sizes) and len(norms) == 6

    tokens = jnp.arange(32).reshape(2, 16)
    expected = original.model(tokens, original.model.weights(original.model.grid(9)))
    logits = opened.model(tokens, opened.model.weights())
    tolerance = {"float32": 1e-6, "bfloat16": 0.03}[dtype]
    np.testing.assert_allclose(logits, expected, atol=tolerance * float(jnp.abs(expected).max()))
    states = opened.model.trajectory(tokens, opened.model.weights())
    assert states.shape == (10, 2, 16, 32) and states.dtype == jnp.float32
    assert len(generate(opened.model, ByteTokenizer(), "", tokens=3, key=jax.random.key(0))) == 1

    split_ = Split((np.arange(300, dtype=np.uint16) % 257,), text_bytes=300, sha256="")
    losses = []
    for which, num_steps in ((original, 9), (opened, None)):
        config = which.config
        program = Program(config, ONE_DEVICE)
        losses.append(validate(program, split_model(which.model)[1], split_, config, num_steps)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=tolerance) and losses[0] > 1

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(opened.model, nnx.Param)))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out" / "checkpoints" / "12" / "params").rglob("*"))
    assert on_disk < size + 50_000  # and no optimizer:
    assert not (tmp_path / "out" / "checkpoints" / "12" / "optimizer").exists()


@pytest.mark.parametrize("kind, field", FAMILY)
def test_every_model_can_be_materialized(kind, field, tmp_path):
    config = toy_config(kind, field)
    model = build_model(**config.model)
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash")
    with checkpoint.open_checkpoints(tmp_path / "run", kept=1) as manager:
        params = split_model(model)[1]
        checkpoint.save(manager, 1, {"params": params, "step": jnp.int32(1)}, about)
    folder = materialize(tmp_path / "run")
    opened = checkpoint.load(folder)
    assert folder == tmp_path / "run" / "materialized-6-float32"
    tokens = jnp.arange(16)[None]
    np.testing.assert_allclose(opened.model(tokens, opened.model.weights()), model(tokens, model.weights()), atol=1e-5)


def test_a_run_is_materialized_in_its_own_type_and_nothing_is_left_of_a_save_that_fails(tmp_path, monkeypatch):
    config = toy_config(model__dtype="bfloat16")
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash", time_spent={"steps": 1.0})
    with checkpoint.open_checkpoints(tmp_path / "run", kept=1) as manager:
        checkpoint.save(manager, 1, {"params": drawn(config.model)[1]}, about)

    def fails(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.CheckpointManager, "save", fails)
        with pytest.raises(UserError, match="a checkpoint can't be written: no space left"):
            materialize(tmp_path / "run")
    folder = materialize(tmp_path / "run")  # the same folder, which isn't occupied
    assert folder == tmp_path / "run" / "materialized-6-bfloat16"
    opened = checkpoint.load(folder)
    assert opened.config.model.dtype == "bfloat16" and opened.about.time_spent is None  # it is the run's


def test_materializing_never_overwrites_and_says_what_is_wrong(run, tmp_path):
    materialize(run, 2, "bfloat16", tmp_path / "out")
    before = sorted(path for path in tmp_path.rglob("*"))
    for arguments, sentence in (
        ((run, 3, "float32", tmp_path / "out"), "--output: .*out already holds a checkpoint"),
        ((run, 3, "float32", run), "--output: .* already holds a checkpoint"),
        ((run, 0, "float32", tmp_path / "other"), "num_steps: must be at least 1, but it is 0"),
        ((tmp_path / "out", 3), "num_steps: this model has weights for 2 steps and for no other number, but it is 3"),
        ((tmp_path / "absent",), "there is no checkpoint here"),
    ):
        with pytest.raises(UserError, match=sentence):
            materialize(*arguments)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_model_whose_solver_takes_weights_several_times_in_a_step_is_refused(tmp_path):
    config = toy_config(model__solver="heun")
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash")
    with checkpoint.open_checkpoints(tmp_path, kept=1) as manager:
        checkpoint.save(manager, 1, {"params": drawn(config.model)[1]}, about)
    with pytest.raises(
        UserError, match="^--workdir: a model that was trained with heun takes weights at several times"
    ):
        materialize(tmp_path)
