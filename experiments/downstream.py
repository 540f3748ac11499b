"""Scores of diffeqformer.downstream beside the paper's Tables 4 and 5, with paired tests, and Figures 9 to 12 as bars.

    python experiments/downstream.py --results=runs/large/downstream/2026-01-01-120000

The tables are printed, and written with the bars into that folder. Runs whose folders differ in `seed_<n>` alone are
also shown as means, and each one is compared with the first model's of its own seed.
"""

import json
import math
import pathlib
import re
import statistics

import numpy as np
from absl import app, flags
from scipy import stats

from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.console.results import write_text
from diffeqformer.inference.harness_tasks import (
    PERCENT,
    TASKS,
    Column,
    Value,
    columns_of,
    in_order,
    shown_metric,
    table,
)

RESULTS = flags.DEFINE_string("results", None, "A folder of results of diffeqformer.downstream.", required=True)
SEED = re.compile(r"(seed[-_])\d+")

# Tong et al., Neural ODE Transformers (ICLR 2025), appendix C.7: per cent, with the standard error.
# Each row has: baseline and DiffEqFormer at 0 shots, baseline and DiffEqFormer at 5 shots.
TABLE_4 = """
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
TABLE_5 = """
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


def published(text: str, baseline: str, model: str) -> dict[str, Column]:
    """The columns of a published table."""
    rows = {task: [*map(float, line.split())] for task, line in zip(TASKS, text.strip().splitlines())}
    return {
        f"{name} (published)": {
            shots: {task: Value(*row[at : at + 2]) for task, row in rows.items()} for shots, at in places
        }
        for name, places in ((baseline, ((0, 0), (5, 4))), (model, ((0, 2), (5, 6))))
    }


PUBLISHED = {
    "gpt": published(TABLE_4, "GPT-large", "DiffEqFormer-large"),
    "llama": published(TABLE_5, "Llama-1B", "DiffEqFormer-Llama-1B"),
}
"""By vector field: the columns of Table 4 and of Table 5."""


def model_of(label: str) -> str:
    """What the runs of a model that differ in the seed alone have in common."""
    return SEED.sub(r"\1*", label)


def means(runs: list[dict]) -> dict[str, Column]:
    """Means and standard deviations of the models that have several seeds."""
    groups = {}
    for label, column in columns_of(runs).items():
        groups.setdefault(model_of(label), []).append(column)
    return {f"{model}: mean": _means(columns) for model, columns in groups.items() if len(columns) > 1}


def _means(columns: list[Column]) -> Column:
    found = {}
    for shots, tasks in columns[0].items():
        of_task = {task: [column[shots][task].value for column in columns] for task in tasks}
        found[shots] = {task: Value(statistics.mean(of), statistics.stdev(of)) for task, of in of_task.items()}
    return found


def difference(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Of two models on the same documents: the mean difference, its standard error, and the two-sided p.

    If each document is right or wrong, p is that of McNemar's exact test: a sign test of the documents on which only
    one model is right. Otherwise it is that of the paired t-test. It is 1 if there is no difference at all. The paper
    calls differences "statistically significant" (sections 6.1 and C.7) and doesn't name a test.
    """
    first, second = np.array(first), np.array(second)
    differences = second - first
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if not differences.any():
        p = 1.0
    elif np.isin([first, second], (0, 1)).all():
        p = stats.binomtest(int((differences > 0).sum()), int((differences != 0).sum())).pvalue
    else:
        p = stats.ttest_rel(second, first).pvalue
    return float(differences.mean()), error, float(p)


def references(runs: list[dict]) -> dict[str, str]:
    """By the label of a run: that of the first model's run of its seed, or of the first run of all."""
    first = model_of(runs[0]["label"])
    by_seed = {run["seed"]: run["label"] for run in runs if model_of(run["label"]) == first}
    labels = {run["label"]: by_seed.get(run["seed"], runs[0]["label"]) for run in runs}
    return {label: other for label, other in labels.items() if model_of(label) != first}


def differences(runs: list[dict]) -> str:
    """A Markdown table of the differences of models from their `references`; empty if there is none."""
    others, found = references(runs), {(run["label"], run["shots"]): run for run in runs}
    places = [(label, shots) for label, shots in found if label in others]
    if not places:
        return ""
    lines = [
        ["", *(f"**{label}, less {others[label]}, {shots} shots**" for label, shots in places)],
        ["---"] + ["---:"] * len(places),
    ]
    for task in in_order(runs[0]["documents"]):
        scale = 100 if shown_metric(runs[0]["tasks"][task]).partition(",")[0] in PERCENT else 1
        cells = []
        for label, shots in places:
            value, error, p = difference(*(found[each, shots]["documents"][task] for each in (others[label], label)))
            cells.append(f"{scale * value:+.2f} ± {scale * error:.2f}, p = {p:.2g}")
        lines.append([TASKS.get(task, task), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (
        "\nDifferences on the same documents, with their standard error. p is two-sided, by McNemar's exact test or a "
        "paired t-test, and not corrected for the number of tasks.\n"
    )


def plot(columns: dict[str, Column], tasks: list[str], path: pathlib.Path) -> None:
    """Draw a panel of bars for each number of shots."""
    shots = list(next(iter(columns.values())))
    figure, axes = new_figure(len(shots), 1, (max(7, 1.3 * len(tasks) + 2), 3.5 * len(shots) + 0.2 * len(columns)))
    for number, axis in zip(shots, axes[:, 0]):
        here = [(index, label) for index, label in enumerate(columns) if number in columns[label]]
        width = 0.8 / len(here)
        for place, (index, label) in enumerate(here):
            values = columns[label][number]
            known = [(at, values[task]) for at, task in enumerate(tasks) if task in values]
            across = [at + (place - (len(here) - 1) / 2) * width for at, _ in known]
            heights, errors = [value.value for _, value in known], [value.error or 0 for _, value in known]
            axis.bar(across, heights, width, yerr=errors, label=label, color=COLOURS[index % len(COLOURS)])
        axis.set_xticks(range(len(tasks)), [TASKS.get(task, task) for task in tasks], rotation=25, ha="right")
        axis.set(title=f"{number} shots", xlabel="task", ylabel="per cent, standard errors")
        axis.grid(False, axis="x")
    labels = {}
    for axis in axes[:, 0]:
        labels |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(labels.values(), labels, loc="outside lower center", fontsize=7)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    folder = pathlib.Path(RESULTS.value)
    runs, documents = (json.loads((folder / f"{name}.json").read_text()) for name in ("results", "documents"))
    runs = [{**run, "documents": scored["documents"]} for run, scored in zip(runs["runs"], documents, strict=True)]
    rows, columns = runs[0]["tasks"], columns_of(runs)
    if set(rows) & set(TASKS):
        for field in sorted({run["field"] for run in runs}):
            columns |= PUBLISHED[field]
    text = table(columns, rows)
    if averaged := means(runs):
        text += f"\n{table(averaged, rows)}\nMeans over seeds (standard deviation).\n"
    text += f"\n{differences(runs)}"
    write_text(folder / "tables.md", text)
    print(text)
    if shown := [task for task in in_order(rows) if shown_metric(rows[task]).partition(",")[0] in PERCENT]:
        plot(columns, shown, folder / "downstream.png")


if __name__ == "__main__":
    app.run(main)
