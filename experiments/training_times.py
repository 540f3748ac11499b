"""Ways to train a DiffEqFormer, and what each is between its trained times, on two CPU cores.

    python experiments/training_times.py

The models are those of configs/tiny.py:diffeqformer, with 4 steps of depth (docs/ode.md). Each is trained by
diffeqformer.main with three seeds, all with the learning rate of the config, and examined by diffeqformer.ode. Models
that --results holds aren't trained again, and interrupted runs go on where they were.
"""

import itertools

from absl import app, flags
from common import define_flags, folder_of, read_curves, report, run_rows, table, train

from diffeqformer.console.results import spread

define_flags("training_times", at_once=2)

LOW, SHIFTED = "--config.model.time_frequency=10", "--config.model.training_times=shifted"
KINDS = {"published": (), "frequency 10": (LOW,), "frequency 10, shifted": (LOW, SHIFTED)}


def name_of(row: tuple[int, str]) -> str:
    """The key of a seed and a kind in the results."""
    seed, kind = row
    return f"{kind}, seed {seed}"


def examine(row: tuple[int, str], cores: list[int] | None) -> dict:
    """Train one model and examine it. Returns its bits/byte on its own grid and what the report says."""
    seed, kind = row
    workdir = folder_of(name_of(row))
    options = [
        "--config=configs/tiny.py:diffeqformer",
        *KINDS[kind],
        f"--config.seed={seed}",
        "--config.checkpoints_kept=1",
    ]
    train(workdir, options, cores)
    found = report("ode", workdir, "between", cores=cores)
    curves = read_curves(workdir)
    return {
        "kind": kind,
        "seed": seed,
        "bits_per_byte": {
            tag.removeprefix("validation/"): curve[max(curve)]
            for tag, curve in curves.items()
            if "bits_per_byte" in tag
        },
        "ratios": {kernel: row["ratio"] for kernel, row in found["smoothness"].items()},
        "perplexities": found["perplexities"],
        "num_steps": found["convergence"]["num_steps"],
        "errors": found["convergence"]["errors"],
        "orders": found["convergence"]["orders"],
    }


def cells(results: dict[str, dict]) -> list[dict[str, str]]:
    """The table, a column for each kind: means over seeds and their standard deviations."""
    by_kind = {kind: [row for row in results.values() if row["kind"] == kind] for kind in KINDS}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    first = next(iter(by_kind.values()))[0]
    lines = []

    def add(title, value, digits):
        found = {kind: [value(row) for row in rows if value(row) is not None] for kind, rows in by_kind.items()}
        lines.append({"": title} | {kind: spread(values, digits) if values else "" for kind, values in found.items()})

    for name in first["bits_per_byte"]:
        add(f"validation {name}", lambda row, name=name: row["bits_per_byte"][name], 3)
    add("least smoothness ratio of the kernels", lambda row: min(row["ratios"].values()), 2)
    add("greatest", lambda row: max(row["ratios"].values()), 2)
    for grid in first["perplexities"]:
        add(f"perplexity, {grid}", lambda row, grid=grid: row["perplexities"][grid], 2)
    for method in first["orders"]:
        add(f"observed order of {method}", lambda row, method=method: row["orders"][method], 2)
    add("distance of Euler's last state, on the trained grid", lambda row: row["errors"]["euler"][0], 2)
    return lines


def main(_) -> None:
    rows = itertools.product(range(1, 1 + flags.FLAGS.seeds), KINDS)
    print(table(cells(run_rows(rows, name_of, examine))))


if __name__ == "__main__":
    app.run(main)
