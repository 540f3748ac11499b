"""Tasks of lm-evaluation-harness: each one is tried before anything is scored; and the table of their scores."""

import math
import pathlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from diffeqformer.errors import UserError, did_you_mean, printable, reason_of

TASKS = {
    "arc_challenge": "ARC-Challenge",
    "arc_easy": "ARC-Easy",
    "hellaswag": "HellaSwag",
    "lambada_openai": "Lambada OpenAI",
    "lambada_standard": "Lambada Standard",
    "logiqa": "LogiQA",
    "mmlu": "MMLU",
    "piqa": "PIQA",
    "sciq": "SciQ",
    "winogrande": "Winogrande",
    "wsc273": "WSC273",
}
"""The tasks of the paper's Tables 4 and 5: their names in lm-evaluation-harness and in the paper, in its order."""
SEED = 1234  # for drawing the few-shot examples, as in lm-eval
OURS = pathlib.Path(__file__).parent / "task_files"  # tasks whose data lm-eval can't load, from local files
METRICS = ("acc", "exact_match", "f1", "bits_per_byte", "word_perplexity", "perplexity")
"""The first of these that a task reports is shown. The paper doesn't name its metric; we infer `acc` from its values.
On ARC-Challenge and LogiQA they are below chance, 25, as `acc` usually is for such models. The length-normalised
`acc_norm` isn't."""
PERCENT = ("acc", "exact_match", "f1")
COUNTS = ("contexts", "contexts_cut", "unknown_tokens", "altered_texts")  # of `HarnessModel.counts`


class Tasks(NamedTuple):
    """The tasks that can be run, and those that can't."""

    rows: dict[str, dict]  # for each row of the tables, a task or group, what `lm_eval.evaluator.evaluate` takes
    own: dict[str, int | None]  # by task, the number of examples that its file sets
    failed: dict[str, str]  # by requested name, why it can't be run


def load_tasks(names: list[str], include: str | None, shots: list[int], window: int) -> Tasks:
    """The tasks of some names, each tried with one example at every number of shots, for models with that window.

    Your own task files come before lm-eval's tasks of the same name. If no others are needed, lm-eval's aren't read.
    A task that fails is reported at once on the standard error, and left out.
    """
    manager, names = _find(names, include)
    tasks = Tasks({}, {}, {})
    for name in names:
        print(f"loading {name}", file=sys.stderr, flush=True)
        try:
            rows = _load(manager, name)
            every = {task: each for row in rows.values() for task, each in row["tasks"].items()}
            own = {task: each.get_config("num_fewshot") for task, each in every.items()}
            _try_examples(every, own, shots, window)
        except UserError as error:
            if len(names) == 1:
                raise UserError(f"--tasks: {error}") from error
            print(f"diffeqformer: --tasks: {error}; {name} is left out", file=sys.stderr, flush=True)
            tasks.failed[name] = str(error)
        else:
            tasks.rows.update(rows)
            tasks.own.update(own)
    if not tasks.rows:
        raise UserError(f"--tasks: none of {', '.join(names)} can be run; see the reasons above")
    return tasks


def _find(names: list[str], include: str | None):
    """lm-eval's `TaskManager`, and the requested names without repetitions."""
    from lm_eval.tasks import TaskManager

    manager = None
    if include is not None:
        manager = TaskManager(include_path=include, include_defaults=False)
        if not manager.all_subtasks:
            what = "lm-eval task files (.yaml with task: and dataset_path:)"
            raise UserError(f"--include: must be a folder with {what}, but {include} isn't one")
    names = names or (manager.all_subtasks if manager else ["paper"])
    names = list(dict.fromkeys(name for given in names for name in (TASKS if given == "paper" else [given])))
    if manager is None or set(names) - set(manager.all_tasks):
        manager = TaskManager(include_path=include)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"--tasks: there is no task {name}{did_you_mean(name, manager.all_tasks)}")
    return manager, names


def _load(manager, name: str) -> dict[str, dict]:
    """The rows of a task, a group, or a tag, which has those of its tasks."""
    random.seed(SEED), np.random.seed(SEED)  # a few tasks shuffle their examples, the same whatever else is loaded
    try:
        found = manager.load([name])
        parts = [found["groups"][name]] if name in found["groups"] else found["tasks"].values()
        return dict(row for part in parts for row in _rows(manager, part))
    except Exception as error:  # a task file, its templates or a download can raise anything
        raise UserError(
            f"{name} can't be loaded, {_reason(error)}; see that its data can be reached, or take --include with a "
            f"task file for local data, like those in {OURS}"
        ) from error


def _rows(manager, part) -> Iterator[tuple[str, dict]]:
    """A task or a group by its name, or the parts of a group without a value of its own."""
    if not hasattr(part, "has_aggregation"):
        yield part.task_name, manager.load([part])
    elif part.has_aggregation:
        yield part.name, manager.load([part])
    else:
        for inner in part:
            yield from _rows(manager, inner)


def _try_examples(tasks: dict, own: dict[str, int | None], shots: list[int], window: int) -> None:
    from diffeqformer.inference.lm_eval_model import generation

    for number in shots:
        set_shots(tasks, own, number)
        for name, task in tasks.items():
            try:
                task.build_all_requests(limit=1)
                for request in task.instances:
                    if request.request_type == "generate_until":
                        generation(request.args[1], window)
            except Exception as error:  # an error in a template, or too few examples to draw from
                raise UserError(
                    f"an example of {name} with {number} shots can't be made, {_reason(error)}; change its task file "
                    "or --shots"
                ) from error


def _reason(error: Exception) -> str:
    said = reason_of(error)
    return printable(said if isinstance(error, UserError) else f"{type(error).__name__}: {said}")


def set_shots(tasks: dict, own: dict[str, int | None], shots: int) -> None:
    """Put `shots` examples, drawn with a fixed seed, before every question. A task file that sets 0 keeps its 0."""
    for name, task in tasks.items():
        task.set_config(key="num_fewshot", value=0 if own[name] == 0 else shots)
        task.set_fewshot_seed(seed=SEED)


class Value(NamedTuple):
    """A result as text: per cent for the metrics in PERCENT, and with lm-eval's standard error if there is one."""

    value: float
    error: float | None
    note: str = ""

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.error is None else f" ({self.error:.2f})") + self.note


Column = dict[int, dict[str, Value]]
"""Results of one model: shots -> task -> value."""


def in_order(tasks: Iterable[str]) -> list[str]:
    """The paper's tasks in its order, then the others in theirs."""
    given = list(tasks)
    return [task for task in TASKS if task in given] + [task for task in given if task not in TASKS]


def shown_metric(results: dict) -> str:
    """The key of the metric to show among a task's results; lm-eval's keys are "acc,none", "acc_stderr,none", ..."""
    keys = [
        key for key, value in results.items() if "," in key and "_stderr," not in key and isinstance(value, int | float)
    ]
    rank = {name: place for place, name in enumerate(METRICS)}
    return min(keys, key=lambda key: rank.get(key.partition(",")[0], len(rank)))


def shown_value(results: dict, shots: int) -> Value:
    """The value of `shown_metric` with its standard error, the shots if the task fixes them, and what was cut."""
    key = shown_metric(results)
    name, _, kind = key.partition(",")
    error, scale = results.get(f"{name}_stderr,{kind}"), 100 if name in PERCENT else 1
    note = "" if results["shots"] == shots else f" [{results['shots']} shots]"
    if results["contexts_cut"]:
        note += f" [{results['contexts_cut']:,} of {results['contexts']:,} cut]"
    if results["unknown_tokens"] or results["altered_texts"]:
        note += f" [{results['unknown_tokens']:,} unknown, {results['altered_texts']:,} altered]"
    return Value(scale * results[key], scale * error if isinstance(error, int | float) else None, note)


def columns_of(runs: list[dict]) -> dict[str, Column]:
    """The columns by label, in the order of the runs."""
    columns = {}
    for run in runs:
        values = {task: shown_value(results, run["shots"]) for task, results in run["tasks"].items()}
        columns.setdefault(run["label"], {})[run["shots"]] = values
    return columns


def table(columns: dict[str, Column], rows: dict[str, dict], failed: Iterable[str] = ()) -> str:
    """Columns by their headings as a Markdown table, by the shots of the first one."""
    first = next(iter(columns.values()))
    places = [(number, heading) for number in first for heading in columns if number in columns[heading]]
    above = [("Zero-shot" if n == 0 else "Five-shot" if n == 5 else f"{n}-shot") for n, _ in places]
    above = [name if i == 0 or above[i - 1] != name else "" for i, name in enumerate(above)]
    lines = [
        ["", "", *above],
        ["---", "---:"] + ["---:"] * len(places),
        ["**Benchmark**", "**examples**", *(f"**{heading}**" for _, heading in places)],
    ]
    for task in in_order([*rows, *failed]):
        metric = shown_metric(rows[task]).partition(",")[0] if task in rows else "acc"
        name = TASKS.get(task, task) + ("" if metric == "acc" else f" [{metric}]")
        values = [str(columns[heading][number].get(task, "–")) for number, heading in places]
        lines.append([name, f"{rows[task]['examples']:,}" if task in rows else "not run", *values])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def describe(runs: list[dict], failed: dict[str, str]) -> str:
    """The table of all runs, and sentences on contexts that were cut and on tasks that weren't run."""
    text = table(columns_of(runs), runs[0]["tasks"], failed)
    every = [task for run in runs for task in run["tasks"].values()]
    if any(results["contexts_cut"] for results in every):
        text += (
            "\n[n of m cut]: n of m contexts didn't fit into the window with what follows them, and lost their start, "
            "the examples first.\n"
        )
    if any(results["altered_texts"] for results in every):
        text += (
            "\n[n unknown, m altered]: the tokenizer has n unknown ids for the task's texts, and decodes m texts to "
            "others. Perplexities per word or byte are nan where ids are unknown.\n"
        )
    return text + "".join(f"\n{TASKS.get(task, task)} wasn't run: {why}\n" for task, why in failed.items())


def summary(results: dict, name: str, model) -> dict:
    """The metrics (under lm-eval's names), examples, contexts (`HarnessModel`) and version of one row of `Tasks`."""
    values, tasks = results["results"][name], results["samples"]
    return {
        "examples": values["sample_len"],
        **{count: sum(model.counts[task][count] for task in tasks) for count in COUNTS},
        "shots": max(results["n-shot"].get(task, 0) for task in tasks),
        "version": results["versions"].get(name),
        **{key: value for key, value in values.items() if "," in key},
    }


def scores_of_documents(results: dict, row: dict) -> list[float] | None:
    """The shown metric of every document of a row, task by task, in the order of the documents; None if the row's isn't
    their mean.

    It isn't for perplexities, where a document has its log-likelihood, nor for groups in which tasks of different sizes
    count the same.
    """
    metric, _, chosen = (key := shown_metric(row)).partition(",")
    scores = [
        sample.get(metric)
        for samples in results["samples"].values()
        for sample in sorted(samples, key=lambda sample: sample["doc_id"])
        if sample["filter"] == chosen
    ]
    known = scores and all(isinstance(score, int | float) for score in scores)
    return list(map(float, scores)) if known and math.isclose(np.mean(scores), row[key], abs_tol=1e-6) else None
