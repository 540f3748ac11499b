"""The experiments' scripts, with fake runs."""

import concurrent.futures
import contextlib
import json
import re
import runpy
import shutil
import sys
import threading

import pytest

from helpers import ROOT
from runs import command


def study(folder, steps, name="design", *options) -> tuple[str, dict]:
    """What is printed, and what is saved."""
    results = folder / "results.json"
    options = (f"--study={name}", f"--steps={steps}", f"--folder={folder}", f"--results={results}", *options)
    done = command("pretended_study", *options)
    assert done.returncode == 0, done.stderr
    assert (folder / f"tiny-{name}.png").stat().st_size > 10_000
    return done.stdout, json.loads(results.read_text())


@pytest.mark.slow
def test_a_study_chooses_rates_runs_nothing_twice_and_takes_no_runs_of_another_length(tmp_path):
    printed, found = study(tmp_path, 3, "design", "--seeds=2")
    assert printed.count("configs/tiny.py:diffeqformer ") == printed.count("configs/tiny.py:alternative ") == 4 + 2
    best = "tiny-alternative-optimizer.learning_rate-0.002-seed-2-3_steps"
    perplexities = {"1": 8.5, "2": 7.5, "3": 6.5}
    run = {"perplexities": perplexities, "parameters": 1234}
    assert len(found) == 2 * (4 + 2) and found[best] == run
    assert "| diffeqformer | 1,234 | 0.002 | 2 | 6.50 ± 0.00 | 3, 3 | 6.50 ± 0.00 |" in printed

    del found[best]
    (tmp_path / "results.json").write_text(json.dumps(found))
    printed, again = study(tmp_path, 3, "design", "--seeds=2")
    assert printed.count("configs/tiny.py") == 1 and again == found | {best: run}  # from the folder
    shutil.rmtree(tmp_path / best)
    assert "configs/tiny.py" not in study(tmp_path, 3, "design", "--seeds=2")[0]  # from the results

    del again[best]
    (tmp_path / "results.json").write_text(json.dumps(again))
    shutil.copytree(tmp_path / best.replace("seed-2", "seed-1"), tmp_path / best)
    checkpoints = tmp_path / best / "checkpoints"
    (checkpoints / "3").rename(checkpoints / "2")  # of 3 steps
    assert study(tmp_path, 3, "design", "--seeds=2")[0].count("configs/tiny.py:alternative ") == 1
    printed, _ = study(tmp_path, 2, "design", "--seeds=1")
    assert printed.count("tiny.py:alternative ") == printed.count("tiny.py:diffeqformer ") == 4 + 1
    assert "published" not in printed
    assert "published diffeqformer llama\n" in study(tmp_path, 1, "llama", "--seeds=1")[0]


def test_a_width_that_is_no_number_is_said_in_one_sentence(tmp_path):
    done = command("pretended_study", "--study=embedding", "--widths=4,wide", f"--folder={tmp_path / 'out'}")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr == "--widths: must be comma-separated numbers, but one is 'wide'\n"


def test_nothing_is_begun_after_a_failure(capsys):
    side_by_side, begun, done = runpy.run_path("experiments/common.py")["side_by_side"], [], []

    def work(item, cores):
        begun.append((item, cores))
        return 1 / item if item else sys.exit("no such item")

    with pytest.raises(SystemExit):
        side_by_side([2, 4, 0, 5], work, lambda *found: done.append(found), 1)
    assert begun == [(2, None), (4, None), (0, None)] and done == [(2, 0.5), (4, 0.25)]
    assert capsys.readouterr().err == "no such item\n"
    with pytest.raises(ZeroDivisionError):
        side_by_side([2, 0, 5], work, lambda item, _: 1 / (item - 2), 1)
    assert begun[3:] == [(2, None)]


def test_processes_that_share_a_file_of_results_lose_none(tmp_path):
    common = runpy.run_path("experiments/common.py")
    path, begun = tmp_path / "new" / "results.json", []

    def work(row, cores):
        begun.append(row)
        if row == "a":  # while another process works on the others
            common["add_results"](path, {"b": {"by": "another"}, "d": {"by": "another"}})
        return {"by": "this"}

    found = common["run_rows"](["a", "b", "c"], str, work, path, 1)
    assert begun == ["a", "c"] and found == json.loads(path.read_text())
    assert {row: found[row]["by"] for row in "abcd"} == dict(a="this", b="another", c="this", d="another")


def test_two_that_add_results_at_once_wait_for_one_another(tmp_path):
    common, path, both = runpy.run_path("experiments/common.py"), tmp_path / "results.json", threading.Barrier(2)

    def slowly(path, results):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)  # in vain, unless both have read the file before either writes
        common["write_json"](path, results)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda row: common["add_results"](path, {row: {}}, slowly), "ab"))
    assert json.loads(path.read_text()) == {"a": {}, "b": {}}


def test_runs_side_by_side_divide_the_cores(monkeypatch):
    common, at_once, found = runpy.run_path("experiments/common.py"), threading.Barrier(2, timeout=60), {}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/taskset")
    common["side_by_side"]("ab", lambda item, cores: (at_once.wait(), cores)[1], found.__setitem__, 2)
    assert sorted(found.values()) == [[3, 6], [5]]
    assert common["on_cores"](["train"], [3, 6]) == ["taskset", "--cpu-list", "3,6", "train"]
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SystemExit, match="^--at_once: must be 1 here, because only Linux with taskset"):
        common["parts_of_cores"](2)


@pytest.mark.slow
def test_the_sweep_has_every_width_at_every_rate(tmp_path):
    printed, found = study(tmp_path, 2, "embedding", "--seeds=1")
    assert len(found) == 6 * (4 + 1) and printed.count("--config.optimizer.learning_rate=0.008 ") == 6
    assert printed.count("--config.model.time_embed_dim=96 ") == 4 + 1


@pytest.mark.slow
def test_the_short_text_is_the_first_articles(tmp_path):
    articles = "".join(f" = Article {i} = \n\n text {i} \n\n" for i in range(14))
    (tmp_path / "wiki.txt").write_text(articles)
    printed, found = study(tmp_path, 2, "overfitting", f"--wikitext={tmp_path / 'wiki.txt'}", "--seeds=1")
    assert [name.split("-")[1] for name in list(found)[-3:]] == ["diffeqformer", "gpt", "shared"]
    texts = [(tmp_path / f"short-{split}.txt").read_text() for split in ("train", "validation")]
    assert texts[0].count("Article") == 2 and "text 1 " in texts[0] and "text 0 " in texts[0]
    assert texts[1].count("Article") == 10 and "text 13 " in texts[1]
    assert printed.count(f"--config.data.train_files={tmp_path / 'short-train.txt'} ") == 3 * (4 + 1)


@pytest.mark.slow
def test_the_elastic_study_chooses_rates_and_runs_no_row_twice(tmp_path):
    results = tmp_path / "elastic.json"

    def run(stage):
        done = command(
            "pretended_elastic", f"--stage={stage}", f"--folder={tmp_path}", f"--results={results}", "--seeds=2"
        )
        return done, [line for line in done.stdout.splitlines() if line.startswith("trained ")]

    done, _ = run("final")
    assert (
        done.returncode == 1 and "--stage=rates, which lacks the row 'specialist at 4, 5000 steps, rate" in done.stderr
    )
    assert len(run("rates")[1]) == 3 * 5 and run("rates")[1] == []
    times = tmp_path / "elastic_times.json"
    times.write_text('{"gpt": {}}')
    done, trained = run("final")
    assert done.returncode == 1 and not trained and f"{times}: must have times of specialist, gpt, " in done.stderr
    assert run("times")[0].returncode == 0
    done, trained = run("final")
    assert done.returncode == 0, done.stderr
    assert len(trained) == 2 * (3 + 2 * 4 + 3 + 2) and all("--config.seed=0" not in line for line in trained)
    for pattern, rate in (
        ("tiny.py:gpt ", 0.003),
        ("tiny.py:elastic --config.steps=", 0.003),
        ("tiny.py:elastic --config.model.training_times=fixed ", 0.006),
        ("tiny.py:diffeqformer --config.model.num_steps=2 ", 0.0015),
    ):
        of_kind = [line for line in trained if re.search(pattern, line)]
        assert of_kind and all(f"--config.optimizer.learning_rate={rate} " in line for line in of_kind)
    assert sum("training_times=fixed " in line and "--config.steps=28261 " in line for line in trained) == 4
    assert sum("tiny.py:elastic --config.steps" in line and "--config.steps=24074 " in line for line in trained) == 2
    assert sum("--config.model.num_steps=12 --config.steps=10833 " in line for line in trained) == 4
    assert "| gpt | 12 | 10,833 | 0.003 | 2 |" in done.stdout and "2.083 ± 0.000" in done.stdout
    assert results.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.slow
def test_ways_of_training_are_compared_over_seeds_and_no_model_is_trained_twice(tmp_path):
    def printed(depths, seeds):
        options = f"--folder={tmp_path / f'runs-{depths}-{seeds}'}", f"--results={tmp_path / 'results.json'}"
        done = command("pretended_training_times", *options, f"--depths={depths}", f"--seeds={seeds}")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return lines, [line for line in lines if line.startswith("trained ")]

    assert len(printed("one", 1)[1]) == 3
    lines, trained = printed("one", 2)
    assert len(trained) == 3 and all("--config.seed=2 " in line for line in trained)
    assert "| greatest | " + " | ".join(["0.75 ± 0.35"] * 3) + " |" in lines
    assert "| perplexity, 8 steps | " + " | ".join(["30.00 ± 14.14"] * 3) + " |" in lines
    assert "| observed order of euler | " + " | ".join(["1.00"] * 3) + " |" in lines  # of the seed that has one
    lines, trained = printed("many", 1)
    assert len(trained) == 7 and all("tiny.py:elastic " in line for line in trained)
    assert [sum(grids in line for line in trained) for grids in ("times=fixed", "times=shifted")] == [3, 3]
    assert sum("solver=euler" in line for line in trained) == 4
    assert (
        "| validation bits_per_byte_at_2 | " + " | ".join(["2.500"] * 7) + " |" in lines
    )  # of seven, without those of 4


@pytest.mark.slow
def test_fine_tuning_at_other_depths_tunes_every_base_and_runs_nothing_twice(tmp_path):
    wikitext = tmp_path / "wiki.valid.tokens"
    wikitext.write_text("".join(f" = Title {number} = \n\n Some words . \n\n" for number in range(8)))
    folder = tmp_path / "runs"

    def trained(seeds, *bases):
        options = f"--wikitext={wikitext}", f"--folder={folder}", f"--results={tmp_path / 'results.json'}"
        done = command("pretended_finetune_depths", *options, *bases, f"--seeds={seeds}")
        assert done.returncode == 0, done.stderr
        assert (folder / "figure.png").stat().st_size > 10_000
        lines = done.stdout.splitlines()
        [picture] = {line for line in lines if line.startswith("published ")}
        assert picture.startswith("published 0 adapters, 9 steps ") and picture.endswith(" all weights, all depths")
        return [line for line in lines if line.startswith("trained ")], (folder / "table.md").read_text()

    both = trained(1)[0]
    assert len(both) == 2 * (2 * (3 + 4 + 4) + (1 + 8) + (1 + 2))
    first = both + trained(1, "--base=elastic")[0]
    tuned = [line for line in first if line.endswith("--config.seed=0")]
    assert len(tuned) == 6 * (3 + 4 + 4) and len(first) - len(tuned) == 2 * ((1 + 8) + (1 + 2) + (1 + 8))
    depths = [line.partition("num_steps=")[2][0] for line in tuned if "--config.base=" in line]
    assert depths.count("6") == 4 * (4 + 4) and depths.count("8") == 2 * (4 + 4) == len(depths) - 32
    shutil.rmtree(folder)
    # the rates and the first seed's runs are from the results
    second, table = trained(2, "--base=diffeqformer", "--base=gpt", "--base=elastic")
    assert len(second) == len(first) - len(tuned) and all(line.endswith("--config.seed=2") for line in second)
    for line in second:
        mode = "lora" if "lora_rank=20 --config.model.lora_start=published" in line else "full"
        mode = mode if "--config.base=" in line else "pretraining"
        assert f"learning_rate={dict(pretraining=0.004, full=0.002, lora=0.008)[mode]} " in line
        base = line.partition("--config.base=")[2].partition(" ")[0]
        assert base.endswith("-2-rate-0.004") == (mode != "pretraining") and "optimizer.decay=everything" in line
        of_first = line.startswith("trained stdlib-") == (mode == "pretraining")  # its own text is the library
        assert (" --config.data.task=wikitext " in line) != of_first
    table = [line.strip("| ").split(" | ") for line in table.splitlines()]
    cells = ["8.50 ± 0.71", "6.50 ± 0.71", "200, 200", "8.50 ± 0.71"]
    assert ["stdlib_to_wikitext", "elastic", "lora", "6", "2", *cells] in table
    cells = ["6.50 ± 0.71", "4.50 ± 0.71", "200, 200", "6.50 ± 0.71"]
    assert ["wikitext_to_stdlib", "gpt", "full", "8", "2", *cells] in table


def test_shrunken_configs_keep_what_is_published(tmp_path):
    results = tmp_path / "full_scale.json"

    def run():
        options = "--steps=20", "--seeds=2", f"--folder={tmp_path}", f"--results={results}"
        done = command("pretended_full_scale", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    printed, changed = run()
    assert [fields.pop("seed", 0) for fields in changed] == 4 * [0] + 4 * [1]
    shape = {"width": 128, "heads": 4, "mlp": 512, "num_steps": 8, "max_length": 128, "vocab_size": 2000}
    for fields in changed:
        assert {name: fields.pop(f"model.{name}") for name in shape} == shape
        assert (fields.pop("batch_size"), fields.pop("sequence_length")) == (9, 128)
        assert fields.pop("model.vocab_multiple", 128) == 128 and fields.pop("model.dtype", "float32") == "float32"
        left = {name for name in fields if not name.startswith(("data.", "log_", "eval_", "checkpoint"))}
        assert left == {"steps", "mesh.fsdp"}
    assert "| llama_1b | 2 | 1.0000 ± 0.7071 | 0.250 ± 0.000 | 0.75 ± 0.00 | 0 ± 0 |" in printed
    assert run() == (printed[printed.index("| config") :], [])
    assert results.with_suffix(".png").stat().st_size > 10_000


def test_every_picture_of_the_docs_is_drawn(tmp_path):
    wikitext, pictures = tmp_path / "wiki.valid.tokens", tmp_path / "pictures"
    wikitext.write_text("".join(f" = Title {number} = \n\n Some words . \n\n" for number in range(60)))
    (tmp_path / "of_a_study").write_text("study")
    pictures.mkdir()

    def draw(*options):
        done = command("pretended_docs_figures", f"--folder={tmp_path / 'runs'}", *options, pictures)
        assert done.returncode == 0, done.stderr
        return done.stdout, {path.stem: path.read_text() for path in pictures.iterdir()}

    said, drawn = draw()
    assert said.count("left as it is") == 3 and len(drawn) == 10
    _, drawn = draw(f"--wikitext={wikitext}")
    assert drawn.keys() == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert list(drawn.values()).count("study") == 8 and drawn["depth"] == "perplexity"
    assert (drawn["spectrum_qk"], drawn["clustering_equal_total"]) == ("QK 0", "particles 2")
    _, drawn = draw("--only=ode_published")
    assert drawn["ode_published"] == "ode"


def test_a_recipe_is_compared_at_its_own_best_rate_with_its_baseline(tmp_path):
    options = (f"--folder={tmp_path}", f"--results={tmp_path / 'results.json'}", "--steps=100", "--seeds=2")
    done = command("pretended_recipe", *options, "--forms=llama;llama's block, published")
    assert done.returncode == 0, done.stderr
    trained = [line for line in done.stdout.splitlines() if line.startswith("trained")]
    tuned = [line for line in trained if "python_packages" in line]
    assert len(tuned) == 2 * 4 and all("seed_0" in line for line in tuned)
    assert not any("-1e-3-" in line for line in tuned) and sum("-1.6e-2-" in line for line in tuned) == 2
    assert len(trained) == len(tuned) + 2 * 2 and all("-8e-3-" in line for line in trained[8:])
    assert "| llama | 1,234 |  | 8e-3 | 2.515 ± 0.007 |  |" in done.stdout
    assert "| llama's block, published | 1,234 | 2.0 | 8e-3 | 2.415 ± 0.007 | -0.100 ± 0.000 |" in done.stdout
    assert (tmp_path / "tiny-recipe.png").stat().st_size > 5_000
    again = command("pretended_recipe", *options, "--forms=llama;llama's block, published")
    assert "trained" not in again.stdout and again.stdout.endswith(done.stdout[done.stdout.index("| form") :])
    wrong = command("pretended_recipe", *options, "--forms=bert")
    assert wrong.returncode == 1 and wrong.stderr.startswith("--forms: must be of gpt; gpt's block, published;")
