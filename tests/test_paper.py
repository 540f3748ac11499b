"""The paper's tables and figures by command, with pretended commands."""

import json
import runpy
import shlex
import subprocess
import sys

import pytest

from diffeqformer.config import check_overrides, check_used
from helpers import ROOT
from runs import command


@pytest.mark.parametrize("scale", ["tiny", "published"])
def test_every_exhibit_of_the_paper_is_made_by_commands_that_exist(scale):
    done = subprocess.run(
        [sys.executable, "experiments/paper.py", "--list", f"--scale={scale}"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    exhibits = [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith(("Table", "Figure"))]
    figures = [number for number in range(2, 19) if number not in (6, 17)]  # these and 1 show the architecture
    assert exhibits == [f"Table {n}" for n in range(1, 7)] + [f"Figure {n}" for n in figures]
    needs = [line for line in done.stdout.splitlines() if line.startswith("  needs: ")]
    assert len(needs) == len(exhibits) - 1  # Table 3 is counted
    counted = {name: sum(name in line for line in needs) for name in ("--wikitext", "--tokenizer", "lm-eval")}
    wikitext, tokenizer = (2, 0) if scale == "tiny" else (0, 5)
    assert counted == {"--wikitext": wikitext, "--tokenizer": tokenizer, "lm-eval": 6}
    commands = {line.strip() for line in done.stdout.splitlines() if line.startswith("  python ")}
    package = "".join(path.read_text() for path in ROOT.glob("diffeqformer/**/*.py"))
    for words in map(shlex.split, sorted(commands)):
        options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
        source = package
        if words[1] == "-m":
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
        else:
            script = ROOT / words[1]
            source = script.read_text() + script.with_name("common.py").read_text()
            if "study" in options:
                assert f'"{options["study"]}"' in source
        assert all(f'"{name}"' in source for name in options if not name.startswith("config"))
        if "config" in options:
            file, _, model = options["config"].partition(":")
            config = runpy.run_path(str(ROOT / file))["get_config"](*[model] * bool(model))
            check_overrides(words)
            check_used(words, config)


def test_a_report_is_made_once_unless_it_was_interrupted(tmp_path):
    def ran(**environment):
        done = command("pretended_paper", "--figure=13", f"--folder={tmp_path}/my runs", environment=environment)
        return done.returncode, [
            line.partition(" --")[0] for line in done.stdout.splitlines() if line.startswith("ran ")
        ]

    train, report = "ran diffeqformer.main", "ran diffeqformer.analyze"
    assert ran(FAILS="1") == (1, [train, report]) and ran() == (0, [train, report]) and ran() == (0, [train])
    assert {path.name for path in (tmp_path / "my runs").iterdir()} == {"simulation", "simulation-1"}


def test_downstream_tasks_are_those_of_the_runs_that_a_study_shows(tmp_path):
    for run in ("gpt-optimizer.learning_rate-0.004", "diffeqformer-optimizer.learning_rate-0.002"):
        for rest in ("seed-0", "seed-1", "seed-2", "seed-1-2_articles"):
            (tmp_path / "my runs" / "studies" / f"tiny-{run}-{rest}-1500_steps").mkdir(parents=True)
    done = command("pretended_paper", "--table=4", f"--folder={tmp_path}/my runs")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ran diffeqformer.downstream")]
    found = [path.partition("/tiny-")[2] for path in line.split("--workdir=")[1].split(" --")[0].split(",")]
    assert found == [
        f"{model}-optimizer.learning_rate-{rate}-seed-{seed}-1500_steps"
        for model, rate in (("gpt", 0.004), ("diffeqformer", 0.002))
        for seed in (1, 2)
    ]
    for given, end in ((["--tasks=my tasks"], " --include='my tasks' --tasks=paper"), ([], "/downstream")):
        done = command("pretended_paper", "--table=4", "--scale=published", "--list", *given)
        assert done.stdout.splitlines()[-2].endswith(end) and done.returncode == 0, done.stderr


def test_reports_are_summed_up_over_seeds(tmp_path):
    for seed, size in ((1, 2.0), (2, 6.0)):
        qk = {"radius": [[size, 1.0], [1.0, 1.0]], "positive_share": [[0.0, 0.0], [0.5, 1.0]]}
        sensitivity = {"prediction": "|", "pieces": ["a", "b", "c"], "measures": {"gradient": [None, size, 9.0]}}
        found = {"spectra": {"times": [0.5, 1.0], "QK": qk}, "sensitivity": sensitivity}
        found["induction"] = {"scores": [[0.1, size / 10]], "even": 0.01}
        (tmp_path / f"gpt-seed-{seed}").mkdir()
        (tmp_path / f"gpt-seed-{seed}" / "results.json").write_text(json.dumps(found))

    def run(*kinds):
        program = [sys.executable, "experiments/reports.py", f"--results={tmp_path}/new/figure.json"]
        patterns = [f"--report={tmp_path}/{kind}-seed-?" for kind in kinds]
        return subprocess.run([*program, *patterns], capture_output=True, text=True, cwd=ROOT)

    done = run("gpt")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "figure.md").read_text() == done.stdout
    rows = {row: cells for row, *cells in (line[2:-2].split(" | ") for line in done.stdout.splitlines()[2:])}
    assert rows["QK: largest spectral radius"] == ["4.000 ± 2.828"] and rows["QK: found at"] == ["0.5; 0.5"]
    assert rows["QK: share of positive real parts, last time"] == ["0.750 ± 0.000"]
    change = "QK: mean change of the radius between times, share of the mean radius"
    assert rows[change] == ["0.756 ± 0.503"]  # 0.5 of 1.25 and 2.5 of 2.25
    assert rows["largest induction score"] == ["0.400 ± 0.283"] and rows["prediction"] == [r"'\|'; '\|'"]
    assert rows["gradient"] == ["'b' at 1, 'a' at 0; 'b' at 1, 'a' at 0"]
    done = run("llama")
    assert done.returncode == 1 and "none has a results.json" in done.stderr


def test_perplexities_stand_beside_those_published(tmp_path):
    done = command("pretended_paper", "--figure=5", "--scale=published", f"--folder={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip("| ").split(" | ", 1) for line in (tmp_path / "figure-5.md").read_text().splitlines())
    assert len(rows) == 2 + 2 * 10 and (tmp_path / "figure-5.png").stat().st_size > 10_000
    there, back = "finetune_openwebtext_to_wikitext103-", "finetune_wikitext103_to_openwebtext-"
    assert rows[f"{there}lora-12-test"] == "20.00 | 22.4"
    assert rows[f"{there}full-gpt-24-test-best"] == "20.00 | 19.5 to 20.5"
    assert rows[f"{back}full-9-validation-best"] == "20.00"
    done = command("pretended_paper", "--table=1", "--scale=published", f"--folder={tmp_path}")  # none is at hand
    assert done.returncode == 0 and "| wikitext103_small-validation | 20.00 |  |" in done.stdout, done.stderr


@pytest.mark.slow
def test_widths_of_the_time_embedding_are_measured_beside_a_gpt(tmp_path):
    def run(*options):
        shape = "width=16", "heads=2", "num_steps=2", "vocab_size=32", "sequence_length=16", "batch_size=8", "rounds=1"
        program = [sys.executable, "benchmarks/embedding.py", *(f"--{each}" for each in shape), f"--output={tmp_path}"]
        return subprocess.run([*program, *options], capture_output=True, text=True, cwd=ROOT)

    done = run("--embed_dim=2", "--embed_dim=3", "--embed_dim=5")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "embedding.md").read_text()
    assert table in done.stdout and (tmp_path / "embedding.png").stat().st_size > 10_000
    names, parameters = zip(*(line.split(" | ")[:2] for line in table.splitlines()[4:]))
    assert names == ("| gpt", "| diffeqformer, E 2", "| diffeqformer, E 3", "| diffeqformer, E 5")
    numbers = [int(number.replace(",", "")) for number in parameters]
    assert numbers == sorted(set(numbers))
    done = run("--time_embed_dim=4")
    assert done.returncode == 1 and "--embed_dim" in done.stderr.splitlines()[-1]
