"""Checkpoints: what is saved in the background, opened from elsewhere, and said when it fails."""

import dataclasses
import gc
import os
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.checkpoints import checkpoint, checksums
from diffeqformer.data.tokenizers import SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.materialize import materialize
from diffeqformer.parallel.mesh import make_mesh
from helpers import drawn, run_steps, save_params, tokens_of, toy_config


@pytest.mark.long
def test_a_save_in_the_background_is_untouched_by_later_steps_and_by_readers(tmp_path):
    config = toy_config(checkpoints_kept=9, model__vocab_multiple=16)
    program, state, _ = run_steps(config, make_mesh((1, 2, 1), jax.devices()[:2]), 2)
    about, saved = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash"), {}
    with checkpoint.open_to_write(tmp_path, kept=9) as checkpoints:
        for step in range(2, 5):
            saved[step] = jax.tree.map(lambda leaf: np.array(leaf), state)
            checkpoint.save(checkpoints, step, state, about)
            state, _ = program.train_step(state, tokens_of(step, config))  # donates what is being saved
        checkpoint.check(checkpoints, wait=True)
        unfinished = tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp"
        unfinished.mkdir()
        assert checkpoint.load(tmp_path).step == 4 and unfinished.exists()  # opened beside the run
        for step, expected in saved.items():
            jax.tree.map(
                np.testing.assert_array_equal,
                checkpoint.restore_state(checkpoints.directory, step, program.state_shapes),
                expected,
            )
            recorded = checksums.of_tree(expected)
            assert checkpoint.read_about(checkpoints.directory, step) == dataclasses.replace(about, checksums=recorded)
    with pytest.raises(UserError, match="there is no checkpoint here"):
        checkpoint.load(tmp_path / "absent")


@pytest.mark.parametrize("kind", [ValueError, OSError])  # TensorStore's, and Python's
def test_a_full_disk_is_said_and_costs_no_earlier_checkpoint(kind, tmp_path, monkeypatch):
    about, items = checkpoint.About({}, "bytes"), {"params": {"w": jnp.ones(2)}}
    error = kind("RESOURCE_EXHAUSTED: Error writing \"a/0\": No space left on device [os_error_code='28']")
    with checkpoint.open_to_write(tmp_path, kept=1) as checkpoints:
        checkpoint.save(checkpoints, 1, items, about)
        checkpoint.check(checkpoints, wait=True)
        monkeypatch.setattr(os, "rename", mock.Mock(side_effect=error))
        checkpoint.save(checkpoints, 2, items, about)
        while checkpoints.is_saving_in_progress():
            time.sleep(0.01)
        with pytest.raises(UserError, match="can't be written or deleted: .*No space left"):
            checkpoint.check(checkpoints)
    assert (tmp_path / "checkpoints" / "1" / "params").is_dir()


def test_saves_leave_no_threads(tmp_path):
    """Each of Orbax's would hold three open files. Those of its newest save, and those that all saves use, may stay."""
    about, before = checkpoint.About(toy_config("gpt").to_dict(), "bytes"), set(threading.enumerate())
    with checkpoint.open_to_write(tmp_path, kept=1) as checkpoints:
        for step in range(1, 13):
            checkpoint.save(checkpoints, step, {"params": {"w": jnp.ones(2)}}, about)
            checkpoint.check(checkpoints, wait=True)
        begun = set(threading.enumerate()) - before
        for thread in begun:
            if "_run_loop" in thread.name:
                thread.join(5)
        gc.collect()
        assert len([thread for thread in begun if thread.is_alive()]) < 8, begun


def test_work_folders_can_be_in_a_bucket_and_what_goes_wrong_there_is_said():
    assert str(checkpoint.folder_of("gs://bucket/run")) == "gs://bucket/run/checkpoints"
    assert checkpoint.folder_of("run").is_absolute()
    for error, said in (
        (ImportError("gcsfs"), r"^--workdir: gs://b/run needs a package, which for gs:// is pip install gcsfs"),
        (FileNotFoundError("no bucket"), "^--workdir: gs://b/run: no bucket; choose a folder that can be written"),
        (KeyError("token"), "^--workdir: gs://b/run can't be reached: 'token'"),
    ):
        with pytest.raises(UserError, match=said), checkpoint.reachable("--workdir", "gs://b/run"):
            raise error


def test_a_checkpoint_opens_without_the_tokenizers_file(tmp_path, sentencepiece_file):
    tokenizer = SentencePieceTokenizer.open(str(sentencepiece_file))
    config = toy_config(data__tokenizer="sentencepiece", model__vocab_size=tokenizer.vocab_size)
    named = {"tokenizer": tokenizer.name, "tokenizer_data": tokenizer.save()}
    save_params(tmp_path, config, {1: drawn(config.model)[1]}, **named)
    opened = checkpoint.load(tmp_path).tokenizer
    assert opened.name == tokenizer.name and opened.encode("A cat sees <|it") == tokenizer.encode("A cat sees <|it")


def test_parameters_that_are_not_finite_are_opened_by_nothing_that_uses_them(tmp_path):
    """Neither on one device nor on all, as a run, a base of fine-tuning or to be materialized. An earlier one is."""
    config = toy_config()
    params = drawn(config.model)[1]
    broken = {**params, "final_norm": {**params["final_norm"], "scale": params["final_norm"]["scale"] * 1}}
    broken["final_norm"]["scale"][3] = np.inf
    save_params(tmp_path, config, {4: params, 5: broken})
    sentence = f"^{tmp_path}, checkpoint 5: all parameters must be finite numbers, but .*final_norm/scale has others; "
    for how in ({}, {"mesh": make_mesh()}, {"of": "config.base"}):
        with pytest.raises(UserError, match=sentence):
            checkpoint.load(tmp_path, **how)
    with pytest.raises(UserError, match=sentence):
        materialize(tmp_path)
    assert not list(tmp_path.glob("materialized*")) and checkpoint.load(tmp_path, step=4).step == 4
