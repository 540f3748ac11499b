"""Uneven grids that a tolerance chooses for Heun's method, against even ones, on runs of several seeds.

    python -c "import argparse; print(open(argparse.__file__).read(4000))" > calibration.txt
    python experiments/tolerances.py --calibration_files=calibration.txt \
        --workdir='runs/training_times/drawn_and_shifted-frequency_10-seed_*' -- --stride=128

Every run is scored by diffeqformer.evaluate on its validation text: with Heun's method on the grid of each tolerance;
with Heun's method in as many even steps; and with the solver of the training in as many even steps, and in twice as
many, which evaluate the field as often as Heun's method. Runs that --results holds with the same tolerances and options
aren't scored again; give another calibration text another file. What follows -- is told to `evaluate`. The runs are
those of `experiments/training_times.py --depths=many --results=runs/training_times.json`.
"""

import functools
import glob
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags
from common import on_cores, run_rows

from diffeqformer.console.results import spread

WORKDIR = flags.DEFINE_multi_string("workdir", None, "Runs of one config with several seeds; patterns.", required=True)
TOLERANCE = flags.DEFINE_list("tolerance", ["2", "0.5", "0.25", "0.13"], "Tolerances, as `evaluate` takes them.")
CALIBRATION = flags.DEFINE_string("calibration_files", None, "The text on which grids are chosen.", required=True)
RESULTS = flags.DEFINE_string("results", "experiments/tolerances.json", "The runs so far; new ones are added.")
AT_ONCE = flags.DEFINE_integer("at_once", 2, "Runs side by side, each on its part of the cores (Linux).", lower_bound=1)

GRIDS = ("Heun, uneven", "Heun, even", "as trained, even", "as trained, even, twice as many")


def evaluate(workdir: str, options: list[str], cores: list[int] | None) -> list[dict]:
    """The rows of `evaluate`: solver, num_steps, bits_per_byte and, of an uneven grid, its tolerance."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "diffeqformer.evaluate", f"--workdir={workdir}", f"--output={output}"]
        command += ["--perplexity=full", *options]
        done = subprocess.run(on_cores(command, cores), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{workdir} wasn't scored: {done.stderr.strip()}")
        return json.loads((pathlib.Path(output) / "results.json").read_text())["rows"]


def score(options: list[str], workdir: str, cores: list[int] | None) -> dict:
    """Bits/byte on each grid of `GRIDS`, and the number of its steps, by tolerance.

    Args:
        options: of `evaluate`, for all grids.
    """
    by_tolerance = [f"--tolerance={','.join(TOLERANCE.value)}", f"--calibration_files={CALIBRATION.value}"]
    trained, *uneven = evaluate(workdir, [*by_tolerance, *options], cores)
    numbers = sorted({times * row["num_steps"] for row in uneven for times in (1, 2)})
    on_even = [f"--num_steps={','.join(map(str, numbers))}", f"--solver={trained['solver']},heun", *options]
    even = {(row["solver"], row["num_steps"]): row["bits_per_byte"] for row in evaluate(workdir, on_even, cores)}
    found = {}
    for row in uneven:
        steps, solver = row["num_steps"], trained["solver"]
        scores = row["bits_per_byte"], even["heun", steps], even[solver, steps], even[solver, 2 * steps]
        found[f"{row['tolerance']:g}"] = {"num_steps": steps, "bits_per_byte": dict(zip(GRIDS, scores, strict=True))}
    return {"solver": trained["solver"], "tolerances": found}


def table(results: list[dict]) -> str:
    """Bits/byte by tolerance, as Markdown: means over runs and their standard deviations, and paired differences."""
    lines = [f"| tolerance | steps | {' | '.join(GRIDS)} | uneven less even, Heun |", "|" + " --- |" * (3 + len(GRIDS))]
    for tolerance in results[0]["tolerances"]:
        rows = [result["tolerances"][tolerance] for result in results]
        scores = [[row["bits_per_byte"][grid] for row in rows] for grid in GRIDS]
        gains = [uneven - even for uneven, even in zip(*scores[:2])]
        steps = ", ".join(str(row["num_steps"]) for row in rows)
        lines.append(f"| {tolerance} | {steps} | {' | '.join(spread(values, 3) for values in [*scores, gains])} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    found = {os.path.normpath(path) for pattern in WORKDIR.value for path in glob.glob(pattern)}
    runs = sorted(path for path in found if os.path.isdir(path))
    if not runs:
        sys.exit(f"--workdir: there is no folder {', '.join(WORKDIR.value)}")
    options = arguments[1:]

    def name(run):
        return ", ".join([run, "tolerances " + ", ".join(TOLERANCE.value), *options])

    work = functools.partial(score, options)
    results = run_rows(runs, name, work, pathlib.Path(RESULTS.value), AT_ONCE.value)
    print(table([results[name(run)] for run in runs]))


if __name__ == "__main__":
    app.run(main)
