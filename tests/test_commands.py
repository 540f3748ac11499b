"""What commands say of themselves, and the one sentence and the status with which every error ends them."""

import os
import signal
import subprocess
import sys

import pytest

from diffeqformer.__main__ import COMMANDS, module_of, summary
from diffeqformer.config import base_config, fields_of
from diffeqformer.config_fields import CONFIG_FIELDS
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


def test_help_shows_the_options_of_the_command_and_no_others():
    done = command("main", "--help", "--no_such_option")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m diffeqformer.main " in done.stdout.partition("\n  --")[0]
    assert all(f"\n  --{option}: " in done.stdout for option in ("config", "workdir", "coordinator"))
    assert "--alsologtostderr" not in done.stdout and "--jax" not in done.stdout


def test_every_field_of_a_config_is_explained():
    done = command("main", "--help_config")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(field.name for field in CONFIG_FIELDS) == sorted(fields_of(base_config("", "diffeqformer")))
    assert all(field.help for field in CONFIG_FIELDS)
    assert "\n--config.optimizer.learning_rate=0.0006\n    peak rate" in done.stdout


FAILS = "from diffeqformer.console import command_line; command_line.run(lambda: {}['missing'])"


def test_an_error_that_nobody_foresaw_is_one_sentence_unless_one_wants_to_see_where():
    for wanted in (False, True):
        environment = {**os.environ, "DIFFEQFORMER_TRACEBACK": "1" if wanted else ""}
        done = subprocess.run([sys.executable, "-c", FAILS], env=environment, capture_output=True, text=True, cwd=ROOT)
        last = done.stderr.splitlines()[-1]
        assert last == "diffeqformer: KeyError: 'missing'; DIFFEQFORMER_TRACEBACK=1 shows where this happened"
        assert done.returncode == 1 and done.stderr.startswith("Traceback") == wanted == ("\n  File" in done.stderr)


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("main", ["--config=tiny", "--workdir=http://host/run"], "--workdir: must be a folder of this machine or on"),
        ("main", ["--config=mine.py"], "--config: the file can't be loaded, KeyError: 'x'"),
        ("generate", ["--prompt=a", "--num_steps=1000000000"], "num_steps: must be at most 65,"),
        ("inspect", ["--step=last"], "--step: must be best or the step of a checkpoint in "),
    ],
)
def test_an_argument(name, arguments, sentence, run, tmp_path):
    (tmp_path / "mine.py").write_text("raise KeyError('x')")
    done = command(name, *arguments, *([] if name == "main" else [f"--workdir={run}"]), folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"diffeqformer: {sentence}") and len(line) < 400


@pytest.mark.long
@pytest.mark.parametrize(
    "output, status, sentence",
    [
        (">&-", 0, ""),
        (">/dev/full", 1, "diffeqformer: the output can't be written: No space left on device"),
        ("| head -c 1 >/dev/null", 1, "diffeqformer: the output was closed before its end"),
    ],
)
def test_an_output(output, status, sentence, run):
    line = f"{sys.executable} -m diffeqformer.inspect --workdir={run}"
    if "|" in output:
        many = FAILS.replace("{}['missing']", "[print(9, flush=True) for _ in range(9999)]")
        line = f'{sys.executable} -c "{many}"'
    line = f"set -o pipefail; {line} {output}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == status and done.stderr.startswith(sentence) and done.stderr.count("\n") <= 1, done.stderr


HEEDING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts a program that Ctrl-C ends, which jobs in the background ignore."""


@pytest.mark.parametrize("line", ["-m diffeqformer.main", "-m diffeqformer inspect", "diffeqformer inspect"])
def test_an_interrupt_of_imports_says_nothing(line, tmp_path):
    (tmp_path / "jax.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    (tmp_path / "diffeqformer").write_text("from diffeqformer.__main__ import main; main()")  # as pip writes it
    done = subprocess.run(
        [sys.executable, "-c", HEEDING, sys.executable, *line.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_other_programs_that_import_the_package_catch_an_interrupt(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import diffeqformer")
    (tmp_path / "mine" / "__main__.py").write_text("import signal; print(signal.getsignal(signal.SIGINT).__name__)")
    line = [sys.executable, "-c", HEEDING, sys.executable, "-m", "mine"]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "default_int_handler\n", done.stderr


def test_an_interrupt_within_a_callback_comes_again():
    code = """
import signal, sys, threading, time
from diffeqformer.console import command_line
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
class Deleted:
    def __del__(self):
        raise KeyboardInterrupt
start = threading.Thread.start
threading.Thread.start = lambda thread: (start(thread), time.sleep(0.1))  # as on a busy machine
sys.unraisablehook = command_line.report_unraisable
Deleted()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and "ignored" not in done.stderr, done.stderr
