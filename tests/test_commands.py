"""What the commands say of themselves."""

import subprocess
import sys

import pytest

from diffeqformer.__main__ import COMMANDS, module_of, summary
from diffeqformer.config import base_config, field_names
from diffeqformer.config_fields import CONFIG_FIELDS
from diffeqformer.console.command_line import config_file, configs
from helpers import ROOT
from runs import command


def test_every_command_is_listed_in_one_line():
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "diffeqformer").glob("[a-z]*.py")}
    assert {name for name, source in sources.items() if '__name__ == "__main__"' in source} == set(
        map(module_of, COMMANDS)
    )
    done = subprocess.run([sys.executable, "-m", "diffeqformer"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines[: len(COMMANDS)]] == list(COMMANDS)
    assert summary("generate") == "Generate text from a trained model"
    wrong = subprocess.run([sys.executable, "-m", "diffeqformer", "evalute"], cwd=ROOT, capture_output=True, text=True)
    said = "diffeqformer: there is no command evalute; did you mean evaluate?\n"
    assert (wrong.returncode, wrong.stderr) == (1, said)


HELP = {
    "main": ["config", "[no]help_config", "workdir", "coordinator"],
    "generate": ["workdir", "step", "prompt", "coordinator"],
    "plan": ["config", "topology", "slices"],
}


@pytest.mark.parametrize("name", HELP)
def test_help_shows_the_options_of_the_command_and_no_others(name):
    done = command(name, "--help", "--no_such_option")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m diffeqformer.{name} " in done.stdout.partition("\n  --")[0]
    assert all(f"\n  --{option}: " in done.stdout for option in HELP[name])
    assert "--config:" in done.stdout or "config" not in HELP[name]
    assert "--alsologtostderr" not in done.stdout and "--jax" not in done.stdout


def test_every_field_of_a_config_is_explained():
    done = command("main", "--help_config")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(field.name for field in CONFIG_FIELDS) == sorted(field_names(base_config("", "diffeqformer")))
    assert all(field.help for field in CONFIG_FIELDS)
    assert "\n--config.optimizer.learning_rate=0.0006\n    peak rate, after the warm-up\n" in done.stdout
    assert "\n--config.data.train_files=''\n    Local files to use instead of a corpus: comma-" in done.stdout


def test_a_config_is_named_by_its_name_or_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(configs()) == {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert config_file("tiny:gpt") == f"{ROOT}/configs/tiny.py:gpt"
    (tmp_path / "tiny").touch()  # a file of that name comes first
    assert config_file("tiny:gpt") == "tiny:gpt"
