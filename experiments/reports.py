"""Means over seeds of what diffeqformer.analyze reported: spectra, induction heads, sensitivity (Figures 2 and 3).

    python experiments/reports.py --report='runs/paper/tiny-gpt-seed_*' --report='runs/paper/tiny-diffeqformer-seed_*'

Each pattern names the reports of one kind of model, which may lack parts. `--results` gets the values of each report.
"""

import glob
import json
import pathlib

import numpy as np
from absl import app, flags

from diffeqformer.console.results import spread, write_json

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
            f"{name}: share of positive real parts, last step": positive[-1].mean(),
            f"{name}: the same, mean over steps": positive.mean(),
            f"{name}: change of a head's radius in a step, share of its mean": (
                np.abs(np.diff(radius, axis=0)).mean() / radius.mean()
            ),
        }
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
    if "sensitivity" in found:
        values |= of_sensitivity(found["sensitivity"])
    return {name: value if isinstance(value, str) else float(value) for name, value in values.items()}


def cell(values: list[float | str]) -> str:
    """Mean and standard deviation of numbers; words one after the other."""
    return "; ".join(values) if isinstance(values[0], str) else spread(values, 3)


def main(_) -> None:
    kinds = {}
    for pattern in REPORT.value:
        folders = sorted(map(pathlib.Path, glob.glob(pattern)))
        if not folders:
            raise app.UsageError(f"--report: there is no folder {pattern}")
        name = folders[0].name.partition("-seed")[0]
        kinds[name] = {folder.name: of_report(json.loads((folder / "results.json").read_text())) for folder in folders}
    write_json(pathlib.Path(RESULTS.value), kinds)
    rows = dict.fromkeys(name for reports in kinds.values() for values in reports.values() for name in values)
    print(f"| | {' | '.join(kinds)} |\n|{' --- |' * (1 + len(kinds))}")
    for row in rows:
        found = [[values[row] for values in reports.values() if row in values] for reports in kinds.values()]
        print(f"| {row} | {' | '.join(cell(values) if values else '' for values in found)} |")


if __name__ == "__main__":
    app.run(main)
