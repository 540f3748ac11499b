"""Every error ends a command with one sentence and a status, whatever the user's files, arguments and outputs are."""

import os
import signal
import subprocess
import sys

import pytest

from diffeqformer.config import base_config, check_fields
from diffeqformer.errors import UserError
from helpers import ROOT, toy_config
from runs import command

FAILS = "from diffeqformer.console import command_line; command_line.run(lambda: {}['missing'])"
CONFIGS = {
    "raises": ("raise KeyError('x')", "the file can't be loaded, KeyError: 'x'"),
    "is no Python": ("def (", "the file can't be loaded, SyntaxError: invalid syntax"),
    "ends the process": ("import sys\ndef get_config(model='gpt'):\n    sys.exit(0)", "the file ended the process"),
    "returns nothing": ("def get_config(model='gpt'):\n    pass", "the file's get_config must return a config"),
    "takes two arguments": ("def get_config(a, b):\n    pass", "the file can't be loaded, TypeError: get_config()"),
    "has no get_config": ("x = 1", "the file can't be loaded, AttributeError: "),
    "changes a type": (
        "from diffeqformer.config import base_config\ndef get_config(model='gpt'):\n"
        "    config = base_config('mine', model)\n    config.steps = 3.5\n    return config",
        "the file can't be loaded, TypeError: Could not override field 'steps'",
    ),
    "adds a field": (
        "from diffeqformer.config import base_config\ndef get_config(model='gpt'):\n"
        "    config = base_config('mine', model)\n    config.colour = 'red'\n    return config",
        "the file can't be loaded, AttributeError: ",
    ),
    "returns a list": ("def get_config(model='gpt'):\n    return [3]", "the file can't be loaded, AttributeError: "),
}


def check_said(done: subprocess.CompletedProcess, sentence: str, status: int = 1) -> None:
    """The command said one sentence, which begins like this, and nothing else."""
    lines = done.stderr.splitlines()
    assert done.returncode == status and lines[-1].startswith(f"diffeqformer: {sentence}"), done.stderr
    assert len(lines) == 1, done.stderr


def test_an_error_that_nobody_foresaw_is_one_sentence_unless_one_wants_to_see_where():
    for wanted in (False, True):
        environment = {**os.environ, "DIFFEQFORMER_TRACEBACK": "1" if wanted else ""}
        done = subprocess.run([sys.executable, "-c", FAILS], env=environment, capture_output=True, text=True, cwd=ROOT)
        last = done.stderr.splitlines()[-1]
        assert last == "diffeqformer: KeyError: 'missing'; DIFFEQFORMER_TRACEBACK=1 shows where this happened"
        assert done.returncode == 1 and done.stderr.startswith("Traceback") == wanted == ("\n  File" in done.stderr)


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_file(what, tmp_path):
    content, sentence = CONFIGS[what]
    (tmp_path / "mine.py").write_text(content)
    check_said(command("main", f"--config={tmp_path / 'mine.py'}"), f"--config: {sentence}")


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("main", [b"--config=tiny", b"--config.sample.prompt=\xff"], "--config.sample.prompt=�: this argument must be"),
        ("main", [b"--config=tiny", b"--workdir=\xff\xfe"], "--workdir=��: this argument must be valid UTF-8"),
        ("analyze", [b"--text=a\xff", b"--workdir=x"], "--text=a�: this argument must be valid UTF-8"),
        ("main", ["--config=tiny", "--workdir=http://host/run"], "--workdir: must be a folder of this machine or on"),
        (
            "main",
            ["--config=tiny", "--config.mesh.data=2"],
            "config.mesh: data x fsdp x tensor must make up the 1 device ",
        ),
        ("main", ["--config=tiny", "--config.name="], "config.name: must be printable text of 1 to 200"),
        ("main", ["--config=tiny", f"--config.data.task={'a' * 300}"], "config.data.task: must be one of "),
        ("main", ["--config=tiny", "--config.model.num_steps=100000000"], "config.model.num_steps: must be at most 65"),
        ("main", ["--config=tiny", "--config.model.training_depths=2,99999"], "config.model.training_depths: must be "),
        ("generate", ["--prompt=a", "--num_steps=1000000000", "--workdir={run}"], "num_steps: must be at most 65,"),
        ("generate", ["--prompt=a", "--samples=1000000000", "--workdir={run}"], "flag --samples=1000000000: "),
        ("evaluate", ["--batch_size=1000000000", "--workdir={run}"], "flag --batch_size=1000000000: "),
        (
            "evaluate",
            ["--batch_size=-1", "--workdir={run}"],
            "flag --batch_size=-1: -1 is not an integer in the range [1,",
        ),
        ("ode", ["--batch_size=0", "--workdir={run}"], "flag --batch_size=0: 0 is not an integer in the range [1,"),
        ("downstream", ["--shots=", "--workdir={run}"], "--shots: must name at least one, but it is empty"),
        ("evaluate", ["--num_steps=1000000000", "--workdir={run}"], "num_steps: must be at most 65,536, but it is "),
        ("ode", ["--refinements=60", "--workdir={run}"], "--refinements: must be at most "),
        ("analyze", ["--times=1000000000", "--workdir={run}"], "--times: must be at most 65,536, but it is 1000000000"),
        ("generate", ["--prompt=a", "--step=77", "--workdir={run}"], "--step: must be best or the step of a"),
        ("evaluate", ["--step=77", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
        ("ode", ["--step=77", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
        ("ode", ["--output=gs://a/b", "--files=absent", "--workdir={run}"], "--output: must be a folder of this "),
        ("analyze", ["--step=77", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
        ("downstream", ["--step=77", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
        ("materialize", ["--step=77", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
        ("inspect", ["--step=9" + 30 * "9", "--workdir={run}"], "--step: must be best or the step of a checkpoint in "),
    ],
)
def test_an_argument(name, arguments, sentence, run):
    filled = [each if isinstance(each, bytes) else each.format(run=run, root=ROOT) for each in arguments]
    check_said(command(name, *filled), sentence)


def test_numbers_of_a_config_have_bounds():
    for name in ("steps", "eval_every", "checkpoints_kept", "batch_size"):
        for number in (int(23 * "9"), -(2**31)):
            with pytest.raises(UserError, match=rf"^config.{name}: must be between -2\*\*31 and 2\*\*31, .* {number}$"):
                check_fields(toy_config(**{name: number}))
    check_fields(toy_config(seed=2**32 - 1))
    check_fields(base_config("", "gpt"))


@pytest.mark.long
@pytest.mark.parametrize(
    "output, status, sentence",
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 1, "diffeqformer: the output can't be written: No space left on device"),
        ("| head -c 1 >/dev/null", 1, "diffeqformer: the output was closed before its end"),
        (">/dev/full 2>/dev/full", 1, ""),
    ],
)
def test_an_output(output, status, sentence, run, tmp_path):
    writes = "[print(9, flush=True) for _ in range(9999)]"
    many = FAILS.replace("{}['missing']", writes)
    line = (
        f'{sys.executable} -c "{many}"'
        if "|" in output
        else f"{sys.executable} -m diffeqformer.inspect --workdir={run}"
    )
    line = f"set -o pipefail; {line} {output}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == status and done.stderr.startswith(sentence) and done.stderr.count("\n") <= 1, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("start", [["-m", "diffeqformer.generate"], ["-m", "diffeqformer", "generate"]])
def test_ctrl_c_while_imports_run_ends_the_process_at_once_and_silently(start):
    running = subprocess.Popen(
        [sys.executable, "-X", "importtime", *start, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in running.stderr:
        if line.split("|")[-1].strip() == "numpy":
            break
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT and "Traceback" not in errors
