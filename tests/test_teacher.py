"""A teacher: another model whose distributions of the next token a run learns beside the text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax.losses import kl_divergence_with_log_targets

from diffeqformer import reference
from diffeqformer.checkpoints.about import About
from diffeqformer.config import check_config
from diffeqformer.doctor import needs_of
from diffeqformer.errors import Stopped, UserError
from diffeqformer.parallel.memory import size_of
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training import hooks, loop, room
from diffeqformer.training.room import train_step_by_shapes
from diffeqformer.training.step import Program
from diffeqformer.training.teacher import config_of_teacher, record_of_teacher
from diffeqformer.transformer import split_model
from helpers import ONE_DEVICE, change, drawn, first_state, lively_model, save_params, tokens_of, toy_config
from runs import curves


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, student, teacher, changes",
    [
        ((1, 1, 1), "diffeqformer", "llama", {"microbatches": 2, "model__norm_of_norm": False}),
        ((2, 2, 2), "gpt", "shared", {"model__vocab_multiple": 16}),
        ((2, 1, 1), "diffeqformer", "diffeqformer", {"model__generate_chunk": 2, "microbatches": 2}),
    ],
)
def test_a_student_learns_the_text_and_its_teacher(mesh, student, teacher, changes):
    """On any mesh, of any kinds and depths, with other padding: loss and gradient are those from all logits."""
    devices, config = make_mesh(mesh, jax.devices()[: math.prod(mesh)]), toy_config(student, **changes)
    config.update(teacher_weight=0.5, kernels="")  # gradients of P have its own shape
    field = "llama" if teacher == "llama" else "gpt"
    theirs = toy_config(teacher, field, model__num_steps=4, model__vocab_multiple=8 * max(mesh), seed=1)
    program, tokens = Program(config, devices, teacher=theirs), jnp.asarray(tokens_of(0, config))
    params, model = first_state(program)["params"], lively_model(**theirs.model)
    soft = model(tokens, model.weights())[:, :-1, :257]

    def whole(params):
        student = nnx.merge(program.graph, params)
        logits = student(tokens, student.weights())[..., :257]
        ours, theirs = jax.nn.log_softmax(logits[:, :-1]), jax.nn.log_softmax(soft)
        return reference.loss(logits, tokens) + 0.5 * kl_divergence_with_log_targets(ours, theirs).mean()

    state = program.loss.teacher.state(model)
    found = jax.jit(
        lambda *inputs: program.loss.value_and_grad(*inputs[:2], None, config.microbatches, None, inputs[2])
    )(params, tokens, state)
    expected = jax.jit(jax.value_and_grad(whole))(jax.tree.map(jnp.asarray, jax.device_get(params)))
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-6)
    for ours, plain in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=2e-6)


@pytest.mark.long
def test_a_resumed_run_keeps_the_teacher_that_it_began_with(tmp_path, short_stores, one_device_loop, monkeypatch):
    """Bit for bit, though the teacher's run is gone; by default the base teaches."""
    theirs, text = toy_config("gpt"), {"data__dir": str(short_stores), "steps": 4, "teacher_weight": 1.0}
    params = drawn(theirs.model)[1]
    save_params(tmp_path / "teacher", theirs, {3: params})
    monkeypatch.setattr(hooks, "validate", lambda *_: {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0})
    config = toy_config("shared", teacher=str(tmp_path / "teacher"), **text)
    whole = split_model(loop.train(config, tmp_path / "whole"))[1]
    seen = []
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved at step 2"):
        patch.setattr(loop.hosts.Notice, "now", lambda notice, wait: seen.append(notice) or len(seen) == 2)
        loop.train(config, tmp_path / "parts")
    (tmp_path / "teacher").rename(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    config.teacher = "teacher"  # the same folder
    assert needs_of(config, "parts").on_device > 0  # also for the doctor, which is run before
    parts = split_model(loop.train(config, tmp_path / "parts"))[1]
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    with pytest.raises(UserError, match="^.*parts: holds a run with another config.teacher_weight .there 1.0, now 2"):
        loop.train(change(config.copy_and_resolve_references(), teacher_weight=2.0), tmp_path / "parts")
    alone = toy_config("gpt", base="base@3", **text)
    loop.train(alone, tmp_path / "alone")
    with pytest.raises(UserError, match="^config.teacher: must be the folder of a trained run, but teacher has no"):
        loop.train(config, tmp_path / "new")
    losses = curves(tmp_path / "alone")["train/loss"]
    plain = toy_config("gpt", base="base@3", **{**text, "teacher_weight": 0.0})
    loop.train(plain, tmp_path / "plain")
    # A model that is its own teacher diverges from it by nothing, at first.
    assert losses[1] == pytest.approx(curves(tmp_path / "plain")["train/loss"][1], rel=1e-6)
    assert losses[4] > 1.00001 * curves(tmp_path / "plain")["train/loss"][4]


def test_memory_has_room_for_a_teacher_while_training_goes_on(monkeypatch):
    config = toy_config("gpt", teacher_weight=1.0)
    program = Program(config, ONE_DEVICE, teacher=toy_config("llama", "llama", model__width=64))
    teacher = size_of(program.teacher_shapes)
    assert train_step_by_shapes(program)["teacher"] == teacher > 4 * 6 * 64 * 64
    monkeypatch.setattr(room, "free_bytes", lambda _: size_of(program.state_shapes) + teacher - 1)
    room.check_memory(program, will_train=False)
    with pytest.raises(UserError, match="^config.model: its parameters, its teacher and the optimizer's state need "):
        room.check_memory(program, will_train=True)


def test_a_teacher_that_does_not_suit_is_refused(tmp_path):
    save_params(tmp_path / "small", toy_config("gpt"), {1: {"x": jnp.zeros(1)}})
    save_params(tmp_path / "large", toy_config("gpt", model__vocab_size=300), {1: {"x": jnp.zeros(1)}})
    cases = (
        ({"teacher": "none", "teacher_weight": 1.0}, "teacher: must be the folder of a trained run, but none has no"),
        ({"teacher": "large", "teacher_weight": 1.0}, "teacher: must have 257 ids, as this model has, but it has 300"),
        ({"teacher": "small", "teacher_weight": 1.0, "mesh__tensor": 8}, "teacher: small doesn't suit this run: "
         "config.mesh.tensor: must divide config.model.heads"),
        ({"teacher": "small"}, "teacher: must come with a config.teacher_weight above 0, but it is 'small'"),
        ({"teacher_weight": 1.0}, "teacher_weight: must come with config.teacher or config.base, .* but it is 1.0"),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for changes, sentence in cases:
            config = toy_config("gpt", **changes)
            with pytest.raises(UserError, match=f"^config.{sentence}"):
                check_config(config, None)
                config_of_teacher(config, jax.devices(), "new")
        with pytest.raises(UserError, match="^config.data.tokenizer: must be the tokenizer of config.teacher, bytes"):
            record_of_teacher(toy_config("gpt", teacher="small", teacher_weight=1.0), About({}, "bytes", "more"))
