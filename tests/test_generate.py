"""The command `generate`: prompts, streaming, stops and errors."""

import gzip
import io
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from diffeqformer import generate as generate_command
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.files import read_text
from diffeqformer.errors import UserError
from diffeqformer.inference.sampling import Choice, generate
from diffeqformer.transformer import random_key
from helpers import ROOT
from runs import command


@pytest.mark.long
def test_the_command_writes_what_the_library_does_from_any_source(run, tmp_path, monkeypatch, capsys):
    opened = checkpoint.load(run)
    texts = generate(
        opened.model, opened.tokenizer, "def é", tokens=20, samples=2, key=random_key(5, "sample"),
        choice=Choice(0.7, 50, 0.9), num_steps=3,
    )  # fmt: skip
    options = ["--workdir", run, "--tokens=20", "--temperature=0.7", "--top_k=50", "--top_p=0.9", "--seed=5"]
    options.append("--num_steps=3")
    (tmp_path / "prompt").write_text("def é", encoding="utf-8")
    both = command("generate", *options, "--samples=2", "--prompt=def é")
    assert both.stdout == "".join(f"--- sample {n + 1} of 2 ---\ndef é{texts[n]}\n" for n in range(2)), both.stderr
    same = dict(tokens=20, temperature=0.7, top_k=50, top_p=0.9, seed=5, num_steps=3)
    generate_command.write(options_of(run, prompt=None, prompt_file=str(tmp_path / "prompt"), **same))
    assert capsys.readouterr().out == f"def é{texts[0]}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("def é".encode())))
    generate_command.write(options_of(run, prompt=None, **same))
    assert capsys.readouterr().out.startswith("def é")
    assert both.stderr.startswith("\ntoy (diffeqformer, 3 steps, float32) at step 12: 40 tokens")


@pytest.mark.long
def test_reading_stops_without_a_word(run):
    generating = subprocess.Popen(
        [sys.executable, "-m", "diffeqformer.generate", "--workdir", run, "--prompt=a"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    generating.stdout.close()
    assert "Traceback" not in generating.stderr.read() and generating.wait() == 0


def options_of(run, **changes) -> types.SimpleNamespace:
    """The command's options for one prompt."""
    names = "step prompt_file prompts_file output batch_size tokens solver num_steps"
    options = dict.fromkeys(names.split(), None) | dict(prompt="a", stop=[], seed=0, sliding_window=False)
    options |= dict(workdir=run, samples=1, temperature=0.8, top_k=0, top_p=1.0)
    return types.SimpleNamespace(**options | changes)


def streamed(run, monkeypatch, tokens, **changes) -> list[str]:
    """What the command prints, piece by piece, if the model writes these tokens after `a`."""
    monkeypatch.setattr(generate_command, "write_tokens", lambda *_, **__: (np.array([token]) for token in tokens))
    shown = []
    monkeypatch.setattr("builtins.print", lambda *text, end="\n", file=None, **_: file or shown.append(text[0] + end))
    generate_command.write(options_of(run, **changes))
    return shown


def test_a_text_ends_before_the_first_stop_of_which_nothing_is_shown(run, monkeypatch):
    """Though stops take several tokens, overlap, or begin in vain; what looked like one comes at the end."""
    shown = streamed(run, monkeypatch, b"x.a..b\n\nno", stop=["\n\n", "..c", "€"])
    assert shown == ["a", "x", "", ".a", "", "", "..b", "", "", "\n"]
    assert streamed(run, monkeypatch, b"x..", stop=["..c"]) == ["a", "x", "", "", "..\n"]
    assert streamed(run, monkeypatch, "x€ no".encode(), stop=["a", "€"]) == ["a", "x", "", "", "", "\n"]
    assert streamed(run, monkeypatch, b"abc", stop=["c", "bc"]) == ["a", "a", "", "", "\n"]


@pytest.mark.long
def test_texts_end_at_stops_whatever_writes_them(run, tmp_path, capsys):
    opened = checkpoint.load(run)
    options = dict(key=random_key(0, "sample"), choice=Choice(0.0), samples=2)
    [whole, _] = generate(opened.model, opened.tokenizer, "def ", tokens=30, **options)
    stop = whole[7:9]
    expected = whole[: whole.find(stop)]
    assert generate(opened.model, opened.tokenizer, "def ", tokens=30, until=[stop], **options) == [expected] * 2
    (tmp_path / "prompts").write_text("def ")
    how = dict(prompt=None, prompts_file=str(tmp_path / "prompts"), tokens=30, temperature=0.0, stop=["never", stop])
    generate_command.write(options_of(run, **how))
    assert json.loads(capsys.readouterr().out) == {"prompt": "def ", "text": expected}


def test_all_files_of_text_are_read_alike(tmp_path, monkeypatch):
    for content, text in ((b"\xef\xbb\xbfa\r\n\xc3\xa9 \r\n\r\n", "a\né \n"), (b"a\rb", "a\rb"), (b"\n", "")):
        (tmp_path / "a.txt").write_bytes(content)
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        paths = f"{tmp_path}/a.txt", f"{tmp_path}/a.txt.gz", "-"
        assert [read_text("--prompt_file", path) for path in paths] == [text] * 3


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"prompt": None}, "--prompt: a text to continue is needed"),  # standard input is empty
        ({"prompts_file": "b"}, "--prompts_file: a prompt was given as well"),
        ({"batch_size": 2}, "--batch_size: goes with --prompts_file"),
        ({"stop": ["a", ""]}, "--stop: must not be empty"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, sentence, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(UserError, match=f"^{sentence}"):
        generate_command.write(options_of("run", **options))
