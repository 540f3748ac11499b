"""Models of weights per layer in fewer layers, and the order in which layers are left out."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from huggingface import write_run

from diffeqformer.checkpoints import checkpoint
from diffeqformer.config import check_config
from diffeqformer.depth.depths import left_out_layers
from diffeqformer.errors import UserError
from diffeqformer.inference import gaps
from diffeqformer.inference.scoring import Stretch
from diffeqformer.leave_out import check_options, losses_by_removal
from diffeqformer.materialize import materialize
from diffeqformer.training.finetune import inherit
from diffeqformer.training.step import Program
from diffeqformer.transformer import new_model, split_model, weights_at
from helpers import ONE_DEVICE, build_model, first_state, forward, lively_model, tokens_of, toy_config
from runs import command

TOKENS = jnp.asarray(np.random.RandomState(0).randint(257, size=(2, 16)))


def of_layers(model, kept):
    """A Llama of some layers of another alone."""
    alone, params = split_model(build_model("llama", num_steps=len(kept), vocab_size=257))[0], split_model(model)[1]
    depth = jax.tree.map(lambda leaf: leaf[np.array(kept)], params["depth"])
    return nnx.merge(alone, params | {"depth": depth})


def test_fewer_steps_leave_out_layers_in_order():
    model = lively_model("llama", left_out="2,5,0", vocab_size=257)
    assert left_out_layers("") == () and left_out_layers("2,5, 0") == (2, 5, 0)
    for kept in ([0, 1, 3, 4, 5], [0, 1, 3, 4], [1, 3, 4]):
        expected = forward(of_layers(model, kept), TOKENS)
        np.testing.assert_allclose(forward(model, TOKENS, len(kept)), expected, rtol=0, atol=1e-5)
    for steps in (2, 7):
        with pytest.raises(UserError, match=f"^num_steps: this model has weights for 3 to 6 steps, but it is {steps}"):
            forward(model, TOKENS, steps)


def test_layers_that_a_step_leaves_out_have_no_gradient():
    config = toy_config("llama", "llama", model__left_out="1,4", model__training_depths="4,6", model__remat="products")
    program = Program(config, ONE_DEVICE)
    params = first_state(program)["params"]
    grid = nnx.merge(program.graph, params).grid(4)
    _, gradient = jax.jit(lambda params, tokens: program.loss.value_and_grad(params, tokens, None, 1, grid))(
        params, tokens_of(0, config)
    )
    for leaf in jax.tree.leaves(gradient["depth"]):
        moved = np.abs(np.asarray(leaf)).reshape(6, -1).max(axis=1) > 0
        assert moved.tolist() == [True, False, True, True, False, True]


def test_fewer_layers_are_a_model_of_their_own_and_all_of_them_keep_the_order(tmp_path):
    write_run(tmp_path / "run", "llama", "llama", model__left_out="3,1", model__training_depths="4,6")
    model = checkpoint.load(tmp_path / "run").model
    for steps, order, depths in ((4, "", ""), (6, "3,1", "4,6")):
        made = checkpoint.load(materialize(tmp_path / "run", steps, "float32", tmp_path / str(steps)))
        config = made.config.model
        assert (config.num_steps, config.left_out, config.training_depths) == (steps, order, depths)
        np.testing.assert_allclose(forward(made.model, TOKENS), forward(model, TOKENS, steps), rtol=0, atol=1e-5)
    for given, order in (({}, "3,1"), ({"model__left_out": "0,2"}, "0,2")):
        config = toy_config("llama", "llama", base=str(tmp_path / "run"), **given)
        assert inherit(config, tmp_path / "new", {"base"}).model.left_out == order


def test_the_layer_that_is_missed_least_is_left_out():
    """Found by trying each, with models that have the other layers alone."""
    model = lively_model("llama", vocab_size=257)
    (none, whole), *rest = losses_by_removal(model, [Stretch(row, 1) for row in TOKENS.tolist()], 4, batch_size=8)

    def loss(kept):
        log_probs = jax.nn.log_softmax(forward(of_layers(model, kept), TOKENS[:, :-1]))
        return -float(jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], 2).mean())

    kept = list(range(6))
    assert none is None and whole == pytest.approx(loss(kept), rel=1e-5) and len(rest) == 2
    for layer, found in rest:
        losses = {left: loss([other for other in kept if other != left]) for left in kept}
        assert layer == min(losses, key=losses.get) and found == pytest.approx(losses[layer], rel=1e-5)
        kept.remove(layer)


@pytest.mark.parametrize(("kind", "kept"), [("llama", [1, 2, 4]), ("gpt", [0, 1, 3, 5]), ("neox", [0, 3, 4, 5])])
def test_layers_before_gaps_take_their_states_nearest_to_those_after_them(kind, kept, monkeypatch):
    """By the derivative of the distance from the whole model's states, after the layers that were fitted before."""
    monkeypatch.setattr(gaps, "RIDGE", 1e-6)
    model, afters = lively_model(kind, vocab_size=257, mlp=80), [*kept[1:], 6]
    tokens, whole = jnp.asarray(np.random.RandomState(1).randint(257, size=(24, 16))), weights_at(model)
    made = gaps.fitted_layers(model, [np.array(tokens[:16]), np.array(tokens[16:])], kept)
    before, targets = jax.tree.map(lambda leaf: leaf[np.array(kept)], whole.layers), model.trajectory(tokens, whole)

    def distance(output, row, after):
        layers = jax.tree.map(lambda leaf: jnp.asarray(leaf[: row + 1]), made)
        layers["mlp_down"] = {name: layers["mlp_down"][name].at[row].set(leaf) for name, leaf in output.items()}
        walk = dataclasses.replace(whole, layers=layers, step_sizes=jnp.ones(row + 1))
        lacks = (model.trajectory(tokens, walk)[-1] - targets[after]) ** 2
        return jnp.mean(lacks / jnp.mean(targets[after] ** 2, -1, keepdims=True))

    for row, (layer, after) in enumerate(zip(kept, afters)):
        old, new = ({name: leaf[row] for name, leaf in layers["mlp_down"].items()} for layers in (before, made))
        if after == layer + 1:
            jax.tree.map(np.testing.assert_array_equal, old, new)
            continue
        steep, flat = (optax.tree.norm(jax.grad(distance)(output, row, after)) for output in (old, new))
        assert flat < 1e-3 * steep
    del made["mlp_down"], before["mlp_down"]
    jax.tree.map(np.testing.assert_array_equal, made, before)


def test_fitted_layers_keep_their_type_and_what_is_added_keeps_them_close(monkeypatch):
    monkeypatch.setattr(gaps, "RIDGE", 1e4)
    graph, params = split_model(lively_model("llama", vocab_size=257))
    model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    made = gaps.fitted_layers(model, [np.arange(32).reshape(2, 16)], [0, 1, 5])["mlp_down"]["kernel"]
    old = split_model(model)[1]["depth"]["layers"]["mlp_down"]["kernel"][np.array([0, 1, 5])]
    assert made.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(made), np.float32(old), rtol=0, atol=0.01)


def test_layers_within_two_of_a_gap_learn_together():
    """From the states of the whole model, and the others stay."""
    assert gaps.groups_of([0, 1, 2, 3, 8, 9, 10, 11], 12) == [[0], [1], [2, 3, 8, 9], [10], [11]]
    assert gaps.groups_of([1, 2, 3, 4, 6], 7) == [[1], [2], [3, 4, 6]]
    model, kept = lively_model("gpt", num_steps=8, vocab_size=257), [0, 1, 2, 4, 5, 6, 7]
    tokens, whole = jnp.asarray(np.random.RandomState(1).randint(257, size=(24, 16))), weights_at(model)
    batches = [np.array(tokens[:16]), np.array(tokens[16:])]
    fitted, learned = (gaps.fitted_layers(model, batches, kept, epochs) for epochs in (0, 20))
    target, distances = model.trajectory(tokens, whole)[6], []
    for layers in (fitted, learned):
        walk = dataclasses.replace(whole, layers=jax.tree.map(lambda leaf: leaf[:5], layers), step_sizes=jnp.ones(5))
        distances.append(float(jnp.linalg.norm(model.trajectory(tokens, walk)[-1] - target)))
    assert distances[1] < 0.9 * distances[0]
    one, same = (gaps.fitted_layers(model, batches, [0], epochs)["qkv"]["kernel"] for epochs in (20, 0))
    assert (one != same).any()
    moved = np.abs(learned["qkv"]["kernel"] - fitted["qkv"]["kernel"]).max((1, 2)) > 0
    assert moved.tolist() == [False, True, True, True, True, False, False]


@pytest.mark.long
def test_the_command_prints_an_order_that_a_config_takes_and_writes_a_model_without_these_layers(tmp_path):
    write_run(tmp_path / "run", "llama", "llama", model__left_out="0", model__training_depths="5,6")
    (tmp_path / "text.txt").write_text("some text of which there are several windows. " * 40)
    text, to = f"--files={tmp_path / 'text.txt'}", f"--to={tmp_path / 'four'}"
    done = command("leave_out", f"--workdir={tmp_path / 'run'}", text, f"--output={tmp_path / 'order'}", "--fewest=4")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "order" / "results.json").read_text())
    order = results["left_out"]
    assert len(results["losses"]) == 3 and f"\n--config.model.left_out={order}\n" in done.stdout
    assert results["windows"] == 8 and (tmp_path / "order" / "losses.png").stat().st_size > 5000
    check_config(toy_config("llama", "llama", model__left_out=order), 1)

    done = command("leave_out", f"--workdir={tmp_path / 'run'}", text, f"--order={order}", to)
    assert done.returncode == 0, done.stderr
    opened, made = (checkpoint.load(tmp_path / name) for name in ("run", "four"))
    config, kept = made.config.model, sorted({*range(6)} - {*left_out_layers(order)})
    assert (config.num_steps, config.left_out, config.training_depths, made.step) == (4, "", "", opened.step)
    assert made.about.materialized_from["model"]["num_steps"] == 6
    tokens = jnp.asarray([opened.tokenizer.encode("several windows of some text")[:16]])
    whole, fitted, dropped = (
        forward(each, tokens) for each in (opened.model, made.model, of_layers(opened.model, kept))
    )
    assert np.linalg.norm(fitted - whole) < 0.8 * np.linalg.norm(dropped - whole)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"order": "6", "to": "new"}, "--order: must be some of the layers 0 to 5, such as 16,17,14, but it is '6'"),
        ({"order": "0,1,2,3,4,5", "to": "new"}, "--order: must be some of the layers 0 to 5"),
        ({"order": "1,1", "to": "new"}, "--order: must be some of the layers 0 to 5"),
        ({"order": "1"}, "--order: must go with --to"),
        ({"order": "1", "to": "new", "fewest": 3}, "--order: must go with --to and without --fewest"),
        ({"order": "1,0", "to": "new"}, "--order: must keep a layer before one of those it leaves out"),
        ({"to": "new", "solver": "strang"}, "--to: needs a model with the solver euler or lie_trotter, but it has st"),
        ({"to": "new", "files": None}, "--to: must go with --split=train or --files"),
        ({"fewest": 6}, "--fewest: must be below the 6 layers, but it is 6"),
        ({"to": "new", "lora_rank": 2}, "--workdir: must hold a model with weights per layer .*materialize merges"),
    ],
)
def test_what_cannot_be_done_is_said_first(given, error):
    options = {"order": "", "to": None, "fewest": None, "files": "text.txt", "split": "validation"}
    config = toy_config("llama", "llama", **{f"model__{key}": given.pop(key) for key in [*given] if key not in options})
    opened = object.__new__(checkpoint.Checkpoint)
    for name, value in {"model": new_model(config), "config": config}.items():
        object.__setattr__(opened, name, value)
    options = types.SimpleNamespace(**options | given)
    with pytest.raises(UserError, match=f"^{error}"):
        check_options(options, opened)
