"""Forms of a model, each trained at its own best learning rate: what ablations.py and recipe.py share.

Rates are tried with the seed 0, from the middle one of --rates on until those beside the best are worse. The best is
used with --seeds others, which are those shown. Each run is a run of diffeqformer.main in its own folder. Runs that
--results holds aren't run again, and interrupted ones go on where they were. After each run, a table and a picture,
<config>-<study>.md and .png in --folder, show the forms that have finished runs.
"""

import math
import os
import pathlib
import runpy
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from absl import flags
from common import curve, folder_of, number_of_parameters, read_results, results_file, run_rows, table, train

from diffeqformer.console.results import spread, write_text

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "The config to vary.")
RATES = flags.DEFINE_list("rates", ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"], "Learning rates, in rising order.")
STEPS = flags.DEFINE_integer("steps", 1500, "Steps of each run.", lower_bound=1)
OWN_TEXT = {"own_text": []}  # the config's
flags.register_validator("config", os.path.isfile, "must be a config file")


@flags.validator("rates", "must be numbers in rising order")
def rise(rates: list[str]) -> bool:
    """Whether rates are numbers in rising order."""
    try:
        return sorted(rates, key=float) == rates
    except ValueError:
        return False


class Form(NamedTuple):
    """A kind of model, the form that it is compared with, if any, and the fields that differ from the config's."""

    model: str
    baseline: str = ""
    changes: dict[str, float | str | bool] = {}

    def config(self):
        """The config of the form."""
        config = runpy.run_path(CONFIG.value)["get_config"](self.model)
        config.update_from_flattened_dict(self.changes)
        return config


class Run(NamedTuple):
    """One run of a form, and the name of its text."""

    form: str
    rate: str
    seed: int
    text: str

    def name(self) -> str:
        """Its key in the results, and its folder."""
        name = f"{config_name()}-{self.form}-{self.rate}-seed_{self.seed}-{STEPS.value}_steps-{self.text}"
        return folder_of(name).name


class Comparison(NamedTuple):
    """What is known of a form: the curve of each seed, and the differences of its ends from its baseline's."""

    name: str
    form: Form
    rate: str
    parameters: int
    curves: list[dict[str, float]]
    differences: list[float]

    def ends(self) -> list[float]:
        """The last value of each curve."""
        return list(map(end, self.curves))

    def row(self, metric: str) -> dict[str, str]:
        """Its row of the table. The difference has its standard error."""
        against = f"{statistics.mean(self.differences):+.3f}" if self.differences else ""
        if len(self.differences) > 1:
            against += f" ± {statistics.stdev(self.differences) / math.sqrt(len(self.differences)):.3f}"
        return {
            "form": self.name,
            "parameters": f"{self.parameters:,}",
            "rate": self.rate,
            f"best {metric}": spread([min(curve.values()) for curve in self.curves], 3),
            "at step": ", ".join(f"{int(min(curve, key=curve.get)):,}" for curve in self.curves),
            "at the end": spread(self.ends(), 3),
            "against its baseline": against,
        }


def config_name() -> str:
    """The name of the config."""
    return pathlib.Path(CONFIG.value).stem


def time_key(form: str) -> str:
    """The key in the results of the times of a form's step and token, as parts of its baseline's."""
    return f"{config_name()}-{form}-time"


def end(curve: dict[str, float]) -> float:
    """The last value of a curve."""
    return list(curve.values())[-1]


class Study(NamedTuple):
    """Forms by name, and how they are compared.

    metric: a scalar of the validation, of which less is better.
    draw: (comparisons, path) -> None; draws the picture.
    texts: the options of a run by text: of the first one rates are found, and on the last one the runs shown are.
    """

    name: str
    forms: dict[str, Form]
    metric: str
    draw: Callable[[list[Comparison], pathlib.Path], None]
    texts: dict[str, list[str]] = OWN_TEXT

    def tried_rates(self, results: dict[str, dict], form: str) -> dict[str, float]:
        """The best value at each rate that a form has tried."""
        runs = {rate: results.get(Run(form, rate, 0, list(self.texts)[0]).name()) for rate in RATES.value}
        return {rate: min(run[self.metric].values()) for rate, run in runs.items() if run}

    def missing_rates(self, results: dict[str, dict], form: str) -> list[str]:
        """The best of a form's rates so far, at first the middle one, and those beside it: those that weren't tried."""
        tried = self.tried_rates(results, form)
        best = RATES.value.index(min(tried, key=tried.get)) if tried else len(RATES.value) // 2
        return [rate for rate in RATES.value[max(0, best - 1) : best + 2] if rate not in tried]

    def shown_runs(self, results: dict[str, dict], form: str) -> list[Run]:
        """The runs of a form at its best rate, by seed; none while one beside that hasn't been tried."""
        tried = self.tried_rates(results, form)
        seeds = () if self.missing_rates(results, form) else range(1, 1 + flags.FLAGS.seeds)
        return [Run(form, min(tried, key=tried.get), seed, list(self.texts)[-1]) for seed in seeds]

    def comparisons(self, results: dict[str, dict]) -> list[Comparison]:
        """What is known so far."""
        known = {
            form: {run: results[run.name()] for run in self.shown_runs(results, form) if run.name() in results}
            for form in self.forms
        }
        found = []
        for name, runs in ((name, runs) for name, runs in known.items() if runs):
            form, curves = self.forms[name], [result[self.metric] for result in runs.values()]
            theirs = {run.seed: end(result[self.metric]) for run, result in known.get(form.baseline, {}).items()}
            differences = [end(curve) - theirs[run.seed] for run, curve in zip(runs, curves) if run.seed in theirs]
            first = next(iter(runs))
            found.append(Comparison(name, form, first.rate, runs[first]["parameters"], curves, differences))
        return found

    def table(self, results: dict[str, dict]) -> str:
        """The comparisons as Markdown, with times of steps if there are any."""
        rows = {each.name: each.row(self.metric) for each in self.comparisons(results)}
        times = {form: results.get(time_key(form), {}) for form in self.forms}
        if any(times.values()):
            rows = {
                name: row | {f"time of a {what}": str(times[name].get(what, "")) for what in ("step", "token")}
                for name, row in rows.items()
            }
        return table(list(rows.values()))

    def show(self, results: dict[str, dict]) -> None:
        """Write the table and the picture."""
        if found := self.comparisons(results):
            path = pathlib.Path(flags.FLAGS.folder) / f"{config_name()}-{self.name}.md"
            write_text(path, self.table(results))
            self.draw(found, path.with_suffix(".png"))

    def measure(self, run: Run, cores: list[int] | None) -> dict:
        """Train one run. Returns the metric by step, and the number of parameters."""
        form, workdir = self.forms[run.form], folder_of(run.name())
        fields = form.changes | {"optimizer.learning_rate": run.rate, "seed": run.seed, "steps": STEPS.value}
        fields |= {"eval_every": max(1, STEPS.value // 10), "checkpoints_kept": 1}
        options = [f"--config={CONFIG.value}:{form.model}", *(f"--config.{name}={of}" for name, of in fields.items())]
        train(workdir, options + self.texts[run.text], cores)
        values = curve(workdir, f"validation/{self.metric}")
        return {self.metric: values, "parameters": number_of_parameters(workdir)}

    def run(self, forms: Iterable[str]) -> None:
        """Run what --results lacks of some forms, and show all."""
        pathlib.Path(flags.FLAGS.folder).mkdir(parents=True, exist_ok=True)
        results = read_results(results_file())
        while tried := [
            Run(form, rate, 0, list(self.texts)[0]) for form in forms for rate in self.missing_rates(results, form)
        ]:
            results = run_rows(tried, Run.name, self.measure, self.show)
        shown = [run for form in forms for run in self.shown_runs(results, form)]
        results = run_rows(sorted(shown, key=lambda run: run.seed), Run.name, self.measure, self.show)
        self.show(results)
        print(self.table(results))
