"""Fine-tuning: a run that starts from another run's model, at any depth."""

import dataclasses
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from flax.traverse_util import flatten_dict

from diffeqformer import prepare
from diffeqformer.checkpoints import checkpoint
from diffeqformer.config import base_config, check_config, given_fields
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import Stopped, UserError
from diffeqformer.parallel import memory as device_memory
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.solvers import SOLVERS
from diffeqformer.training import finetune, hooks, loop, run
from diffeqformer.training.step import Program
from diffeqformer.transformer import MODELS, Transformer, select, split_model
from helpers import ONE_DEVICE, change, lively_model, load_config, save_params, toy_config
from runs import curves

TOKENS = jnp.asarray(np.random.RandomState(0).randint(257, size=(2, 16)))


def save_base(workdir, config, step=3) -> Transformer:
    """A finished run: a model of this config with large random weights.

    They are half as large in depth as a lively model's, which amplifies one rounding of each weight to 5e-5 of logits.
    """
    graph, params = split_model(lively_model(**config.model))
    model = nnx.merge(graph, {**params, "depth": jax.tree.map(lambda leaf: leaf / 2, params["depth"])})
    save_params(workdir, config, {step: split_model(model)[1]}, data_sha256="")
    return model


def new_config(base, kind="diffeqformer", **changes):
    """A short run that starts from `base`, whose shape differs from its own."""
    config = base_config("new", kind)
    config.update(base=str(base), steps=4, batch_size=8, sequence_length=16, log_every=1, eval_every=4)
    config.model.update(dtype="float32", dropout=0.1)
    config.data.update(task="python_stdlib", tokenizer="bytes")
    config.sample.prompt = "def "
    return change(config, **changes)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, runs",
    [
        ("diffeqformer", "gpt", [(6, 0, None), (4, 2, None), (9, 0, (4, 2, 1))]),
        ("diffeqformer", "llama", [(9, 2, (4, 2, 1))]),
        ("gpt", "gpt", [(6, 2, None)]),
        ("shared", "gpt", [(9, 0, None)]),
    ],
)
def test_a_run_begins_as_its_base_at_any_number_of_steps(kind, field, runs, tmp_path):
    """Up to rounding, including norms; with the base's shape and solver; with adapters, and on a mesh."""
    solver = {"gpt": "strang", "llama": "rk4"}[field] if kind == "diffeqformer" else MODELS[kind].solver
    base = save_base(tmp_path / "base", toy_config(kind, field, model__vocab_multiple=16, model__solver=solver))
    if solver == "rk4":  # which takes weights at several times of each step
        base = base.replace(solver=SOLVERS["euler"])
    for num_steps, rank, shape in runs:
        mesh = make_mesh(shape) if shape else ONE_DEVICE
        config = new_config(tmp_path / "base", model__num_steps=num_steps, model__lora_rank=rank)
        config.model.kind = "discretized" if kind == "diffeqformer" and not rank else "diffeqformer"
        config = finetune.inherit(config, tmp_path / "new")
        check_config(config, mesh.size)
        program = Program(config, mesh)
        state = program.init(finetune.initial_params(config, 3, mesh))
        ours = nnx.merge(program.graph, state["params"])
        expected = base(TOKENS, base.weights(base.grid(num_steps)))
        logits = ours(TOKENS, ours.weights())
        shown = (logits[..., :257], expected[..., :257])  # logits of padding rows are -inf
        np.testing.assert_allclose(*shown, atol=5e-6 * float(jnp.abs(shown[1]).max()))


def test_a_run_may_begin_with_an_earlier_checkpoint_of_its_base(tmp_path):
    """And has to if the newest one is damaged."""
    config = toy_config()
    params, about = split_model(lively_model(**config.model))[1], checkpoint.About(config.to_dict(), "bytes", "")
    with checkpoint.open_to_write(tmp_path, kept=9) as checkpoints:
        for step in (3, 5):
            grown = jax.tree.map(lambda leaf, step=step: step * leaf, params)
            checkpoint.save(checkpoints, step, {"params": grown}, about, {"loss": float(step)})
    (tmp_path / "checkpoints" / "5" / "about" / "data.json").write_text("{}")
    with pytest.raises(UserError, match=r"^config.base: .*/5[^;]*; restore .* \(config.base=FOLDER@STEP\)"):
        finetune.inherit(new_config(tmp_path), tmp_path / "new")
    for asked in ("3", "best"):
        config = finetune.inherit(new_config(f"{tmp_path}@{asked}"), tmp_path / "new")
        started = mock.Mock(run.Run)
        started.config, started.program = config, Program(config, ONE_DEVICE)
        started.about = dataclasses.replace(about, base=finetune.base_of(config, about))
        state = run.first_state(started)
        np.testing.assert_array_equal(state["params"]["token_embedding"], 3 * params["token_embedding"])


def test_a_folder_whose_name_ends_like_a_step_is_one(tmp_path):
    (tmp_path / "a@7").mkdir()
    assert finetune.chosen_base(f"{tmp_path}/a@7") == (f"{tmp_path}/a@7", None)
    assert finetune.chosen_base(f"{tmp_path}/a@7@best") == (f"{tmp_path}/a@7", "best")
    assert finetune.chosen_base("runs/a@7") == ("runs/a", 7)
    for base in ("", "@7", "me@home/a", "a@last"):
        assert finetune.chosen_base(base) == (base, None)


def test_a_store_is_prepared_for_a_base_that_is_elsewhere(short_stores, capsys):
    prepare.run(new_config("runs/absent", model__lora_rank=2, data__dir=str(short_stores)))
    assert "is there already, whole" in capsys.readouterr().out


ELASTIC = {"model__training_depths": "2,4", "model__training_times": "shifted"}


@pytest.mark.parametrize(
    "kind, changes, shape",
    [
        ("diffeqformer", {**ELASTIC, "model__vocab_multiple": 16}, (4, 2, 1)),
        ("alternative", {"model__field": "llama"}, None),
        ("looped", {"model__solver": "strang"}, None),
    ],
)
def test_a_model_with_a_hypernetwork_goes_on_as_itself(kind, changes, shape, tmp_path):
    """Bit for bit, with a new optimizer; the config may name the kind. Other depths and times are its own wish."""
    base = save_base(tmp_path / "base", toy_config(kind, **changes))
    elsewhere = {"model__training_times": "shifted", "model__training_depths": "3,6"}
    for name, own in ((kind, {}), ("diffeqformer", elsewhere)):
        config = finetune.inherit(new_config(tmp_path / "base", name, **own), tmp_path / "new", frozenset())
        check_config(config, 8)
        expected = {"kind": kind, "num_steps": 6, **{field[7:]: value for field, value in {**changes, **own}.items()}}
        assert {field: config.model[field] for field in expected} == expected
        program = Program(config, make_mesh(shape) if shape else ONE_DEVICE)
        state = program.init(finetune.initial_params(config, 3, program.mesh))
        jax.tree.map(np.testing.assert_array_equal, state["params"], split_model(base)[1])
        assert not any(leaf.any() for leaf in jax.tree.leaves(state["optimizer"]))


def test_another_depth_has_two_ways(tmp_path):
    """That a command line gives, even the default, or a notebook sets; not a file, if the line names the base."""
    save_base(tmp_path / "base", toy_config(model__training_depths="2,4"))
    sentence = "^config.model.num_steps: must be the base's, 6, but it is {}; for layers at other times name .* "
    sentence += "--config=tiny:discretized, and to train .* add --config.model.training_depths={}$"
    cases = (5, None, "2,4,5"), (5, {"seed"}, "2,4,5"), (12, {"base", "model.num_steps"}, "2,4,12")
    for steps, given, depths in cases:
        config = new_config(tmp_path / "base", model__num_steps=steps)
        with pytest.raises(UserError, match=sentence.format(steps, depths)):
            finetune.inherit(config, tmp_path / "new", given)
    for depths, given in (("5", set()), ("", {"model.training_depths"})):
        config = new_config(tmp_path / "base", model__num_steps=5, model__training_depths=depths)
        config = finetune.inherit(config, tmp_path / "new", {"base", "model.num_steps", *given})
        assert (config.model.num_steps, config.model.training_depths) == (5, depths)
    config = finetune.inherit(new_config(tmp_path / "base", model__num_steps=5), tmp_path / "new", {"base"})
    assert (config.model.num_steps, config.model.training_depths) == (6, "2,4")


def test_the_file_that_trained_a_base_can_fine_tune_its_layers(tmp_path):
    """With a solver and times that only generated weights have."""
    model = {"model__solver": "rk4", "model__training_depths": "2,4", "model__lora_rank": 2}
    save_base(tmp_path / "base", toy_config(**{**model, "model__lora_rank": 0}, model__training_times="shifted"))
    config = finetune.inherit(new_config(tmp_path / "base", **model, model__training_times="shifted"), tmp_path / "new")
    check_config(config, 1)
    assert (config.model.kind, config.model.solver) == ("discretized", "euler")


@pytest.mark.long
@pytest.mark.parametrize("kind, rank", [("diffeqformer", 0), ("discretized", 2)])
def test_a_fine_tuning_run_resumes_without_its_base(kind, rank, tmp_path, short_stores, monkeypatch, one_device_loop):
    """Bit for bit as if it had not been interrupted, also in another folder.

    With adapters, checkpoints hold only these and the embeddings.
    """
    base = tmp_path / "base"
    save_base(base, toy_config(model__vocab_multiple=16))
    monkeypatch.setattr(hooks, "validate", lambda *_: {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0})
    monkeypatch.chdir(tmp_path)
    steps = 6 if kind == "diffeqformer" else 3
    config = new_config("./base/", kind, model__num_steps=steps, model__lora_rank=rank, data__dir=str(short_stores))
    whole = split_model(loop.train(config, tmp_path / "whole"))[1]
    assert set(curves(tmp_path / "whole")["validation/loss"]) == {0, 4}  # what the base can do comes first

    seen = []
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved at step 2"):
        patch.setattr(loop.hosts.Notice, "now", lambda notice, wait: seen.append(notice) or len(seen) == 2)
        loop.train(config, tmp_path / "parts")
    shutil.rmtree(base)
    monkeypatch.chdir(tmp_path / "whole")
    config.base = ("../base", str(base))[bool(rank)]  # the same folder
    parts = split_model(loop.train(config, tmp_path / "parts"))[1]
    jax.tree.map(np.testing.assert_array_equal, parts, whole)

    opened = checkpoint.load(tmp_path / "parts", make_mesh((4, 2, 1)))
    assert opened.config.model.kind == kind and opened.config.model.width == 32
    jax.tree.map(np.testing.assert_array_equal, split_model(opened.model)[1], whole)
    saved = checkpoint.saved_arrays(*checkpoint.open_to_read(tmp_path / "parts")[:2])
    trained = flatten_dict(select(whole, opened.model.trains))
    assert set(saved) == set(trained) and (len(trained) < len(flatten_dict(whole))) == bool(rank)
    if rank:
        again = new_config(tmp_path / "parts", model__num_steps=3, model__lora_rank=1)
        again = finetune.inherit(again, tmp_path / "again")
        program = Program(again, ONE_DEVICE)
        merged = nnx.merge(program.graph, program.init(finetune.initial_params(again, 4, ONE_DEVICE))["params"])
        expected = opened.model(TOKENS, opened.model.weights())
        np.testing.assert_allclose(merged(TOKENS, merged.weights()), expected, atol=1e-5)

        others = opened.about.base | {"step": 5}
        checkpoint.save_frozen(epath.Path(tmp_path / "parts"), {"other": jnp.zeros(1)}, others)
        with pytest.raises(UserError, match="frozen: these frozen weights belong to another run"):
            checkpoint.load(tmp_path / "parts")
        shutil.rmtree(tmp_path / "parts" / "frozen")
        with pytest.raises(UserError, match="parts/frozen: frozen weights of this run are missing"):
            checkpoint.load(tmp_path / "parts")


REFUSED = (
    ("none", {}, "base: must be the folder of a trained run, but .*none has no checkpoint"),
    ("ours@2", {}, "base, after its @: must be best or the step of a checkpoint in .*ours, 3, but it is 2"),
    ("ours@best", {}, "base, after its @: no checkpoint in .*ours was saved with a validation; give 3"),
    ("ours", {"model__width": 64}, "model.width: must be the base's, 32, but it is 64; leave it out"),
    ("ours", {"model__kind": "gpt"}, "base: must be the folder of a model of the kind gpt, but .* diffeqformer"),
    ("gpt", {"model__kind": "discretized"}, "base: must be the folder of .* weights that are functions of time"),
    ("ours", {"data__tokenizer": "gpt2"}, "data.tokenizer: must be the tokenizer of config.base, bytes, but .* gpt2"),
    ("ours", {"model__num_steps": 0}, "model.num_steps: must be at least 1 and at most 65,536, but it is 0"),
    ("ours", {"model__lora_rank": 33}, "model.lora_rank: must not exceed .*, 32 in qkv, but it is 33"),
    ("thin", {"model__num_steps": 4}, "model.num_steps: must be 6, .*; materialize --num_steps=4 first, and take that"),
    ("gpt", {"model__num_steps": 9}, "model.num_steps: must be 6, because .* weights for 6 steps, but it is 9$"),
)


def test_what_does_not_fit_the_base_is_refused(tmp_path):
    save_base(tmp_path / "ours", toy_config())
    save_base(tmp_path / "gpt", toy_config("gpt"))
    save_base(tmp_path / "thin", toy_config("gpt", model__left_out="1,2"))
    for base, changes, sentence in REFUSED:
        with pytest.raises(UserError, match=f"^config.{sentence}"):
            loop.train(new_config(tmp_path / base, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    file = new_config(tmp_path / "ours", model__width=64, model__dropout=0.25)  # a file that is for other models, too
    inherited = finetune.inherit(file, tmp_path / "new", {"base"}).model
    assert (inherited.width, inherited.dropout) == (32, 0.25)
    recipe = load_config("tiny", "recipe")
    recipe.base = str(tmp_path / "gpt")
    taken = finetune.inherit(recipe, tmp_path / "new", given_fields(["--config=tiny", "--config.base=x"]))
    assert (taken.model.kind, taken.model.solver, taken.optimizer.name) == ("gpt", "lie_trotter", "muon")
    with pytest.raises(UserError, match="^config.base: must be the folder of a model of the kind interpolated"):
        finetune.inherit(recipe, tmp_path / "new", given_fields(["--config", "tiny:recipe", "--config.base=x"]))
    with pytest.raises(UserError, match="^config.data.tokenizer: must be the tokenizer .*, bytes, .* gives other ids"):
        finetune.base_of(new_config(tmp_path / "ours"), checkpoint.About({}, "bytes", "more"))


@pytest.mark.parametrize("name", ["finetune_openwebtext_to_wikitext103", "finetune_wikitext103_to_openwebtext"])
def test_the_configs_are_the_published_recipe(name):
    """As in the authors' scripts: everything decays, and adapters start with both factors at 1e-6."""
    first, second = name.removeprefix("finetune_").split("_to_")
    for model, kind, steps in (("", "diffeqformer", 18), ("-gpt", "gpt", 24)):
        pretraining = load_config(name, f"pretrain{model}")
        check_config(pretraining, 8)
        assert (pretraining.model.kind, pretraining.model.num_steps, pretraining.data.task) == (kind, steps, first)
        for mode, rank in (("full", 0), ("lora", 200)):
            config = load_config(name, f"{mode}{model}")
            assert config.base == f"runs/{pretraining.name}" and config.data.task == second
            assert (config.model.num_steps, config.model.lora_rank) == (steps, rank)
            assert config.optimizer.decay == pretraining.optimizer.decay == "everything"
            assert config.eval_every == config.checkpoint_every == pretraining.eval_every == 200  # any may be the best
            assert not rank or (config.model.lora_start, config.model.lora_alpha) == ("published", 8.0)
    with pytest.raises(UserError, match="^--config: must end with :pretrain, :full or :lora, .* but it is :half"):
        load_config(name, "half")


def test_a_base_too_large_is_said_before_anything_is_compiled(tmp_path, short_stores, one_device_loop, monkeypatch):
    """And one that fits when it is divided is taken."""
    base = save_base(tmp_path / "base", toy_config())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(split_model(base)[1]))
    monkeypatch.setattr(device_memory, "free_on_host", lambda: size // 4)
    finetune.check_base_fits(new_config(tmp_path / "base"), 3, make_mesh())
    monkeypatch.setattr(run, "check_memory", None)
    with pytest.raises(UserError, match="^config.base: the parameters of .*base would take .*; materialize it"):
        loop.train(new_config(tmp_path / "base", data__dir=str(short_stores)), tmp_path / "new")


@pytest.mark.long
def test_the_newest_checkpoint_of_the_base_when_the_text_is_ready_is_taken(tmp_path, short_stores, monkeypatch):
    """From then on it must stay."""
    save_base(tmp_path / "base", toy_config(), step=5)
    opened = run.open_prepared

    def prepare_long(*arguments):
        shutil.rmtree(tmp_path / "base")
        save_base(tmp_path / "base", toy_config(), step=8)
        return opened(*arguments)

    monkeypatch.setattr(run, "open_prepared", prepare_long)
    config = finetune.inherit(new_config(tmp_path / "base", data__dir=str(short_stores)), tmp_path / "new")
    _, about = run.agree(config, epath.Path(tmp_path / "new"), ByteTokenizer())
    assert about.base["step"] == 8
    with pytest.raises(UserError, match="^config.base: .*base is still being trained, and .* at step 5 has been repl"):
        finetune.initial_params(config, 5, ONE_DEVICE)
