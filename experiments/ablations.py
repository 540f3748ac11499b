"""The paper's ablations, Figures 4, 7, 14 to 16 and 18, for one config; by default configs/tiny.py, on two CPU cores.

    python experiments/ablations.py --study=embedding  # d_emb: perplexity, parameters, speed, memory (Figures 14 to 16)
    python experiments/ablations.py --study=design     # one MLP of t for all weights, or one for each (Figure 18)
    python experiments/ablations.py --study=beta2      # Adam's second beta, for DiffEqFormer and GPT (Figure 7)
    python experiments/ablations.py --study=overfitting --wikitext=wiki.valid.tokens  # a short text repeated (Figure 4)

Other configs need their own widths and rates: --config=configs/medium.py --widths=12,48,144 --rates=6e-4. Each run is a
run of diffeqformer.main in its own folder; studies share runs. The same command resumes an interrupted study. After
each run, <study>.md, <study>.json and <study>.png in --folder show the finished runs.
"""

import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import pathlib
import runpy
import sys
from typing import NamedTuple

from absl import app, flags, logging
from common import articles_of_wikitext, inspected, perplexities, train

from diffeqformer.config import get_field
from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import write_text

STUDY = flags.DEFINE_enum("study", None, ["embedding", "design", "beta2", "overfitting"], "Which.", required=True)
CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "The config to vary.")
WIDTHS = flags.DEFINE_list(
    "widths", ["4", "12", "24", "48", "96"], "E, the paper's d_emb, in the study of the embedding."
)
RATES = flags.DEFINE_list("rates", ["1e-3", "3e-3"], "Learning rates, in the study of the embedding.")
FOLDER = flags.DEFINE_string("folder", "runs/ablations", "Folder of the runs and their results.")
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103, for the study of overfitting.")
STEPS = flags.DEFINE_integer("steps", 2000, "Steps of each run.")
ARTICLES = 2  # of WikiText, which are read repeatedly (with ten, 1,500 steps didn't overfit)


@functools.cache
def config_of(model: str):
    """The config with a model of the given kind."""
    return runpy.run_path(CONFIG.value)["get_config"](model)


class Run(NamedTuple):
    """One run of the config: the model, the changed fields, and whether it reads the short text."""

    model: str = "diffeqformer"
    changes: dict[str, float] = {}
    short_text: bool = False

    def differences(self) -> list[str]:
        """The changes that differ from the config, so that studies share identical runs."""
        config = config_of(self.model)
        return [f"{field}={value:g}" for field, value in self.changes.items() if value != get_field(config, field)]

    def workdir(self, folder: pathlib.Path) -> pathlib.Path:
        """Its folder."""
        text = [f"{ARTICLES}_articles"] * self.short_text
        parts = [pathlib.Path(CONFIG.value).stem, self.model, *self.differences(), *text, f"{STEPS.value}_steps"]
        return folder / "-".join(parts).replace("=", "-")


def runs() -> dict[str, Run]:
    """The runs of the study, by name in its table."""
    if STUDY.value == "embedding":
        rates = {f"rate {rate}": {"optimizer.learning_rate": float(rate)} for rate in RATES.value}
        return {
            f"diffeqformer, E {width}, {name}": Run(changes={"model.time_embed_dim": int(width), **rate})
            for width, (name, rate) in itertools.product(WIDTHS.value, rates.items())
        } | {f"gpt, {name}": Run("gpt", rate) for name, rate in rates.items()}
    if STUDY.value == "design":
        return {"diffeqformer": Run(), "alternative": Run("alternative")}
    if STUDY.value == "beta2":
        return {
            f"{model}, beta2 {beta2:g}": Run(model, {"optimizer.beta2": beta2})
            for model, beta2 in itertools.product(("diffeqformer", "gpt"), (0.95, 0.999))
        }
    return {model: Run(model, short_text=True) for model in ("diffeqformer", "gpt", "shared")}


def compiled_memory(workdir: pathlib.Path) -> float:
    """MiB of arguments and temporaries of a run's compiled train step, on each device."""
    import jax

    from diffeqformer import checkpoint
    from diffeqformer.training.run import make_program

    config = checkpoint.load_config(workdir)
    program = make_program(config)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
    memory = program.train_step.lower(jax.eval_shape(program.init), tokens).compile().memory_analysis()
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20


def step_memory(workdir: pathlib.Path) -> float:
    """The same, computed in a separate process, since the next run needs the accelerator."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(compiled_memory, workdir).result()


def measure(run: Run, folder: pathlib.Path) -> dict:
    """Train a run unless it is finished. Returns validation perplexities by step, parameters, best tokens/s and MiB."""
    options = [f"--config={CONFIG.value}:{run.model}", *(f"--config.{field}" for field in run.differences())]
    if run.short_text:
        options += articles_of_wikitext(WIKITEXT.value, folder, "short", slice(ARTICLES), slice(-10, None))
    steps = [f"--config.steps={STEPS.value}", f"--config.eval_every={max(1, STEPS.value // 10)}"]
    steps += [f"--config.log_every={max(1, STEPS.value // 30)}"]
    workdir = run.workdir(folder)
    train(workdir, [*options, *steps, "--config.checkpoints_kept=1"])
    rates = read_curves(workdir)["train/tokens_per_second"]
    return {
        "perplexities": perplexities(workdir),
        "parameters": sum(row["count"] for row in inspected(workdir)["parameters"]),
        "tokens_per_second": max(rates.values()),  # the interval that other load on the machine affects least
        "step_mib": step_memory(workdir),
    }


def table(results: dict[str, dict]) -> str:
    """The results as Markdown."""
    lines = [
        "| run | parameters | best perplexity | at step | at the end | tokens/s | train step, MiB |",
        "|" + "---|" * 7,
    ]
    for name, found in results.items():
        curve = found["perplexities"]
        best = min(curve, key=curve.get)
        cells = [name, f"{found['parameters']:,}", f"{curve[best]:.2f}", f"{best:,}", f"{curve[max(curve)]:.2f}"]
        lines.append(
            "| " + " | ".join([*cells, f"{found['tokens_per_second']:,.0f}", f"{found['step_mib']:.0f}"]) + " |"
        )
    return "\n".join(lines) + "\n"


def plot_curves(results: dict[str, dict], path: pathlib.Path) -> None:
    """Plot the validation curves of all runs."""
    from diffeqformer.console.figures import new_figure

    explodes = STUDY.value == "overfitting"
    figure, [[panel]] = new_figure(1, 1, (7, 4))
    for name, found in results.items():
        steps = list(found["perplexities"])
        steps = steps if explodes else steps[1:]  # the first would flatten all others
        values = [found["perplexities"][step] for step in steps]
        panel.plot(steps, values, "--" if "gpt" in name else "-", label=name)
    panel.set(title="validation perplexity", xlabel="step", yscale="log" if explodes else "linear")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_sweep(results: dict[str, dict], path: pathlib.Path) -> None:
    """Plot perplexity, throughput and memory against E for each learning rate, with GPT as horizontal lines."""
    from diffeqformer.console.figures import COLOURS, new_figure

    quantities = {
        "validation perplexity, at the end": lambda found: found["perplexities"][max(found["perplexities"])],
        "tokens/s in training": lambda found: found["tokens_per_second"],
        "memory of the train step on a device, MiB": lambda found: found["step_mib"],
    }
    figure, [panels] = new_figure(1, 3, (14, 4))
    for (panel, (title, value)), (number, rate) in itertools.product(
        zip(panels, quantities.items(), strict=True), enumerate(RATES.value)
    ):
        of_rate = {name: run for name, run in runs().items() if name in results and name.endswith(f"rate {rate}")}
        sweep = {run.changes["model.time_embed_dim"]: name for name, run in of_rate.items() if run.model != "gpt"}
        values, label = [value(results[name]) for name in sweep.values()], f"diffeqformer, rate {rate}"
        panel.plot(list(sweep), values, "o-", color=COLOURS[number], label=label)
        for name in (name for name, run in of_rate.items() if run.model == "gpt"):
            panel.axhline(value(results[name]), linestyle="--", color=COLOURS[number], label=name)
        panel.set(title=title, xlabel="E, the width of the time embedding")
        if panel is not panels[0]:
            panel.set_ylim(0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    logging.set_verbosity(logging.ERROR)  # Orbax logs a lot
    if not pathlib.Path(CONFIG.value).is_file():
        sys.exit(f"--config: must be a config file, but there is no file {CONFIG.value}")
    for name, values, number in (("widths", WIDTHS.value, int), ("rates", RATES.value, float)):
        for value in values:
            try:
                number(value)
            except ValueError:
                sys.exit(f"--{name}: must be comma-separated numbers, but one is {value!r}")
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    results, plot = {}, plot_sweep if STUDY.value == "embedding" else plot_curves
    for name, run in runs().items():
        results[name] = measure(run, folder)
        write_text(folder / f"{STUDY.value}.json", json.dumps(results, indent=1))
        write_text(folder / f"{STUDY.value}.md", table(results))
        plot(results, folder / f"{STUDY.value}.png")
    print(table(results))


if __name__ == "__main__":
    app.run(main)
