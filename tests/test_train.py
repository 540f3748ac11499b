"""Training: the step, its curves, what a run saves, and how one with the schedule `wsd` is given more steps."""

import dataclasses
import json
import os
import pathlib
import queue
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax import nnx
from scipy.special import log_softmax

from diffeqformer import compare, inspect
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import folder_of, move_aside, steps_of
from diffeqformer.console.progress import Progress, TensorBoard
from diffeqformer.data import lock
from diffeqformer.data.lock import only_run
from diffeqformer.data.store import SPLITS, Split
from diffeqformer.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from diffeqformer.errors import Stopped, UserError
from diffeqformer.parallel import memory as device_memory
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training import hooks, loop, optimizer, resuming, run
from diffeqformer.training.step import Program, dropout_keys
from diffeqformer.training.validation import validate
from diffeqformer.transformer import split_model
from helpers import (
    FAMILY,
    ONE_DEVICE,
    change,
    drawn,
    first_state,
    lively_model,
    logits_of,
    make_store,
    run_steps,
    save_params,
    some_slow,
    tokens_of,
    toy_config,
)
from runs import curves


@pytest.mark.parametrize(
    "kind, field", some_slow(FAMILY, lambda case: case[0] not in ("diffeqformer", "gpt") or case[1] == "neox")
)
def test_every_model_learns_with_one_compilation(kind, field, compilations):
    config = toy_config(kind, field, steps=40, batch_size=2, model__dropout=0.1, optimizer__learning_rate=1e-2)
    _, state, losses = run_steps(config, ONE_DEVICE, 40)
    assert losses[-1, 0] < losses[0, 0] - 1 and int(state["step"]) == 40
    assert compilations("train_step") == 1


@pytest.mark.long
def test_the_step_computes_the_loss_with_dropout_and_its_gradient():
    config = toy_config(model__dropout=0.3, steps=1000, seed=3)
    program = Program(config, make_mesh())
    params, tokens = drawn(config.model)[1], jnp.asarray(tokens_of(0, config))

    def loss_of(params, keys):
        model = nnx.merge(program.graph, params)
        logits = jax.nn.log_softmax(model(tokens, model.weights(), keys)[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    losses, loss_and_gradient = [float(jax.jit(loss_of)(params, None))], jax.jit(jax.value_and_grad(loss_of))
    for step in (0, 5):
        loss, gradient = loss_and_gradient(params, dropout_keys(config.seed, jnp.int32(step), 8))
        _, scalars = program.train_step({**first_state(program), "step": jnp.int32(step)}, tokens)
        assert scalars["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert scalars["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)
        assert scalars["learning_rate"] == optimizer.learning_rate_schedule(config)(step)
        losses.append(float(loss))
    assert len({round(loss, 4) for loss in losses}) == 3  # another mask at another step


def test_evaluation_scores_every_token_but_the_first_of_each_window():
    """Of all batches, and of the last one, which has padding; nothing of the five ids that fill no window."""
    config = toy_config(batch_size=4, sequence_length=16)
    program, (graph, params) = Program(config, ONE_DEVICE), drawn(config.model)
    params["token_embedding"] *= 50  # no two targets are as likely
    ids = np.random.RandomState(0).permutation(16 * 11 + 5).astype(np.uint16)
    scores = validate(program, params, Split((ids,), text_bytes=len(ids) // 2, sha256=""))
    windows = np.int32(ids[: 16 * 11]).reshape(11, 16)
    logits = logits_of(graph, params, program.weights(params, None), windows)
    log_probs = log_softmax(np.float64(logits)[:, :-1], axis=-1)
    loss = -np.take_along_axis(log_probs, windows[:, 1:, None], axis=-1).mean()
    assert scores["loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(loss / np.log(2) * len(ids) / (len(ids) // 2), rel=1e-6)


@pytest.mark.long
def test_what_a_notice_left_unvalidated_is_validated_by_the_next_process(
    tmp_path, short_stores, monkeypatch, one_device_loop
):
    """The notice comes while the device computes the step."""
    config = toy_config("gpt", steps=9, eval_every=3, data__dir=str(short_stores), sequence_length=16)
    ended, count, of_another_start = [], Progress.train, TensorBoard(tmp_path, 0)  # which saved nothing
    of_another_start.scalars(0, "validation", {"loss": 9.0, "perplexity": 9.0, "bits_per_byte": 9.0})
    of_another_start.finish()
    monkeypatch.setattr(hooks, "validate", lambda *_: {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0})
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved at step 3"):
        patch.setattr(Progress, "train", lambda progress, step, of: ended.append(step) or count(progress, step, of))
        patch.setattr(loop.hosts.Notice, "now", lambda notice, wait: wait and 3 in ended)
        loop.train(config, tmp_path)
    assert "validation/loss" not in curves(tmp_path)
    loop.train(config, tmp_path)
    assert set(curves(tmp_path)["validation/loss"]) == {3, 6, 9}
    step = checkpoint.open_to_read(tmp_path, step="best").step
    assert step == 9  # the one that was saved right after a validation


@pytest.mark.long
def test_a_run_needs_neither_its_text_nor_its_tokenizer_again(
    tmp_path, sentencepiece_file, one_device_loop, monkeypatch
):
    """It goes on in another folder, with its store where it was. Another run begins with the store alone."""
    monkeypatch.chdir(tmp_path)
    tokenizer = SentencePieceTokenizer.open(str(sentencepiece_file))
    folder, model = tmp_path / "stores" / f"mine-{tokenizer.name}", shutil.copy(sentencepiece_file, "spm.model")
    about = make_store(folder, {split: [["A cat sees the odd thing. " * 40]] for split in SPLITS}, tokenizer)
    about |= {"task": "mine", "files": "a fingerprint", "tokenizer_data": tokenizer.save()}
    (folder / "store.json").write_text(json.dumps(about))
    config = toy_config("gpt", steps=1, model__vocab_size=tokenizer.vocab_size, checkpoint_every=1)
    config.data.update(task="mine", train_files="gone*", validation_files="gone", dir="stores")
    config.data.update(tokenizer="sentencepiece", tokenizer_file=model)
    loop.train(config, tmp_path / "run")
    os.remove(model)
    loop.train(config, tmp_path / "another")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    loop.train(config, tmp_path / "run")
    _, step, about, _ = checkpoint.open_to_read(tmp_path / "run")
    assert step == 1 and about.store == str(folder) and list((tmp_path / "other").iterdir()) == []


@pytest.mark.long
def test_a_validation_that_is_not_finite_ends_the_run_before_its_state_is_saved(
    tmp_path, short_stores, monkeypatch, one_device_loop
):
    config = toy_config("gpt", steps=6, checkpoint_every=2, eval_every=2, data__dir=str(short_stores))
    losses = iter([1.0, np.nan])
    monkeypatch.setattr(hooks, "validate", lambda *_: {"loss": next(losses), "perplexity": 2.0, "bits_per_byte": 3.0})
    with pytest.raises(UserError, match="^loss: it is nan in the validation at step 4; the last good .* is step 2 "):
        loop.train(config, tmp_path)
    best = checkpoint.open_to_read(tmp_path, step="best").step
    assert best == checkpoint.load(tmp_path).step == 2


def test_a_materialized_model_is_not_trained_further(tmp_path):
    config = toy_config("gpt")
    save_params(tmp_path, config, {1: {"w": np.ones(1)}}, materialized_from={"workdir": "run", "step": 1})
    with pytest.raises(UserError, match="holds a materialized or imported model, which has no optimizer state"):
        run.read_saved(config, tmp_path, checkpoint.About(config.to_dict(), "bytes"))


def test_a_sample_that_needs_too_much_memory_does_not_fail_a_finished_run(monkeypatch, capsys):
    program = Program(toy_config("gpt"), ONE_DEVICE)
    params = first_state(program)["params"]
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "free_on_host", lambda: 1000)
        loop.print_sample(program, params, ByteTokenizer())
    printed = capsys.readouterr().out
    assert printed.startswith("There is no sample: num_steps: the weights of ") and "---" not in printed

    def refuse(program, params):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr(loop, "undivided", refuse)  # a generator that is divided
    assert loop.print_sample(program, params, ByteTokenizer()).num_steps == 6
    assert capsys.readouterr().out == "There is no sample: RESOURCE_EXHAUSTED: Out of memory\n"


@pytest.mark.long
def test_only_finite_states_are_saved_and_divergence_names_the_last_one(
    tmp_path, short_stores, monkeypatch, one_device_loop
):
    """A rate of 1e38 lets the third step diverge."""
    changes = {"optimizer__learning_rate": 1e38, "optimizer__warmup_fraction": 0.5, "data__dir": str(short_stores)}
    config = toy_config("gpt", steps=6, checkpoint_every=2, seed=7, **changes)
    read, seen = Split.batch, []
    monkeypatch.setattr(Split, "batch", lambda *args, **rows: seen.append((args[1], args[4])) or read(*args, **rows))
    sentence = r"^loss: it is .* at step 3; the last good checkpoint is step 2 in .*; start again in another "
    with pytest.raises(UserError, match=sentence):
        loop.train(config, tmp_path)
    assert checkpoint.load(tmp_path).step == 2
    # Step n takes batch n - 1: a shift is unseen when two runs are compared.
    assert sorted(set(seen))[:3] == [(n, 7) for n in range(3)]

    monkeypatch.undo()
    about = checkpoint.load(tmp_path).about
    with pytest.raises(UserError, match="^config.data.tokenizer_file: must be that of the run in .*, bytes, but"):
        run.read_saved(config, tmp_path, dataclasses.replace(about, tokenizer="other"))
    for what in ("data_sha256", "validation_sha256"):
        with pytest.raises(UserError, match=f"another {what}"):
            resuming.check_unchanged(dataclasses.replace(about, **{what: "other"}), about, tmp_path)
    resuming.check_unchanged(about, dataclasses.replace(about, validation_sha256=""), tmp_path)
    another = change(config, data__task="openwebtext", data__dir=str(tmp_path / "stores"))
    with pytest.raises(UserError, match="another config.data.task"):  # before a corpus is prepared for hours
        loop.train(another, tmp_path)
    assert not (tmp_path / "stores").exists()


def test_a_second_run_waits_for_the_first_one(tmp_path, monkeypatch):
    order, workdir, said = [], epath.Path(tmp_path), queue.Queue()
    monkeypatch.setattr(lock, "print", lambda text, **_: said.put(text), raising=False)

    def second():
        with only_run(workdir):
            order.append("second")

    with only_run(workdir):
        thread = threading.Thread(target=second)
        thread.start()
        assert "another run is using this folder; waiting for it to end" in said.get(timeout=60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with only_run(epath.Path("gs://bucket/run")):  # where there are no locks
        pass


TOY = pathlib.Path("runs/toy")
WSD = {"optimizer__schedule": "wsd", "optimizer__warmup_steps": 2, "optimizer__decay_fraction": 0.5}


def short(stores, **changes):
    """A run of 8 steps that decays after 4."""
    config = toy_config(steps=8, batch_size=8, eval_every=4, checkpoint_every=2, checkpoints_kept=2, log_every=1)
    return change(config, **WSD, data__dir=str(stores), **changes)


def stop(calls: list) -> None:
    """Interrupt at the third call."""
    calls.append(1)
    if len(calls) == 3:
        raise KeyboardInterrupt


@pytest.mark.long
def test_a_run_that_is_given_more_steps_is_the_longer_run(tmp_path, short_stores, monkeypatch, one_device_loop):
    """Bit for bit, with its curves; what it was before stays, also if moving it was interrupted."""
    config, ours = short(short_stores), tmp_path / "ours"
    long = split_model(loop.train(change(short(short_stores), steps=16), tmp_path / "long"))[1]
    first = split_model(loop.train(config, ours))[1]
    assert steps_of(folder_of(ours)) == [4, 6, 8]  # the newest two, and that before the decay

    (ours / "trackers").mkdir()
    config, moved = change(short(short_stores), steps=16), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resuming, "move_aside", lambda *paths: stop(moved) or move_aside(*paths))
        loop.train(config, ours)
    assert moved and steps_of(folder_of(ours)) == [4, 6]
    extended = split_model(loop.train(config, ours))[1]
    jax.tree.map(np.testing.assert_array_equal, extended, long)
    names = ("train/loss", "train/learning_rate", "validation/loss")
    assert all(curves(ours)[name] == curves(tmp_path / "long")[name] for name in names)
    assert steps_of(folder_of(ours)) == steps_of(folder_of(tmp_path / "long"))

    ended = checkpoint.load(ours / "ended-8")
    assert ended.step == 8 and ended.config.steps == 8
    assert (ours / "ended-8" / "trackers").is_dir() and not (ours / "trackers").exists()
    jax.tree.map(np.testing.assert_array_equal, split_model(ended.model)[1], first)
    assert max(curves(ours / "ended-8")["validation/loss"]) == 8
    assert compare.read_run(str(ours / "ended-8"))[0].end() == curves(ours / "ended-8")["validation/bits_per_byte"][8]


@pytest.mark.long
def test_a_lower_rate_makes_another_run(tmp_path, short_stores, one_device_loop, capsys):
    """Which the log, the curve, `inspect` and `compare` say. Adapters find their frozen weights from both folders."""
    base = toy_config("gpt")
    save_params(tmp_path / "base", base, {1: split_model(lively_model(**base.model))[1]}, data_sha256="")
    config = short(short_stores, model__lora_rank=2, base=str(tmp_path / "base"), optimizer__learning_rate=1e-3)
    loop.train(config, tmp_path / "run")
    capsys.readouterr()
    loop.train(change(config, steps=12, optimizer__learning_rate=5e-4), tmp_path / "run")
    said = "until step 4 its peak learning rate was 0.001; now it is 0.0005, so this is another run"
    assert said in capsys.readouterr().out
    rates = curves(tmp_path / "run")["train/learning_rate"]
    assert rates[4] == pytest.approx(1e-3) and rates[5] == rates[6] == pytest.approx(5e-4)
    assert "until step 4 the peak learning rate was 0.001" in inspect.text(inspect.inspect_run(tmp_path / "run"))
    [found] = compare.read_run(str(tmp_path / "run"))
    assert found.setting()["before"] == "0.001 until step 4"
    assert [checkpoint.load(folder).step for folder in (tmp_path / "run", tmp_path / "run" / "ended-8")] == [12, 8]


def test_what_cannot_go_on_is_refused(tmp_path):
    cosine, stable = toy_config(steps=10), toy_config(steps=10, **WSD)
    ways = r"--config.base=runs/toy\); one with config.optimizer.schedule=wsd can be given more steps$"
    with pytest.raises(UserError, match=rf"^runs/toy: holds a run with another config.steps \(there 10, .*{ways}"):
        resuming.check_resumable(change(toy_config(), steps=20), cosine, TOY)
    sentence = "another config.optimizer.learning_rate .there 0.0006, now 0.001; it may only be lowered"
    with pytest.raises(UserError, match=sentence):
        resuming.check_resumable(toy_config(steps=20, **WSD, optimizer__learning_rate=1e-3), stable, TOY)
    changes = dict(optimizer__learning_rate=1e-4, optimizer__final_fraction=0.0)
    resuming.check_resumable(toy_config(steps=20, **WSD, **changes), stable, TOY)

    save_params(tmp_path, stable, {7: {"x": np.ones(1)}, 10: {"x": np.ones(1)}})
    with pytest.raises(UserError, match="^config.steps: must be above 10 to go on from before the decay .* it is 9"):
        resuming.check_extendable(toy_config(steps=9, **WSD), stable, tmp_path)
    with pytest.raises(UserError, match="has to go on from a checkpoint of step 5 or before, but there are 7, 10;"):
        resuming.check_extendable(toy_config(steps=20, **WSD), stable, tmp_path)
    resuming.check_extendable(stable, stable, tmp_path)
