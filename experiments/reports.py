"""Means over seeds of what diffeqformer.analyze reported: spectra, induction, sharpness, sensitivity (Figures 2 and 3).

    python experiments/reports.py --report='runs/paper/figure-2-gpt-seed-?' --results=runs/paper/figure-2.json

Each pattern of folders names the reports of one kind of model. `--results` gets their values, and the table is
beside it.
"""

import glob
import json
import pathlib
import sys

import numpy as np
from absl import app, flags
from common import table

from diffeqformer.console.results import spread, write_json, write_text

REPORT = flags.DEFINE_multi_string("report", None, "A pattern of the folders of a kind's reports.", required=True)
RESULTS = flags.DEFINE_string("results", "runs/reports.json", "Where the values are written.")


def of_spectra(found: dict) -> dict[str, float | str]:
    """What the table says about the spectra of a model with T times and H heads."""
    times, values = found["times"], {}
    for name, one in found.items():
        if not isinstance(one, dict):
            continue
        radius, positive = np.array(one["radius"]), np.array(one["positive_share"])
        largest = radius.max(axis=1)
        values |= {
            f"{name}: largest spectral radius": radius.max(),
            f"{name}: found at": f"{times[largest.argmax()]:.3g}",
            f"{name}: share of positive real parts, last time": positive[-1].mean(),
            f"{name}: the same, mean over times": positive.mean(),
        }
        if len(times) > 1:
            change = np.abs(np.diff(radius, axis=0)).mean() / radius.mean()
            values[f"{name}: mean change of the radius between times, share of the mean radius"] = change
    return values


def of_sensitivity(found: dict) -> dict[str, str]:
    """The three tokens on which the prediction depends most, by each measure; the last token is left out."""
    values = {"prediction": repr(found["prediction"])}
    for measure, sizes in found["measures"].items():
        order = np.argsort(-np.nan_to_num(np.array(sizes[:-1], float), nan=-np.inf))[:3]
        values[measure] = ", ".join(f"{found['pieces'][place]!r} at {place}" for place in order)
    return values


def of_report(found: dict) -> dict[str, float | str]:
    """The values of one report, of the parts that it has."""
    values = {}
    if "spectra" in found:
        values |= of_spectra(found["spectra"])
    if "induction" in found:
        values["largest induction score"] = np.max(found["induction"]["scores"])
        values["that of uniform attention"] = found["induction"]["even"]
    if "sharpness" in found:
        for name, value in found["sharpness"]["correlation"].items():
            values[f"entropy of attention: rank correlation with the {name} of QK"] = value
    if "sensitivity" in found:
        values |= of_sensitivity(found["sensitivity"])
    return {name: value if isinstance(value, str) else float(value) for name, value in values.items()}


def cell(values: list[float | str]) -> str:
    """Mean and standard deviation of numbers; words one after the other."""
    if not values or isinstance(values[0], str):
        return "; ".join(values).replace("|", "\\|")
    return spread(values, 3)


def main(_) -> None:
    kinds = {}
    for pattern in REPORT.value:
        found = sorted(pathlib.Path(path) for path in glob.glob(f"{pattern}/results.json"))
        if not found:
            sys.exit(f"--report: {pattern} must name folders of reports, but none has a results.json")
        name = found[0].parent.name.partition("-seed")[0]
        if name in kinds:
            sys.exit(f"--report: each kind must have one pattern, but several name reports of {name}")
        kinds[name] = {path.parent.name: of_report(json.loads(path.read_text())) for path in found}
    rows = dict.fromkeys(name for reports in kinds.values() for values in reports.values() for name in values)
    text = table(
        [
            {"": row} | {k: cell([of[row] for of in reports.values() if row in of]) for k, reports in kinds.items()}
            for row in rows
        ]
    )
    path = pathlib.Path(RESULTS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, kinds)
    write_text(path.with_suffix(".md"), text)
    print(text, end="")


if __name__ == "__main__":
    app.run(main)
