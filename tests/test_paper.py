"""The paper's tables and figures by command, with pretended commands."""

import contextlib
import json
import pathlib
import runpy
import shlex
import types

import pytest

from diffeqformer.config import check_overrides, check_used
from helpers import ROOT


@pytest.fixture
def made(script, monkeypatch, tmp_path):
    """A function that makes an exhibit in a folder, "my runs", by commands that only write a file into new folders.

    It returns these commands. With `fails`, the first one that has a folder fails.
    """

    def make(*options, fails=False):
        paper, ran = script("paper", f"--folder={tmp_path}/my runs", *options), []

        def run(command):
            ran.append(" ".join(command[2:]))
            [folder] = [pathlib.Path(word[9:]) for word in command if word.startswith("--output=")] or [None]
            if folder:
                folder.mkdir(parents=True)  # as commands do, fails if it is there
                (folder / "results.json").write_text(json.dumps({"rows": [{"paper_perplexity": 20}]}))
            return types.SimpleNamespace(returncode=int(fails and folder is not None))

        monkeypatch.setattr(paper, "subprocess", types.SimpleNamespace(run=run))
        with pytest.raises(SystemExit, match="its command ended with status 1") if fails else contextlib.nullcontext():
            paper.main(None)
        return ran

    return make


@pytest.mark.parametrize("scale", ["tiny", "published"])
def test_every_exhibit_of_the_paper_is_made_by_commands_that_exist(scale, script, capsys):
    script("paper", "--list", f"--scale={scale}").main(None)
    lines = capsys.readouterr().out.splitlines()
    exhibits = [line.partition(":")[0] for line in lines if line.startswith(("Table", "Figure", "Appendix"))]
    numbered = [f"Table {n}" for n in range(1, 7)] + [f"Figure {n}" for n in range(1, 19)]
    assert exhibits == numbered + [f"Appendix {letter}" for letter in "ABCDEF"]
    commands = {line.strip() for line in lines if line.startswith("  python ")}
    package = "".join(path.read_text() for path in ROOT.glob("diffeqformer/**/*.py"))
    for words in map(shlex.split, sorted(commands)):
        options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
        source = package
        if words[1] == "-m":
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
        elif words[1].startswith("experiments/"):
            script(pathlib.Path(words[1]).stem, *words[2:])  # refuses options that it doesn't have
            continue
        else:
            source = (ROOT / words[1]).read_text() + (ROOT / "benchmarks" / "common.py").read_text()
        assert all(f'"{name}"' in source for name in options if not name.startswith("config"))
        if "config" in options:
            file, _, model = options["config"].partition(":")
            config = runpy.run_path(str(ROOT / file))["get_config"](*[model] * bool(model))
            check_overrides(words)
            check_used(words, config)


def test_a_report_is_made_once_unless_it_was_interrupted(tmp_path, made):
    def names(**how):
        return [command.partition(" --")[0] for command in made("--figure=3", "--scale=published", **how)]

    train, report = "diffeqformer.main", "diffeqformer.analyze"
    assert names(fails=True) == [train, report] and names() == [train, report] and names() == [train]
    assert {path.name for path in (tmp_path / "my runs").iterdir()} == {"figure-3-medium", "figure-3-medium-1"}


def test_perplexities_stand_beside_those_published(tmp_path, made, capsys):
    made("--figure=5", "--scale=published")
    tmp_path = tmp_path / "my runs"
    rows = dict(line.strip("| ").split(" | ", 1) for line in (tmp_path / "figure-5.md").read_text().splitlines())
    assert len(rows) == 2 + 2 * 10 and (tmp_path / "figure-5.png").stat().st_size > 10_000
    there, back = "finetune_openwebtext_to_wikitext103-", "finetune_wikitext103_to_openwebtext-"
    assert rows[f"{there}lora-12-test"] == "20.00 | 22.4"
    assert rows[f"{there}full-gpt-24-test-best"] == "20.00 | 19.5 to 20.5"
    assert rows[f"{back}full-9-validation-best"] == "20.00"
    made("--table=1", "--scale=published")  # none is at hand
    assert "| wikitext103_small-validation | 20.00 |  |" in capsys.readouterr().out
