"""What a command line may set in a config, and what stops it."""

import pytest

from diffeqformer.config import check_overrides, check_used
from diffeqformer.errors import UserError
from diffeqformer.transformer import split_model
from helpers import lively_model, save_params, toy_config
from runs import command


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--config.model.widht=3", r"config\.model\.widht: there is no such field; did you mean model\.width\?"),
        ("--config.mesh.pipe=2", r"config\.mesh\.pipe: there is no such field$"),
        ("--config.model.kind=gpt", r"config\.model\.kind: choose the model .*--config=tiny:gpt"),
    ],
)
def test_a_wrong_override_is_refused_by_name(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        check_overrides(["main.py", "--config=configs/tiny.py", argument])


@pytest.mark.parametrize(
    "model, argument, why",
    [
        ("gpt", "--config.model.generator_start=constant", "model.kind gpt generates no kernels"),
        ("shared", "--config.model.time_embed_dim=8", "model.kind shared has no hypernetwork"),
        ("diffeqformer", "--config.model.lora_alpha=4", "lora_rank is 0"),
        ("diffeqformer", "--noconfig.model.norm_of_norm", "the block of model.field gpt doesn't read it"),
        ("neox", "--config.model.biases=qkv", "the block of model.field neox doesn't read it"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(model, argument, why):
    field = argument.lstrip("-").partition("=")[0].removeprefix("no")
    with pytest.raises(UserError, match=f"^{field}: must be left out, because {why}"):
        check_used(["main.py", argument], toy_config(model))
    check_used(["main.py", argument], toy_config("diffeqformer", "llama", model__lora_rank=1))


def test_a_wrong_value_is_left_to_the_check_of_all_fields():
    check_used(["main.py", "--config.model.generator_start=constant"], toy_config("gpt", model__kind="bert"))
    for wrong in ({"model__heads": 0}, {"model__biases": "some"}):
        check_used(["main.py", "--noconfig.model.norm_of_norm"], toy_config("diffeqformer", "llama", **wrong))


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
        (["--config=tiny", "--config.steps=many"], "flag --config.steps=many: invalid literal for int() "),
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
def test_training_knows_what_its_command_line_says(tmp_path):
    """Values that nothing reads, and defaults that a base doesn't have."""
    done = command("main", "--config=tiny", "--config.model.lora_alpha=4", f"--workdir={tmp_path / 'new'}")
    assert done.returncode == 1 and "config.model.lora_alpha: must be left out, because lora_rank is 0" in done.stderr
    config = toy_config(model__solver="lie_trotter", model__max_length=256)
    save_params(tmp_path / "base", config, {3: split_model(lively_model(**config.model))[1]}, data_sha256="")
    options = ["--config=finetune_openwebtext_to_wikitext103:full", f"--config.base={tmp_path / 'base'}"]
    options += ["--config.data.tokenizer=bytes", f"--workdir={tmp_path / 'new'}", "--config.model.solver=euler"]
    done = command("main", *options)
    assert "config.model.solver: must be the base's, 'lie_trotter', but it is 'euler'" in done.stderr, done.stderr
    assert not (tmp_path / "new").exists()
