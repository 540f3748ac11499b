"""Downstream tasks: the command, its tables, and lm-eval's own command with our model."""

import functools
import json
import math
import pathlib
import re
import shutil
import types

import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from diffeqformer import downstream
from diffeqformer.checkpoints import checkpoint
from diffeqformer.errors import UserError
from diffeqformer.inference import harness_tasks as tasks
from diffeqformer.inference.lm_eval_model import HarnessModel
from helpers import ROOT, drawn, save_params, toy_config
from runs import command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with a checkpoint: a DiffEqFormer and a GPT, both untrained byte-level models."""
    folders = [tmp_path_factory.mktemp("runs") / kind for kind in ("diffeqformer", "gpt")]
    for folder in folders:
        config = toy_config(folder.name, model__max_length=64, sequence_length=64, model__num_steps=2)
        save_params(folder, config, {12: drawn(config.model)[1]})
    return folders


def test_the_command_prints_the_table_of_two_checkpoints(runs, tmp_path):
    done = command(
        "downstream", f"--workdir={runs[0]},{runs[1]}", "--shots=0,2", "--include=tests/data/tasks",
        "--output", tmp_path / "out",
        environment={"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert lines[0] == ["", "", "Zero-shot", "", "2-shot", ""]
    assert lines[2] == ["**Benchmark**", "**examples**", *2 * [f"**{run}, 2 steps**" for run in runs]]
    rows = {line[0]: line[1:] for line in lines[3:]}
    assert list(rows) == ["PIQA", "last_word", "pages [bits_per_byte]", "sums [exact_match]"]
    assert rows["PIQA"][0] == "5" and rows["pages [bits_per_byte]"][-1].endswith(" [0 shots]")

    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (tmp_path / "out" / "results.md").read_text() in done.stdout and report["seed"] == 1234
    assert [(run["kind"], run["checkpoint_step"], run["num_steps"], run["shots"]) for run in report["runs"]] == [
        (kind, 12, 2, shots) for kind in ("diffeqformer", "gpt") for shots in (0, 2)
    ]
    piqa = report["runs"][0]["tasks"]["piqa"]
    cut = f" [{piqa['contexts_cut']} of {piqa['contexts']} cut]" if piqa["contexts_cut"] else ""
    assert rows["PIQA"][1] == f"{100 * piqa['acc,none']:.2f} ({100 * piqa['acc_stderr,none']:.2f})" + cut
    every = [results for run in report["runs"] for results in run["tasks"].values()]
    assert 0 < sum(results["contexts_cut"] for results in every) < sum(results["contexts"] for results in every)

    documents = json.loads((tmp_path / "out" / "documents.json").read_text())
    for scored, run in zip(documents, report["runs"], strict=True):
        assert scored["documents"].keys() == {"piqa", "last_word", "sums"}  # a page has no score that is a number
        for task, values in scored["documents"].items():
            results = run["tasks"][task]
            assert len(values) == results["examples"]
            assert np.mean(values) == pytest.approx(results[tasks.shown_metric(results)])


@pytest.fixture
def local_tasks(tmp_path, monkeypatch):
    """Task files name data relative to the repository; the cache of `datasets` is deleted with the test's folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


def options(runs, **changes):
    values = dict(
        workdir=[str(runs[0])], shots=["0"], tasks=[], include="tests/data/tasks", num_steps=[], batch_size=4,
        window=None, limit=None, output=None, step=None,
    )  # fmt: skip
    return types.SimpleNamespace(**{**values, **changes})


def test_lm_eval_gets_every_score_at_several_depths(runs, tmp_path, local_tasks):
    downstream.run_all(options(runs, tasks=["pages", "last_word"], num_steps=["3", "2"], output=str(tmp_path), limit=3))
    report = json.loads((tmp_path / "results.json").read_text())
    assert [run["num_steps"] for run in report["runs"]] == [3, 2] and report["limit"] == 3
    texts = [json.loads(line)["page"] for line in (ROOT / "tests/data/tasks/pages.jsonl").read_text().splitlines()[:3]]
    for run in report["runs"]:
        model = HarnessModel(checkpoint.load(runs[0]), run["num_steps"])
        requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
        bits = -sum(model.loglikelihood_rolling(requests)) / math.log(2) / sum(len(text.encode()) for text in texts)
        assert run["tasks"]["pages"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
        assert run["tasks"]["pages"]["examples"] == 3


def test_groups_have_a_row_if_they_have_a_value_and_else_one_for_each_task(runs, tmp_path, local_tasks):
    folder = shutil.copytree(ROOT / "tests/data/tasks", tmp_path / "tasks")
    mean = "task: [last_word, piqa]\naggregate_metric_list: [{metric: acc, weight_by_size: %s}]\n"
    (folder / "mmlu.yaml").write_text("group: mmlu\n" + mean % "true")
    (folder / "even.yaml").write_text("group: even\n" + mean % "false")  # of which no document has a share
    (folder / "loose.yaml").write_text("group: loose\ntask: [last_word, piqa]\n")
    (folder / "tagged.yaml").write_text(f"include: {folder}/everyday.yaml\ntask: tagged\ntag: some\n")
    accuracies = {}
    groups = {"mmlu": {"mmlu": 11}, "loose": {"last_word": 6, "piqa": 5}, "some": {"tagged": 5}, "even": {"even": 11}}
    for group, rows in groups.items():
        downstream.run_all(options(runs, include=str(folder), tasks=[group], output=str(tmp_path / group)))
        [run] = json.loads((tmp_path / group / "results.json").read_text())["runs"]
        [scored] = json.loads((tmp_path / group / "documents.json").read_text())
        assert {task: results["examples"] for task, results in run["tasks"].items()} == rows
        assert {task: len(values) for task, values in scored["documents"].items()} == (rows if group != "even" else {})
        accuracies |= {task: results["acc,none"] for task, results in run["tasks"].items()}
    assert accuracies["mmlu"] == pytest.approx((6 * accuracies["last_word"] + 5 * accuracies["piqa"]) / 11)


def test_the_command_refuses_before_any_work(runs, tmp_path, local_tasks, monkeypatch):
    write_task(tmp_path, "broken", dataset_kwargs={"data_files": {"test": "nowhere.jsonl"}})
    generations = {"long": {"max_gen_toks": 64}, "beams": {"num_beams": 4}, "half": {"top_k": 2.5, "do_sample": True}}
    for name, asked in generations.items():
        write_task(tmp_path, name, output_type="generate_until", generation_kwargs=asked)
    monkeypatch.setattr(downstream, "run_harness", lambda *_: pytest.fail("it went to work"))
    own, ours = {"include": str(tmp_path)}, functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, **_: ours(include_path=include_path))
    for changes, sentence in (
        ({"workdir": ["nowhere"]}, "nowhere: there is no checkpoint here"),
        ({"workdir": [str(runs[1])], "num_steps": ["7"]}, ".*gpt: num_steps: "),
        ({"window": 65}, "--window: must be from 2 to the 64 positions"),
        ({**own, "tasks": ["broken"]}, "--tasks: broken can't be loaded, FileNotFoundError: .*nowhere.jsonl"),
        ({**own, "tasks": ["long"]}, "--tasks: an example of long .* generation_kwargs.max_gen_toks: "),
        ({**own, "tasks": ["beams"]}, "--tasks: an example of beams .* generation_kwargs.num_beams: "),
        ({**own, "tasks": ["half"]}, "--tasks: an example of half .* generation_kwargs.top_k: "),
        ({"tasks": ["last_wort"]}, "--tasks: there is no task last_wort"),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            downstream.run_all(options(runs, **changes))


def write_task(folder, name, **fields):
    """A task file like last_word.yaml, with other fields."""
    lines = [f"include: {ROOT}/tests/data/tasks/last_word.yaml", f"task: {name}"]
    (folder / f"{name}.yaml").write_text("\n".join(lines + [f"{key}: {json.dumps(fields[key])}" for key in fields]))


def test_tasks_that_fail_are_left_out_and_marked(runs, tmp_path, local_tasks, capsys):
    folder = shutil.copytree(ROOT / "tests/data/tasks", tmp_path / "tasks", ignore=shutil.ignore_patterns("pages*"))
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemError('it was run')")
    (tmp_path / "two.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    two = {"data_files": {"test": str(tmp_path / "two.jsonl")}}
    write_task(folder, "logiqa", dataset_path=str(tmp_path / "script"), dataset_kwargs={})
    write_task(folder, "few", fewshot_split="test", dataset_kwargs=two)
    how = dict(shots=["0", "2"], include=str(folder), tasks=["few", "logiqa", "piqa"], output=str(tmp_path / "out"))
    with pytest.raises(UserError, match="^--tasks: few, logiqa didn't run"):
        downstream.run_all(options(runs, **how))
    said = capsys.readouterr()
    for sentence in ("an example of few with 2 shots can't be made", "logiqa can't be loaded"):
        assert re.search(f"^diffeqformer: --tasks: {sentence}, .* is left out$", said.err, re.MULTILINE)
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(report["failed"]) == ["few", "logiqa"]
    assert [list(run["tasks"]) for run in report["runs"]] == 2 * [["piqa"]]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "\n| LogiQA | not run | " in text and f"\nLogiQA wasn't run: {report['failed']['logiqa']}\n" in text


def test_what_is_done_outlives_an_error_in_a_later_task(runs, tmp_path, local_tasks, monkeypatch):
    run_harness = downstream.run_harness

    def run_or_fail(model, tasks, limit):
        if "pages" in tasks["tasks"]:
            raise UserError("no more")
        return run_harness(model, tasks, limit)

    monkeypatch.setattr(downstream, "run_harness", run_or_fail)
    with pytest.raises(UserError, match="^no more$"):
        downstream.run_all(options(runs, tasks=["last_word", "pages"], output=str(tmp_path / "out"), limit=3))
    [run] = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    [scored] = json.loads((tmp_path / "out" / "documents.json").read_text())
    assert list(run["tasks"]) == ["last_word"] and len(scored["documents"]["last_word"]) == 3
    assert "| last_word |" in (tmp_path / "out" / "results.md").read_text()


def test_lm_eval_finds_the_model_by_its_name(runs, local_tasks):
    manager = TaskManager(include_path="tests/data/tasks", include_defaults=False)
    how = dict(tasks=["sums"], batch_size="4", device="cuda:0", bootstrap_iters=0, task_manager=manager)
    results = lm_eval.simple_evaluate("diffeqformer", f"workdir={runs[0]},num_steps=3,window=50", **how)
    found = results["config"]
    assert [found[f"model_{name}"] for name in ("num_steps", "window", "step")] == [3, 50, 12]
    assert len(results["samples"]["sums"]) == 4
    with pytest.raises(UserError, match="^depth: there is no such argument"):
        HarnessModel.create_from_arg_obj({"workdir": runs[0], "depth": 3})


def test_logiqa_from_a_local_file_asks_what_lm_eval_asks(tmp_path, local_tasks):
    """Rows of our own, in the columns of the original release."""
    theirs = load_yaml(pathlib.Path(lm_eval.__file__).parent / "tasks/logiqa/logiqa.yaml")
    ours = load_yaml(tasks.OURS / "logiqa.yaml")
    data, prompt = {"dataset_path", "dataset_name", "dataset_kwargs"}, {"doc_to_text", "doc_to_target"}
    assert theirs.keys() - ours.keys() == {"dataset_name", "training_split", "validation_split"}
    assert all(ours[name] == theirs[name] for name in (ours.keys() & theirs.keys()) - data - prompt)

    rows = [
        {"label": "a", "context": "All cats purr {{x}}", "question": "Tom?", "options": ["“Yes”", "it's", "no", "D"]},
        {"label": " d\n", "context": " Two\nlines ", "question": "\\n <b>?", "options": ['"1"', "2\n", " 3", "é & ü"]},
        {"label": "c", "context": "", "question": "Which?", "options": ["A one", "B two", "C three", "D", "fifth"]},
    ]  # fmt: skip
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("test", "train")}
    for path in files.values():
        pathlib.Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "logiqa.yaml").write_text(
        f"include: {tasks.OURS}/logiqa.yaml\nfewshot_split: train\ndataset_kwargs: {json.dumps({'data_files': files})}"
    )
    task = tasks.load_tasks([], str(tmp_path), [0, 3], 64).rows["logiqa"]["tasks"]["logiqa"]
    assert list(task.test_docs()) == list(task.fewshot_docs()) == rows
    for row in rows:
        number = theirs["doc_to_target"](row)
        assert task.doc_to_text(row) == theirs["doc_to_text"](row) and task.doc_to_choice(row) == row["options"]
        assert task.doc_to_target(row) == task.doc_to_target({**row, "label": number}) == number
    for label in ("e", "", 4, -1):
        with pytest.raises(ValueError, match="not in list"):
            task.doc_to_target({**rows[0], "label": label})
