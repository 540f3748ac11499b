"""The eleven tasks of the paper's Tables 4 and 5, the figures published there, and tables in their layout."""

from collections.abc import Iterable
from typing import NamedTuple

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
"""Name of a task in lm-evaluation-harness -> its name in the paper, in the paper's order."""

METRICS = ("acc", "exact_match", "f1", "bits_per_byte", "word_perplexity", "perplexity")
"""The first of these that a task reports is shown. The paper doesn't name its metric; we infer `acc` from its values.
On ARC-Challenge and LogiQA they are below chance, 25, as `acc` usually is for such models. The length-normalised
`acc_norm` isn't."""
PERCENT = ("acc", "exact_match", "f1")

# Tong et al., Neural ODE Transformers (ICLR 2025), appendix C.7: per cent, with the standard error.
# Each row has: baseline and DiffEqFormer at 0 shots, baseline and DiffEqFormer at 5 shots.
_TABLE_4 = """
20.65 1.18  20.90 1.19  21.84 1.21  21.25 1.20
36.03 0.99  35.82 0.98  37.12 0.99  36.32 0.99
25.53 0.44  25.61 0.44  25.40 0.43  25.52 0.44
37.24 0.67  38.39 0.68  27.79 0.62  27.83 0.62
29.30 0.63  30.37 0.64  23.05 0.59  24.82 0.60
21.35 1.61  21.35 1.61  20.74 1.59  21.81 1.62
22.95 0.35  22.99 0.35  26.08 0.37  25.10 0.36
56.26 1.16  56.96 1.16  55.82 1.16  56.69 1.16
45.70 1.58  47.20 1.58  50.30 1.58  50.90 1.58
50.75 1.41  52.57 1.40  49.33 1.41  53.67 1.40
55.31 3.01  53.11 3.03  50.92 3.03  53.11 3.03
"""
_TABLE_5 = """
22.27 1.22  22.27 1.22  21.76 1.21  22.44 1.22
29.67 0.94  31.10 0.95  30.01 0.94  31.44 0.95
25.20 0.43  25.32 0.43  25.19 0.43  25.36 0.43
41.84 0.69  43.74 0.69  30.47 0.64  34.41 0.66
27.58 0.62  31.55 0.65  24.04 0.60  28.22 0.63
21.51 1.61  22.27 1.63  21.04 1.60  21.20 1.60
22.93 0.35  22.98 0.35  26.43 0.37  24.72 0.36
53.26 1.16  53.81 1.16  53.65 1.16  53.10 1.16
31.70 1.47  33.20 1.49  34.20 1.50  34.80 1.51
50.51 1.41  49.64 1.41  51.38 1.40  49.33 1.41
53.11 3.03  52.38 3.03  52.01 3.03  50.92 3.03
"""


class Value(NamedTuple):
    """A result as text: per cent for the metrics in PERCENT, and with lm-eval's standard error if there is one."""

    value: float
    error: float | None
    note: str = ""

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.error is None else f" ({self.error:.2f})") + self.note


class Column(NamedTuple):
    """Results of one model: shots -> task -> value."""

    heading: str
    values: dict[int, dict[str, Value]]


def _published(table: str, baseline: str, model: str) -> list[Column]:
    rows = {task: [float(n) for n in line.split()] for task, line in zip(TASKS, table.strip().splitlines())}
    return [
        Column(heading, {shots: {task: Value(*row[at : at + 2]) for task, row in rows.items()} for shots, at in places})
        for heading, places in (
            (f"{baseline} (published)", ((0, 0), (5, 4))),
            (f"{model} (published)", ((0, 2), (5, 6))),
        )
    ]


PUBLISHED = {
    "gpt": _published(_TABLE_4, "GPT-large", "DiffEqFormer-large"),
    "llama": _published(_TABLE_5, "Llama-1B", "DiffEqFormer-Llama-1B"),
}
"""Vector field -> the columns of the table that has models of this field: Table 4 (gpt) and Table 5 (llama)."""


def in_order(tasks: Iterable[str]) -> list[str]:
    """The paper's tasks in its order, then the others in theirs."""
    given = list(tasks)
    return [task for task in TASKS if task in given] + [task for task in given if task not in TASKS]


def shown_metric(results: dict) -> str:
    """The key of the metric to show among a task's results; lm-eval's keys are "acc,none", "acc_stderr,none", ..."""
    keys = [key for key, value in results.items() if "," in key and "_stderr," not in key and is_number(value)]
    rank = {name: place for place, name in enumerate(METRICS)}
    return min(keys, key=lambda key: rank.get(key.partition(",")[0], len(rank)))


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown_value(results: dict, shots: int) -> Value:
    """The value of `shown_metric` with its standard error, the shots if the task fixes them, and what was cut."""
    key = shown_metric(results)
    name, _, kind = key.partition(",")
    error = results.get(f"{name}_stderr,{kind}")
    scale = 100 if name in PERCENT else 1
    note = "" if results["shots"] == shots else f" [{results['shots']} shots]"
    if results["contexts_cut"]:
        note += f" [{results['contexts_cut']:,} of {results['contexts']:,} cut]"
    if results.get("unknown_tokens") or results.get("altered_texts"):
        note += f" [{results['unknown_tokens']:,} unknown, {results['altered_texts']:,} altered]"
    return Value(scale * results[key], scale * error if is_number(error) else None, note)


def describe(runs: list[dict], failed: dict[str, str]) -> str:
    """The table of all runs, and sentences on contexts that were cut and on tasks that weren't run.

    Args:
        runs: as `diffeqformer.downstream` keeps them; label, field, shots and tasks are used.
        failed: tasks that have no results, and why (`diffeqformer.inference.tasks.Tasks`).
    """
    rows = runs[0]["tasks"]
    metrics = {task: shown_metric(results).partition(",")[0] for task, results in rows.items()}
    examples = {task: results["examples"] for task, results in rows.items()}
    text = table(columns_of(runs), published_columns(runs), metrics, examples, failed)
    if any(results["contexts_cut"] for run in runs for results in run["tasks"].values()):
        text += (
            "\n[n of m cut]: n of m contexts didn't fit into the window with what follows them, and lost their start, "
            "the examples first.\n"
        )
    if any(results.get("altered_texts") for run in runs for results in run["tasks"].values()):
        text += (
            "\n[n unknown, m altered]: the tokenizer has n unknown ids for the task's texts, and decodes m texts to "
            "others. Perplexities per word or byte are nan where ids are unknown.\n"
        )
    return text + "".join(f"\n{TASKS.get(task, task)} wasn't run: {why}\n" for task, why in failed.items())


def columns_of(runs: list[dict]) -> list[Column]:
    """Our columns, in the order of the runs."""
    columns = {}
    for run in runs:
        column = columns.setdefault(run["label"], Column(run["label"], {}))
        column.values[run["shots"]] = {
            task: shown_value(results, run["shots"]) for task, results in run["tasks"].items()
        }
    return list(columns.values())


def published_columns(runs: list[dict]) -> list[Column]:
    """The published columns of models with the same vector fields."""
    return [column for field in sorted({run["field"] for run in runs}) for column in PUBLISHED[field]]


def table(
    columns: list[Column],
    published: list[Column],
    metrics: dict[str, str],
    examples: dict[str, int],
    failed: Iterable[str] = (),
) -> str:
    """Our columns beside the published ones, as a Markdown table in the layout of Tables 4 and 5.

    Args:
        columns: ours; all with the same shots and tasks.
        published: those to add if the paper has one of the tasks.
        metrics: task -> name of the metric shown, in the order of the rows; the paper's tasks come first.
        examples: task -> number of examples.
        failed: further tasks, whose rows say that they weren't run.
    """
    shots = list(columns[0].values)
    places = [  # (shots, column), one for each column of values
        (number, column)
        for number in shots
        for column in columns + (published if set(metrics) & set(TASKS) else [])
        if number in column.values
    ]
    above = [("Zero-shot" if n == 0 else "Five-shot" if n == 5 else f"{n}-shot") for n, _ in places]
    above = [name if i == 0 or above[i - 1] != name else "" for i, name in enumerate(above)]
    lines = [
        ["", "", *above],
        ["---", "---:"] + ["---:"] * len(places),
        ["**Benchmark**", "**examples**", *(f"**{column.heading}**" for _, column in places)],
    ]
    for task in in_order([*metrics, *failed]):
        metric = metrics.get(task, "acc")
        name = TASKS.get(task, task) + ("" if metric == "acc" else f" [{metric}]")
        values = [str(column.values[number].get(task, "–")) for number, column in places]
        lines.append([name, f"{examples[task]:,}" if task in examples else "not run", *values])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
