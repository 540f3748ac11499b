"""The bars of Figures 9 to 12: downstream scores with standard errors, beside the published ones."""

import pathlib
import textwrap

from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.inference.published import (
    PERCENT,
    TASKS,
    Column,
    columns_of,
    in_order,
    published_columns,
    shown_metric,
)


def plot(runs: list[dict], path: pathlib.Path) -> None:
    """Draw a panel for each number of shots with all tasks that are scored in per cent. Without any, do nothing.

    Args:
        runs: as `diffeqformer.downstream` keeps them.
    """
    rows = runs[0]["tasks"]
    tasks = [task for task in in_order(rows) if shown_metric(rows[task]).partition(",")[0] in PERCENT]
    if not tasks:
        return
    columns = [*columns_of(runs), *(published_columns(runs) if set(tasks) & set(TASKS) else [])]
    shots = list(columns[0].values)
    width = max(7, 1.3 * len(tasks) + 2)  # inches
    figure, axes = new_figure(len(shots), 1, (width, 3.2 * len(shots)), sharex=True)
    for number, axis in zip(shots, axes[:, 0]):
        draw_bars(axis, [column for column in columns if number in column.values], number, tasks)
        axis.set(title=f"{number} shots", ylabel="per cent, standard errors")
    axes[-1, 0].set_xlabel("task")
    labels = {}
    for axis in axes[:, 0]:
        labels |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    letters = int(14 * width) - 10  # in a line of the legend
    names = [textwrap.fill(label, letters) for label in labels]
    beside = 2 if 2 * max(map(len, names)) < letters else 1
    figure.legend(labels.values(), names, loc="outside lower center", ncols=beside, fontsize=8)
    lines = sum(name.count("\n") + 1 for name in names) / beside
    figure.set_figheight(3.2 * len(shots) + 0.17 * lines)  # so that a long legend leaves the panels as they are
    figure.savefig(path, dpi=110)


def draw_bars(axis, columns: list[Column], shots: int, tasks: list[str]) -> None:
    """The bars of some models at one number of shots."""
    width = 0.8 / len(columns)
    for index, column in enumerate(columns):
        values = {task: column.values[shots][task] for task in tasks if task in column.values[shots]}
        places = [tasks.index(task) + (index - (len(columns) - 1) / 2) * width for task in values]
        axis.bar(
            places,
            [value.value for value in values.values()],
            width,
            yerr=[value.error or 0 for value in values.values()],
            label=column.heading,
            color=COLOURS[index % len(COLOURS)],
            error_kw={"elinewidth": 0.8},
        )
    axis.set_xticks(range(len(tasks)), [TASKS.get(task, task) for task in tasks], rotation=25, ha="right")
    axis.grid(alpha=0.3, axis="y")
