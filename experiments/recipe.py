"""The search for a recipe: forms of the DiffEqFormer against a GPT and a Llama, each with its own tuned learning rate.

    python experiments/recipe.py --at_once=2     # configs/tiny.py on two CPU cores; some hours

Every form has the same budget. Rates are tried with the seed 0 on the text of python_packages.py, from the middle one
of --rates on until those beside the best are worse. The best is used with other seeds on the config's own text, which
the choice hasn't seen. Step times are measured once, in alternating rounds with the baseline's, on the CPU.

Runs that --results holds aren't run again, and interrupted ones go on where they were. A table and a picture,
<config>-recipe.md and .png in --folder, show the forms that have finished runs.
"""

import functools
import math
import pathlib
import runpy
import statistics
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from common import add_results, inspected, read_results, run_rows, train
from python_packages import write_corpus

from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import spread, write_text

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "The config to vary.")
FORMS = flags.DEFINE_string("forms", None, "The forms to run, with semicolons between them; by default all.")
RATES = flags.DEFINE_list("rates", ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"], "Learning rates, in rising order.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of what is shown.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 1500, "Steps of each run.")
FOLDER = flags.DEFINE_string("folder", "runs/recipe", "Folder of the runs, the corpus and the tables.")
RESULTS = flags.DEFINE_string("results", "experiments/recipe.json", "The runs so far; new ones are added.")
AT_ONCE = flags.DEFINE_integer("at_once", 1, "Runs side by side, each on its part of the cores (Linux).", lower_bound=1)


class Form(NamedTuple):
    """A kind of model and the fields that differ from the config's, and the baseline that it is compared with."""

    model: str
    baseline: str
    changes: dict[str, float | str | bool] = {}


MUON = {"optimizer.name": "muon"}
UNIT = {"model.solver": "lie_trotter", "model.generator_start": "unit"}
LLAMA = {"model.field": "llama"}
PLAIN = LLAMA | {"model.norm_of_norm": False}
KNOTS = MUON | {"model.time_embed_dim": 4, "model.span": 4.0}  # the layers of tiny.py's baselines, as functions of time
ELASTIC = {"model.training_depths": "2:1,4:3"}

FORM = {
    "gpt": Form("gpt", "gpt"),
    "gpt's block, published": Form("diffeqformer", "gpt"),
    "gpt's block, unit": Form("diffeqformer", "gpt", {"model.norm_of_norm": False} | UNIT),
    "gpt, muon": Form("gpt", "gpt, muon", MUON),
    "gpt's block, interpolated, muon": Form("interpolated", "gpt, muon", KNOTS),
    "llama": Form("llama", "llama"),
    "llama's block, published": Form("diffeqformer", "llama", LLAMA),
    "llama's block, unit": Form("diffeqformer", "llama", PLAIN | UNIT),
    "llama, muon": Form("llama", "llama, muon", MUON),
    "llama's block, unit, muon": Form("diffeqformer", "llama, muon", PLAIN | UNIT | MUON),
    "llama's block, interpolated, muon": Form("interpolated", "llama, muon", PLAIN | KNOTS),
    "llama's block, elastic, muon": Form("interpolated", "llama, muon", PLAIN | KNOTS | ELASTIC),
}
"""What is compared. The published form starts as tiny.py does, with B at a transformer's scale."""


class Run(NamedTuple):
    """One run of a form. Its text is that of the tuning or the config's own."""

    form: str
    rate: str
    seed: int
    tuning: bool = False

    def name(self) -> str:
        """Its key in the results, and its folder."""
        form = self.form.replace(", ", "-").replace("'s ", "s_").replace(" ", "_")
        text = "packages" if self.tuning else "own_text"
        return f"{pathlib.Path(CONFIG.value).stem}-{form}-{self.rate}-seed_{self.seed}-{STEPS.value}_steps-{text}"


def options_of(form: str) -> list[str]:
    """The options of a form."""
    of = FORM[form]
    return [
        f"--config={CONFIG.value}:{of.model}",
        *(f"--config.{field}={value}" for field, value in of.changes.items()),
    ]


def measure(corpus: list[str], run: Run, cores: list[int] | None) -> dict:
    """Train one run. Returns validation bits/byte by step, and the number of parameters."""
    options = [*options_of(run.form), f"--config.optimizer.learning_rate={run.rate}", f"--config.seed={run.seed}"]
    options += [f"--config.steps={STEPS.value}", f"--config.eval_every={max(1, STEPS.value // 5)}"]
    options += ["--config.checkpoints_kept=1", *(corpus if run.tuning else [])]
    workdir = pathlib.Path(FOLDER.value) / run.name()
    train(workdir, options, cores)
    curve = read_curves(workdir)["validation/bits_per_byte"]
    return {
        "bits_per_byte": {str(step): curve[step] for step in sorted(curve)},
        "parameters": sum(row["count"] for row in inspected(workdir)["parameters"]),
    }


def end(result: dict) -> float:
    """The bits/byte at the end of a run."""
    return list(result["bits_per_byte"].values())[-1]


def tried_rates(results: dict[str, dict], form: str) -> dict[str, float]:
    """The bits/byte at the end, by the rates that a form has tried."""
    runs = {rate: results.get(Run(form, rate, 0, tuning=True).name()) for rate in RATES.value}
    return {rate: end(result) for rate, result in runs.items() if result}


def missing_rates(results: dict[str, dict], form: str) -> list[str]:
    """The best of a form's rates so far, at first the middle one, and those beside it: those that weren't tried."""
    tried = tried_rates(results, form)
    best = RATES.value.index(min(tried, key=tried.get)) if tried else len(RATES.value) // 2
    return [rate for rate in RATES.value[max(0, best - 1) : best + 2] if rate not in tried]


def best_rate(results: dict[str, dict], form: str) -> str | None:
    """The best rate of a form; None while one beside it hasn't been tried."""
    tried = tried_rates(results, form)
    return None if missing_rates(results, form) else min(tried, key=tried.get)


class Step:
    """The compiled train step of a form, for timing."""

    def __init__(self, form: str):
        from diffeqformer.training.run import make_program

        config = runpy.run_path(CONFIG.value)["get_config"](FORM[form].model)
        config.update_from_flattened_dict(FORM[form].changes)
        self.program = make_program(config)
        self.state = self.program.init()
        shape = config.batch_size, config.sequence_length
        self.tokens = np.random.RandomState(0).randint(config.model.vocab_size, size=shape)

    def seconds(self) -> float:
        """The time of one step."""
        start = time.perf_counter()
        self.state, _ = self.program.train_step(self.state, self.tokens)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def time_ratio(form: str) -> dict:
    """The time of a form's step, divided by its baseline's: the median of 20 alternating pairs after a warm-up."""
    steps = Step(form), Step(FORM[form].baseline)
    pairs = [[step.seconds() for step in steps] for _ in range(25)][5:]
    return {"ratio": round(statistics.median(own / other for own, other in pairs), 3)}


def time_key(form: str) -> str:
    """The key of `time_ratio` in the results."""
    return f"{pathlib.Path(CONFIG.value).stem}-{form}-time"


class Comparison(NamedTuple):
    """A form against its baseline: bits/byte at the end by seed, and the differences of equal seeds.

    time: its step's, in that of the baseline's; None before it was measured.
    """

    form: str
    rate: str
    ends: list[float]
    differences: list[float]
    parameters: int
    time: float | None

    def difference(self) -> str:
        """The mean difference and its standard error."""
        if len(self.differences) < 2:
            return f"{self.differences[0]:+.3f}" if self.differences else "-"
        error = statistics.stdev(self.differences) / math.sqrt(len(self.differences))
        return f"{statistics.mean(self.differences):+.3f} ± {error:.3f}"


def comparisons(results: dict[str, dict]) -> list[Comparison]:
    """What is known so far."""

    def by_seed(form):
        runs = {seed: Run(form, best_rate(results, form), seed).name() for seed in range(1, 1 + SEEDS.value)}
        return {seed: results[name] for seed, name in runs.items() if name in results}

    found = []
    for form, of in FORM.items():
        own, theirs = by_seed(form), by_seed(of.baseline)
        if own and theirs:
            differences = [end(own[seed]) - end(theirs[seed]) for seed in own if seed in theirs]
            parameters = next(iter(own.values()))["parameters"]
            time = results.get(time_key(form), {}).get("ratio")
            ends = list(map(end, own.values()))
            found.append(Comparison(form, best_rate(results, form), ends, differences, parameters, time))
    return found


def table(found: list[Comparison]) -> str:
    """The comparisons as Markdown."""
    lines = ["| form | parameters | time | rate | bits/byte | against its baseline |", "|" + " --- |" * 6]
    for each in found:
        against = "" if FORM[each.form].baseline == each.form else each.difference()
        row = each.form, f"{each.parameters:,}", each.time or "", each.rate, spread(each.ends, 3), against
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def plot(found: list[Comparison], path: pathlib.Path) -> None:
    """Plot the differences from the baselines: a line for each comparison, a point for each seed."""
    from diffeqformer.console.figures import COLOURS, new_figure

    found = [each for each in found if FORM[each.form].baseline != each.form and each.differences][::-1]
    figure, [[panel]] = new_figure(1, 1, (8, 1 + 0.35 * len(found)))
    for row, each in enumerate(found):
        colour = COLOURS[list(FORM).index(FORM[each.form].baseline) % len(COLOURS)]
        panel.plot(each.differences, [row] * len(each.differences), "o", color=colour, alpha=0.5)
        panel.plot(statistics.mean(each.differences), row, "|", color=colour, markersize=14, markeredgewidth=3)
    panel.axvline(0, color="black", linewidth=1)
    panel.set(yticks=range(len(found)), ylabel="form", xlabel="bits/byte above the baseline (less is better)")
    panel.set_yticklabels([each.form for each in found], fontsize=8)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    logging.set_verbosity(logging.ERROR)  # Orbax logs a lot
    jax.config.update("jax_platforms", "cpu")  # the runs need the accelerator
    folder, path = pathlib.Path(FOLDER.value), pathlib.Path(RESULTS.value)
    wanted = FORMS.value.split(";") if FORMS.value else list(FORM)
    for form in wanted:
        if form not in FORM:
            sys.exit(f"--forms: must be of {'; '.join(FORM)}, but one is {form!r}")
    corpus = write_corpus(folder)

    def show(results):
        if found := comparisons(results):
            name = f"{pathlib.Path(CONFIG.value).stem}-recipe"
            write_text(folder / f"{name}.md", table(found))
            plot(found, folder / f"{name}.png")

    def finish(runs):
        return run_rows(runs, Run.name, functools.partial(measure, corpus), path, AT_ONCE.value, show)

    results = read_results(path)
    while tried := [Run(form, rate, 0, tuning=True) for form in wanted for rate in missing_rates(results, form)]:
        results = finish(tried)
    for form in wanted:
        if FORM[form].baseline != form and time_key(form) not in results:
            results = add_results(path, {time_key(form): time_ratio(form)})
    finish([Run(form, best_rate(results, form), seed) for seed in range(1, 1 + SEEDS.value) for form in wanted])
    show(read_results(path))
    print(table(comparisons(read_results(path))))


if __name__ == "__main__":
    app.run(main)
