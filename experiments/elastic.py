"""One checkpoint for many depths against a model for each depth, on two CPU cores.

    python experiments/elastic.py

The shape, the text and the learning rate are those of configs/tiny.py. A specialist is its recipe at one depth, with a
knot for each step. The elastic model is `tiny.py:elastic`, which draws one of the depths `TRAINED` in each training
step, in as many training steps as one specialist.

A row of the results is one run of diffeqformer.main in its own folder, scored by diffeqformer.evaluate at the depths
that it can take. Rows that --results holds aren't run again, so the study can be run in pieces, and interrupted runs go
on where they were.
"""

import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags
from common import define_flags, folder_of, report, results_file, run_rows, table, train

from diffeqformer.console.results import spread

STEPS = flags.DEFINE_integer("steps", 1500, "Training steps of a specialist.", lower_bound=1)
define_flags("elastic", at_once=2)

DEPTHS = (2, 4, 8)  # of specialists
TRAINED = (2, 3, 4, 6, 8)  # depths among which tiny.py:elastic draws
SCORED = (2, 3, 4, 5, 6, 8, 12, 16)


class Row(NamedTuple):
    """One run: a specialist's depth (0: elastic), the training steps and the seed."""

    depth: int
    steps: int
    seed: int

    def name(self) -> str:
        """Its key in the results, and its folder."""
        model = f"specialist at {self.depth}" if self.depth else "elastic"
        return f"{model}, {self.steps} steps, seed {self.seed}"

    def options(self) -> list[str]:
        """What `main` is told."""
        model = ["--config=configs/tiny.py:elastic"]
        if self.depth:
            fields = ("num_steps", "time_embed_dim", "span")
            model = ["--config=configs/tiny.py", *(f"--config.model.{field}={self.depth}" for field in fields)]
        fields = {"steps": self.steps, "seed": self.seed, "eval_every": self.steps, "checkpoints_kept": 1}
        return model + [f"--config.{field}={value}" for field, value in fields.items()]


def rows() -> list[Row]:
    """All rows, seed by seed."""
    seeds = range(1, 1 + flags.FLAGS.seeds)
    return [Row(depth, STEPS.value, seed) for seed in seeds for depth in (0, *DEPTHS)]


def run(row: Row, cores: list[int] | None) -> dict:
    """Train and score one row on some cores. Returns the row, with bits/byte by depth."""
    workdir = folder_of(row.name())
    train(workdir, row.options(), cores)
    scored = (row.depth,) if row.depth else SCORED
    options = f"--num_steps={','.join(map(str, scored))}", "--stride=128"
    found = report("evaluate", workdir, "scores", options, cores)["rows"]
    return {**row._asdict(), "bits_per_byte": {str(each["num_steps"]): each["bits_per_byte"] for each in found}}


def lines(results: dict[str, dict]) -> dict[str, dict[int, list[float]]]:
    """The bits/byte of every seed by depth, for each line of the table and the picture."""
    found = {}
    for row in (row for row in rows() if row.name() in results):
        label = "a specialist for each" if row.depth else "elastic, trained in " + ", ".join(map(str, TRAINED))
        for depth, value in results[row.name()]["bits_per_byte"].items():
            found.setdefault(label, {}).setdefault(int(depth), []).append(value)
    return found


def cells(label: str, points: dict[int, list[float]]) -> dict[str, str]:
    """A row of the table: bits/byte by depth, means over seeds and their standard deviations."""
    return {"model": label} | {str(depth): spread(points[depth], 3) if depth in points else "" for depth in SCORED}


def plot(found: dict[str, dict[int, list[float]]], path: pathlib.Path) -> None:
    """Plot bits/byte against depth: means, standard deviations."""
    from diffeqformer.console.figures import COLOURS, new_figure

    figure, [[panel]] = new_figure(1, 1, (7, 4.5))
    for colour, (label, points) in zip(COLOURS, found.items()):
        depths = sorted(points)
        means = [statistics.mean(points[depth]) for depth in depths]
        errors = [statistics.stdev(points[depth]) if len(points[depth]) > 1 else 0.0 for depth in depths]
        panel.errorbar(depths, means, errors, label=label, capsize=2, color=colour, marker="o", markersize=4)
    panel.set(xlabel="steps of depth", ylabel="validation bits/byte", xscale="log", xticks=SCORED)
    panel.set_xticklabels(SCORED)
    panel.minorticks_off()
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    def show(results):
        plot(lines(results), results_file().with_suffix(".png"))

    results = run_rows(rows(), Row.name, run, show)
    show(results)
    print(table([cells(*line) for line in lines(results).items()]))


if __name__ == "__main__":
    app.run(main)
