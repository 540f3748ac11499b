"""Configs: every file is valid, and every mistake stops the run with one sentence that names the field."""

import contextlib
import math
import pathlib
import re

import jax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from diffeqformer.config import (
    check_config,
    check_overrides,
    check_tokenizer,
    check_used,
    fields_of,
    get_field,
    saved_config,
)
from diffeqformer.config_fields import CHANGEABLE, CONFIG_FIELDS
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Linear
from diffeqformer.parallel.mesh import check_tiles, make_mesh
from diffeqformer.training.resuming import check_resumable
from diffeqformer.training.step import Program
from diffeqformer.transformer import MODELS, split_model, vector_field
from helpers import CONFIGS, lively_model, load_config, save_params, toy_config
from runs import command

TENSOR = {"mesh__tensor": 4, "model__vocab_multiple": 16}
PAIRS = [(name, model) for name in CONFIGS for model in MODELS]
TYPICAL = [pair for pair in PAIRS if pair[0] == "tiny" or pair[1] == "diffeqformer"]


@pytest.mark.parametrize("name, model", [*PAIRS, *((name, "recipe") for name in CONFIGS), ("tiny", "elastic")])
def test_every_config_is_sound(name, model):
    config = load_config(name, model)
    config.data.tokenizer_file = "a_model" if config.data.tokenizer == "sentencepiece" else ""
    check_config(config, num_devices=8)
    check_config(config, num_devices=None)  # of a machine that only prepares the text


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_has_the_layers_of_a_llama_as_knots(name):
    recipe, llama = load_config(name, "recipe"), load_config(name, "llama")
    steps = llama.model.num_steps
    assert (recipe.model.num_steps, recipe.model.time_embed_dim, recipe.model.span) == (steps, steps, steps)
    assert (recipe.model.kind, recipe.optimizer.name) == ("interpolated", "muon")
    ours, theirs = (vector_field(config.model).layers() for config in (recipe, llama))
    assert {name: layer for name, layer in ours.items() if isinstance(layer, Linear)} == {
        name: layer for name, layer in theirs.items() if isinstance(layer, Linear)
    }


@pytest.mark.parametrize("name, model", TYPICAL)
def test_a_train_step_keeps_the_shapes_of_the_state(name, model):
    config = load_config(name, model)
    program = Program(config, make_mesh())
    state = jax.eval_shape(program.init)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
    after, scalars = jax.eval_shape(program.train_step, state, tokens)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert scalars["loss"].shape == ()


WRONG = {int: [-5], float: [math.nan], str: ["", "?", "a://b"], bool: []}
ANY_VALUE = {"base", "data.module", "data.separator", "sample.prompt"}


def test_a_wrong_value_is_refused_by_name():
    """That is wrong whatever other fields are."""
    for field in CONFIG_FIELDS:
        said = []
        for value in WRONG[type(field.default)]:
            try:
                check_config(toy_config(**{field.name.replace(".", "__"): value}), num_devices=8)
            except UserError as error:
                said.append(str(error))
        assert bool(said) == (type(field.default) is not bool and field.name not in ANY_VALUE), field.name
        for sentence in said:
            assert re.fullmatch(r"config\.[\w.]+: must [^{\n]+", sentence), sentence


# fmt: off
@pytest.mark.parametrize(
    "kind, changes, sentence",
    [
        ("diffeqformer", {"microbatches": 3}, r"batch_size: must be a multiple of the 8 devices .* such as 24, but"),
        ("gpt", {"mesh__fsdp": 3}, "mesh: data x fsdp x tensor must make up the 8 devices .* but it is -1 x 3 x 1"),
        ("gpt", {"mesh__fsdp": -1}, r"mesh: only one axis can be -1, the rest, but they are \[-1, -1, 1\]"),
        ("gpt", {"mesh__tensor": 8}, r"mesh.tensor: must divide config.model.heads \(4\), as 1, 2, 4 do, but it is 8"),
        ("gpt", {"mesh__fsdp": 2}, r"mesh.fsdp: must cut the rows of the embedding, .* \(257\) .*, as 1 would"),
        ("gpt", {**TENSOR, "sequence_length": 14}, r"mesh.tensor: must divide config.sequence_length \(14\), as 1, 2"),
        ("gpt", {"model__training_times": "shifted"}, "model.training_times: must be fixed for model.kind gpt"),
        ("gpt", {"model__training_depths": "2,4"}, "model.training_depths: must be empty for model.kind gpt, "),
        ("gpt", {"model__span": 2.0}, "model.span: must be 0 for model.kind gpt, all of whose steps have the length 1"),
        ("gpt", {"model__solver": "heun"}, "model.solver: must take weights once in each step, as model.kind gpt has"),
        ("diffeqformer", {"model__remat": "reversible"}, "model.remat: must not be reversible for model.solver euler;"),
        ("diffeqformer", {"model__generate_chunk": 4, "model__training_times": "shifted"},
            "model.generate_chunk: must be 0, 1, or no less than a divisor above 1 of model.num_steps "),
        ("looped", {"microbatches": 0, "model__generate_chunk": 2}, "microbatches: must be at least 1 with model.gen"),
        ("gpt", {"model__heads": 5}, "model.heads: must divide model.width "),
        ("llama", {"model__key_value_heads": 3}, "model.key_value_heads: must divide model.heads "),
        ("llama", {"model__field": "gpt"}, "model.field: must be the same as model.kind, llama, but it is 'gpt'"),
        ("gpt", {"data__task": "no_such_task"}, "data.task: must be one of python_stdlib, "),
        ("gpt", {"steps": 10**23}, r"steps: must be between -2\*\*31 and"),
    ],
)
# fmt: on
def test_an_impossible_combination_is_refused(kind, changes, sentence):
    with pytest.raises(UserError, match=rf"^config\.{sentence}"):
        check_config(toy_config(kind, **changes), num_devices=8)


def test_on_tpus_rows_are_cut_into_whole_tiles_by_the_axes_that_cut_them():
    def check(width=64, heads=4, **axes):
        field = vector_field(toy_config(model__width=width, model__heads=heads, model__mlp=128).model)
        check_tiles(field, 8, **axes, vocabulary=512, positions=100, tiled=True)

    check(fsdp=1, tensor=4)  # which doesn't cut positions
    for wrong, sentence in (
        ({"fsdp": 2, "tensor": 2}, r"fsdp: must cut config.model.max_length \(100\)"),
        ({"fsdp": 1, "tensor": 8}, "tensor: must cut the heads' width of a device .* as 1, 2, 4 would"),
        ({"width": 24, "heads": 2, "fsdp": 2, "tensor": 2}, "fsdp: must cut config.model.width"),
    ):
        with pytest.raises(UserError, match=f"^config.mesh.{sentence}"):
            check(**wrong)


def test_a_saved_config_of_an_earlier_version_keeps_its_meaning():
    """Where it is older than the runs of test_old_runs, or has other values."""
    fields = flatten_dict(toy_config().to_dict(), sep=".")
    for name in ("microbatches", "mesh.data", "mesh.fsdp", "mesh.tensor", "model.vocab_multiple", "data.tokenizer"):
        del fields[name]
    fields |= {"model.remat": False, "model.step_features": False}  # their first types
    assert saved_config(unflatten_dict(fields, sep=".")).to_dict() == toy_config().to_dict()
    begun = fields | {"base": "runs/a", "base_step": "best"}  # before a base had an end for it
    assert saved_config(unflatten_dict(begun, sep=".")).base == "runs/a@best"
    with pytest.raises(ValueError, match=r"^config\.model\.step_features is 8, but"):
        saved_config(unflatten_dict({**fields, "model.step_features": 8}, sep="."))
    for kind, unit in (("gpt", True), ("shared", True), ("shared", False)):  # what `span` says now
        config = toy_config(kind, model__span=0.0 if unit else 1.0)
        saved = flatten_dict(config.to_dict(), sep=".") | {"model.span": 1.0, "model.unit_steps": unit}
        assert saved_config(unflatten_dict(saved, sep=".")).to_dict() == config.to_dict()
    fields["model.training_times"] = "jittered"
    with pytest.raises(ValueError, match="^config.model.training_times: must be one of"):
        saved_config(unflatten_dict(fields, sep="."))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model__vocab_size": 256}, "model.vocab_size: must not be below the 257 ids of the tokenizer bytes"),
        ({"sample__prompt": ""}, "sample.prompt: must have at least one token .*, but it is ''"),
        ({"sample__prompt": "x" * 16}, "sample.prompt: .* fewer than a sample's 16, but"),
    ],
)
def test_what_the_tokenizer_refuses(changes, sentence):
    check_tokenizer(toy_config(), ByteTokenizer())
    with pytest.raises(UserError, match=rf"^config\.{sentence}"):
        check_tokenizer(toy_config(**changes), ByteTokenizer())


def test_what_may_change_between_runs():
    saved = toy_config()
    for name in fields_of(saved):
        value = get_field(saved, name)
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else value + "x"
        config = toy_config(**{name.replace(".", "__"): other})
        with contextlib.nullcontext() if name in CHANGEABLE else pytest.raises(UserError, match=name):
            check_resumable(config, saved, pathlib.Path("runs/toy"))


@pytest.mark.parametrize(
    "model, argument, why",
    [
        ("gpt", "--config.model.generator_start=constant", "model.kind gpt generates no kernels"),
        ("shared", "--config.model.time_embed_dim=8", "model.kind shared has no hypernetwork"),
        ("diffeqformer", "--config.model.lora_alpha=4", "lora_rank is 0"),
        ("diffeqformer", "--noconfig.model.norm_of_norm", "model.kind diffeqformer with the block of model.field gpt "),
        ("gpt", "--config.model.rope_theta=5e5", "the block of model.field gpt doesn't read it"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(model, argument, why):
    field = argument.lstrip("-").partition("=")[0].removeprefix("no")
    with pytest.raises(UserError, match=f"^{field}: must be left out, because {why}"):
        check_used(["main.py", argument], toy_config(model))
    check_used(["main.py", argument], toy_config("diffeqformer", "llama", model__lora_rank=1))


def test_a_wrong_value_is_left_to_the_check_of_all_fields():
    check_used(["main.py", "--config.model.generator_start=constant"], toy_config("gpt", model__kind="bert"))
    check_used(["main.py", "--config.model.rotary_fraction=0.5"], toy_config("neox"))
    for wrong in ({"model__heads": 0}, {"model__biases": "some"}, {"model__field": "mamba"}):
        check_used(["main.py", "--noconfig.model.norm_of_norm"], toy_config("diffeqformer", "llama", **wrong))


@pytest.mark.parametrize("changes", [{"model__generate_chunk": 2, "model__remat": "step"}, {"kernels": "pallas"}])
def test_chunks_or_pallas_kernels_may_be_chosen(changes):
    check_config(toy_config(**changes), num_devices=1)


def test_right_overrides_pass():
    options = "--config=a.py:gpt --config.steps=3 --config.model.norm_of_norm=false --config.data.dir=a=b"
    apart = "--config.steps 4 --config.model.norm_of_norm --config config.py"  # a file
    check_overrides(["main.py", *options.split(), *apart.split()])


PATTERN = "--config.data.train_files=absent*", "--config.data.validation_files=absent*"
UP = ["--config=tiny", "--config.data.task=../up", "--config.data.module=mine"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--config=large:recipee"], "or recipe after a config's name, but it is 'recipee'; did you mean recipe?\n"),
        (["--config=tin:gpt"], "--config: there is no config tin; did you mean tiny?\n"),
        (["--config.steps=3", "--config=tiny"], "config.steps: must come after --config, for example --config=tiny --"),
        (["--config=tiny", "--config.steps=many"], "--config.steps: must be a whole number, but it is 'many'"),
        (["--config=tiny", "--config.model.lora_alpha=4"], "config.model.lora_alpha: must be left out, because lora_"),
        (["--config=tiny", "--config.model.widht=3"], "config.model.widht: there is no such field; did you mean"),
        (["--config=tiny", "--config.model.kind=gpt"], "config.model.kind: choose the model "),
        (["--config=tiny", "--verbos"], "verbos"),
        (UP, "config.data.task: must be a name of letters, digits, dots"),
        (["--config=configs/tiny.py", *PATTERN], "config.data.train_files: no file matches 'absent*'"),
        ([], "--config: a config is needed"),
    ],
)
def test_the_command_stops_with_one_sentence(arguments, sentence, tmp_path):
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = command("main", f"--workdir={tmp_path / 'run'}", *arguments, environment=devices)
    assert done.returncode == 1 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_default_that_the_command_line_gives_must_be_the_bases(tmp_path):
    config = toy_config(model__solver="lie_trotter", model__max_length=256)
    save_params(tmp_path / "base", config, {3: split_model(lively_model(**config.model))[1]}, data_sha256="")
    options = ["--config=finetune_openwebtext_to_wikitext103:full", f"--config.base={tmp_path / 'base'}"]
    options += ["--config.data.tokenizer=bytes", f"--workdir={tmp_path / 'new'}", "--config.model.solver=euler"]
    done = command("main", *options)
    assert "config.model.solver: must be the base's, 'lie_trotter', but it is 'euler'" in done.stderr, done.stderr
    assert not (tmp_path / "new").exists()


def test_layers_and_adapters_of_a_base_have_no_hypernetwork_to_compute_with():
    """What a base has may be said again."""
    check_used(["main.py", "--config.model.time_embed_dim", "12"], toy_config("discretized", base="b"))
    check_used(["main.py", "--config.kernels=xla"], toy_config(base="b"))
    for config in (toy_config("discretized", base="b"), toy_config(base="b", model__lora_rank=2)):
        with pytest.raises(UserError, match="^config.kernels: must be left out, because layers and adapters"):
            check_used(["main.py", "--config.kernels=xla"], config)
