"""The paper's comparisons of models for one config; by default configs/tiny.py, on two CPU cores.

    python experiments/ablations.py --study=perplexity # DiffEqFormer, GPT and shared weights (Tables 1 and 2)
    python experiments/ablations.py --study=llama      # the same with the block of a Llama (Table 2, Figure 8)
    python experiments/ablations.py --study=embedding  # d_emb: perplexity (Figure 14)
    python experiments/ablations.py --study=design     # one MLP of t for all weights, or one for each (Figure 18)
    python experiments/ablations.py --study=beta2      # Adam's second beta, for DiffEqFormer and GPT (Figure 7)
    python experiments/ablations.py --study=shared     # two forms of the baseline with shared weights
    python experiments/ablations.py --study=overfitting --wikitext=wiki.valid.tokens  # a short text repeated (Figure 4)

Every model has the same budget: each of --rates with the seed 0, then the best of them with --seeds others, which are
those that the tables and pictures show. Other configs need their own: --config=configs/medium.py --widths=12,48,144
--rates=2e-4,4e-4 --results=medium.json. Each run is a run of diffeqformer.main in its own folder; studies share runs.
Runs that --results holds aren't run again, and interrupted ones go on where they were. After each run, the files
<config>-<study>.md and .png in --folder show the models that have finished runs.
"""

import functools
import itertools
import pathlib
import runpy
import statistics
import sys
from typing import NamedTuple

from absl import app, flags, logging
from common import articles_of_wikitext, inspected, perplexities, run_rows, train
from published import LLAMAS, draw_published

from diffeqformer.config import get_field
from diffeqformer.console.results import spread, write_text

STUDIES = ["perplexity", "llama", "embedding", "design", "beta2", "shared", "overfitting"]
STUDY = flags.DEFINE_enum("study", None, STUDIES, "Which.", required=True)
CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "The config to vary.")
WIDTHS = flags.DEFINE_list(
    "widths", ["4", "12", "24", "48", "96"], "E, the paper's d_emb, in the study of the embedding."
)
RATES = flags.DEFINE_list(
    "rates", ["1e-3", "2e-3", "4e-3", "8e-3"], "Learning rates, of which each model gets its best."
)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of what is shown.", lower_bound=1)
FOLDER = flags.DEFINE_string("folder", "runs/ablations", "Folder of the runs and their results.")
RESULTS = flags.DEFINE_string("results", "experiments/ablations.json", "The runs so far; new ones are added.")
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103, for the study of overfitting.")
STEPS = flags.DEFINE_integer("steps", 1500, "Steps of each run.")
AT_ONCE = flags.DEFINE_integer("at_once", 1, "Runs side by side, each on its part of the cores (Linux).", lower_bound=1)
ARTICLES = 2  # of WikiText, which are read repeatedly


@functools.cache
def config_of(model: str):
    """The config with a model of the given kind."""
    return runpy.run_path(CONFIG.value)["get_config"](model)


class Variant(NamedTuple):
    """What a study compares: a kind of model, the changed fields, and whether it reads the short text."""

    model: str = "diffeqformer"
    changes: tuple[tuple[str, float | str | bool], ...] = ()
    short_text: bool = False


class Run(NamedTuple):
    """One run of a variant."""

    variant: Variant
    rate: float
    seed: int

    def differences(self) -> list[str]:
        """The fields that differ from the config, so that studies share identical runs."""
        config = config_of(self.variant.model)
        changes = [each for each in self.variant.changes if each[1] != get_field(config, each[0])]
        own = ("optimizer.learning_rate", self.rate), ("seed", self.seed)  # always named: a default may change
        return [f"{field}={value}" for field, value in (*changes, *own)]

    def name(self) -> str:
        """Its key in the results, and its folder."""
        text = [f"{ARTICLES}_articles"] * self.variant.short_text
        parts = [pathlib.Path(CONFIG.value).stem, self.variant.model, *self.differences(), *text]
        return "-".join([*parts, f"{STEPS.value}_steps"]).replace("=", "-")


def variants() -> dict[str, Variant]:
    """What the study compares, by name."""
    ours = Variant()
    if STUDY.value == "embedding":
        widths = {f"diffeqformer, E {width}": (("model.time_embed_dim", int(width)),) for width in WIDTHS.value}
        return {name: Variant(changes=width) for name, width in widths.items()} | {"gpt": Variant("gpt")}
    if STUDY.value == "design":
        return {"diffeqformer": ours, "alternative": Variant("alternative")}
    if STUDY.value == "llama":
        return {"diffeqformer, llama": Variant(changes=(("model.field", "llama"),)), "llama": Variant("llama")}
    if STUDY.value == "shared":
        vanilla = (("model.span", 0.0), ("model.solver", "lie_trotter"))
        return {"shared, steps of 1/L": Variant("shared"), "shared, a GPT's steps": Variant("shared", vanilla)}
    if STUDY.value == "beta2":
        return {
            f"{model}, beta2 {beta2:g}": Variant(model, (("optimizer.beta2", beta2),))
            for model, beta2 in itertools.product(("diffeqformer", "gpt"), (0.95, 0.999))
        }
    short = STUDY.value == "overfitting"
    return {model: Variant(model, short_text=short) for model in ("diffeqformer", "gpt", "shared")}


def measure(texts: list[str], run: Run, cores: list[int] | None) -> dict:
    """Train one run.

    Returns:
        validation perplexities by step, and parameters.
    """
    options = [f"--config={CONFIG.value}:{run.variant.model}", *(f"--config.{each}" for each in run.differences())]
    options += texts if run.variant.short_text else []
    options += [f"--config.steps={STEPS.value}", f"--config.eval_every={max(1, STEPS.value // 10)}"]
    options += [f"--config.log_every={max(1, STEPS.value // 30)}", "--config.checkpoints_kept=1"]
    workdir = pathlib.Path(FOLDER.value) / run.name()
    train(workdir, options, cores)
    return {
        "perplexities": {str(step): value for step, value in perplexities(workdir).items()},  # as JSON has it
        "parameters": sum(row["count"] for row in inspected(workdir)["parameters"]),
    }


class Found(NamedTuple):
    """What is known of a variant.

    rate: the best one; runs: one result for each seed, as of `measure`.
    """

    rate: float
    runs: list[dict]

    def ends(self) -> list[float]:
        """The last perplexity of each run."""
        return [list(run["perplexities"].values())[-1] for run in self.runs]

    def bests(self) -> list[float]:
        """The best perplexity of each run."""
        return [min(run["perplexities"].values()) for run in self.runs]


def best_rate(results: dict[str, dict], variant: Variant) -> float:
    """The rate with the best perplexity."""
    rates = [float(rate) for rate in RATES.value]
    return min(rates, key=lambda rate: min(results[Run(variant, rate, 0).name()]["perplexities"].values()))


def collected(results: dict[str, dict]) -> dict[str, Found]:
    """What is known so far, by variant."""
    found = {}
    for name, variant in variants().items():
        first = [results.get(Run(variant, float(rate), 0).name()) for rate in RATES.value]
        if not all(first):
            continue
        rate = best_rate(results, variant)
        seeds = [results.get(Run(variant, rate, seed).name()) for seed in range(1, 1 + SEEDS.value)]
        if runs := [run for run in seeds if run]:
            found[name] = Found(rate, runs)
    return found


def table(found: dict[str, Found]) -> str:
    """The results as Markdown."""
    head = ["model", "parameters", "rate", "seeds", "best perplexity", "at step", "at the end"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, each in found.items():
        curves = [run["perplexities"] for run in each.runs]
        cells = [name, f"{each.runs[0]['parameters']:,}", f"{each.rate:g}", str(len(curves)), spread(each.bests(), 2)]
        cells += [", ".join(f"{int(min(curve, key=curve.get)):,}" for curve in curves), spread(each.ends(), 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot_curves(found: dict[str, Found], path: pathlib.Path) -> None:
    """Plot the validation curves: means over seeds, and the range of the seeds.

    Beside those with the block of a Llama is what was published at the end.
    """
    from diffeqformer.console.figures import COLOURS, new_figure

    explodes = STUDY.value == "overfitting"
    widths = (6, 3) if STUDY.value == "llama" else (6,)
    figure, [[panel, *beside]] = new_figure(1, len(widths), (1 + sum(widths), 4), width_ratios=widths)
    lines = itertools.cycle(("-", "--", ":", "-."))  # curves may cover one another
    for colour, line, (name, each) in zip(itertools.cycle(COLOURS), lines, found.items()):
        steps = list(each.runs[0]["perplexities"])
        steps = steps if explodes else steps[1:]  # the first would flatten all others
        curves = [[run["perplexities"][step] for run in each.runs] for step in steps]
        at = [int(step) for step in steps]
        panel.plot(at, list(map(statistics.mean, curves)), line, color=colour, label=f"{name}, {each.rate:g}")
        panel.fill_between(at, list(map(min, curves)), list(map(max, curves)), color=colour, alpha=0.2, linewidth=0)
    panel.set(ylabel="validation perplexity", xlabel="training step", yscale="log" if explodes else "linear")
    panel.legend(fontsize=8, title="model, peak learning rate", title_fontsize=8)
    panel.grid(alpha=0.3)
    for published in beside:
        draw_published(published, LLAMAS)
        published.set(title="published, read off: OpenWebText", xlabel="perplexity of tokens")
        published.margins(0.2)
    figure.savefig(path, dpi=110)


def plot_sweep(found: dict[str, Found], path: pathlib.Path) -> None:
    """Plot perplexity against E, with GPT as a horizontal line."""
    from diffeqformer.console.figures import COLOURS, new_figure

    figure, [[panel]] = new_figure(1, 1, (7, 4))
    widths = {name: dict(of.changes)["model.time_embed_dim"] for name, of in variants().items() if of.changes}
    ends = {widths[name]: each.ends() for name, each in found.items() if name in widths}
    errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in ends.values()]
    panel.errorbar(
        list(ends), list(map(statistics.mean, ends.values())), errors, fmt="o-", capsize=3, label="diffeqformer"
    )
    if "gpt" in found:
        panel.axhline(statistics.mean(found["gpt"].ends()), linestyle="--", color=COLOURS[1], label="gpt")
    panel.set(ylabel="validation perplexity, at the end", xlabel="E, the width of the time embedding")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def check_lists() -> None:
    """Check the config and the options that are lists of numbers."""
    if not pathlib.Path(CONFIG.value).is_file():
        sys.exit(f"--config: must be a config file, but there is no file {CONFIG.value}")
    for name, values, number in (("widths", WIDTHS.value, int), ("rates", RATES.value, float)):
        for value in values:
            try:
                number(value)
            except ValueError:
                sys.exit(f"--{name}: must be comma-separated numbers, but one is {value!r}")


def main(_) -> None:
    logging.set_verbosity(logging.ERROR)  # Orbax logs a lot
    check_lists()
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    if STUDY.value == "overfitting":
        texts = articles_of_wikitext(WIKITEXT.value, folder, "short", slice(ARTICLES), slice(-10, None))

    def show(results):
        if found := collected(results):
            name = f"{pathlib.Path(CONFIG.value).stem}-{STUDY.value}"
            write_text(folder / f"{name}.md", table(found))
            (plot_sweep if STUDY.value == "embedding" else plot_curves)(found, folder / f"{name}.png")

    def finish(runs):
        work = functools.partial(measure, texts)
        return run_rows(runs, Run.name, work, pathlib.Path(RESULTS.value), AT_ONCE.value, show)

    compared = list(variants().values())
    results = finish(Run(variant, float(rate), 0) for variant, rate in itertools.product(compared, RATES.value))
    rates = {variant: best_rate(results, variant) for variant in compared}
    seeds = range(1, 1 + SEEDS.value)
    results = finish(Run(variant, rates[variant], seed) for seed, variant in itertools.product(seeds, compared))
    show(results)
    print(table(collected(results)))


if __name__ == "__main__":
    app.run(main)
