"""Ways to train a DiffEqFormer, and what each is between its trained times, on two CPU cores.

    python experiments/training_times.py --depths=one     # three ways at 4 steps of depth (docs/ode.md)
    python experiments/training_times.py --depths=many    # seven ways at 2, 3, 4, 6 and 8 steps (docs/elastic.md)

The models are those of configs/tiny.py. Each is trained by diffeqformer.main with three seeds, all with the learning
rate of the config, and examined by diffeqformer.ode. Models that --results holds aren't trained again, and interrupted
runs go on where they were.
"""

import itertools
import json
import pathlib
import shutil
import subprocess
import sys

from absl import app, flags
from common import on_cores, run_rows, train

from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import spread

DEPTHS = flags.DEFINE_enum("depths", "one", ["one", "many"], "Models of one number of steps, or of several.")
FOLDER = flags.DEFINE_string("folder", "runs/training_times", "Folder of the runs.")
RESULTS = flags.DEFINE_string("results", "experiments/training_times.json", "The runs so far; new ones are added.")
AT_ONCE = flags.DEFINE_integer("at_once", 2, "Runs side by side, each on its part of the cores (Linux).", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each model.", lower_bound=1)

LOW, PUBLISHED = (f"--config.model.time_frequency={frequency}" for frequency in (10, 1000))
FIXED, SHIFTED = (f"--config.model.training_times={times}" for times in ("fixed", "shifted"))
EULER = "--config.model.solver=euler"
ONE, MANY = "--config=configs/tiny.py:diffeqformer", "--config=configs/tiny.py:elastic"
KINDS = {
    "one": {
        "published": (ONE,),
        "frequency 10": (ONE, LOW),
        "frequency 10, shifted": (ONE, LOW, SHIFTED),
    },
    "many": {
        "drawn, published frequency": (MANY, EULER, FIXED, PUBLISHED),
        "drawn, frequency 10": (MANY, EULER, FIXED),
        "drawn and shifted, published frequency": (MANY, EULER, SHIFTED, PUBLISHED),
        "drawn and shifted, frequency 10": (MANY, EULER, SHIFTED),
        "Lie-Trotter, fixed": (MANY, FIXED),
        "Lie-Trotter, shifted": (MANY, SHIFTED),
        "Lie-Trotter, mixed": (MANY,),
    },
}


def name_of(row: tuple[int, str]) -> str:
    """The key of a seed and a kind in the results."""
    seed, kind = row
    return f"{kind}, seed {seed}"


def examine(row: tuple[int, str], cores: list[int] | None) -> dict:
    """Train one model and examine it. Returns its bits/byte on its own grid and what the report says."""
    seed, kind = row
    workdir = pathlib.Path(FOLDER.value) / name_of(row).replace(", ", "-").replace(" ", "_")
    options = [*KINDS[DEPTHS.value][kind], f"--config.seed={seed}", "--config.checkpoints_kept=1"]
    train(workdir, options, cores)
    output = workdir / "between"
    shutil.rmtree(output, ignore_errors=True)  # of an interrupted report
    command = [sys.executable, "-m", "diffeqformer.ode", f"--workdir={workdir}", f"--output={output}"]
    done = subprocess.run(on_cores(command, cores), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name_of(row)} wasn't examined: {done.stderr.strip()}")
    report = json.loads((output / "results.json").read_text())
    curves = read_curves(workdir)
    return {
        "kind": kind,
        "seed": seed,
        "bits_per_byte": {
            tag.removeprefix("validation/"): curve[max(curve)]
            for tag, curve in curves.items()
            if "bits_per_byte" in tag
        },
        "ratios": {kernel: row["ratio"] for kernel, row in report["smoothness"].items()},
        "perplexities": report["perplexities"],
        "num_steps": report["convergence"]["num_steps"],
        "errors": report["convergence"]["errors"],
        "orders": report["convergence"]["orders"],
    }


def table(results: dict[str, dict]) -> str:
    """The findings by kind, as Markdown: means over seeds and their standard deviations."""
    by_kind = {kind: [row for row in results.values() if row["kind"] == kind] for kind in KINDS[DEPTHS.value]}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    first = next(iter(by_kind.values()))[0]
    lines = ["| | " + " | ".join(by_kind) + " |", "|" + " --- |" * (1 + len(by_kind))]

    def add(title, value, digits):
        found = [[value(row) for row in rows if value(row) is not None] for rows in by_kind.values()]
        cells = [spread(values, digits) if values else "" for values in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")

    for name in first["bits_per_byte"]:
        add(f"validation {name}", lambda row, name=name: row["bits_per_byte"][name], 3)
    add("least smoothness ratio of the kernels", lambda row: min(row["ratios"].values()), 2)
    add("greatest", lambda row: max(row["ratios"].values()), 2)
    for grid in first["perplexities"]:
        add(f"perplexity, {grid}", lambda row, grid=grid: row["perplexities"][grid], 2)
    for method in first["orders"]:
        add(f"observed order of {method}", lambda row, method=method: row["orders"][method], 2)
    add("distance of Euler's last state, on the trained grid", lambda row: row["errors"]["euler"][0], 2)
    return "\n".join(lines) + "\n"


def main(_) -> None:
    rows = itertools.product(range(1, 1 + SEEDS.value), KINDS[DEPTHS.value])
    print(table(run_rows(rows, name_of, examine, pathlib.Path(RESULTS.value), AT_ONCE.value)))


if __name__ == "__main__":
    app.run(main)
