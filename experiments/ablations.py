"""The paper's ablations on two CPU cores: Figures 4, 7, 14 to 16 and 18, with configs/tiny.py on Python's standard library.

    python experiments/ablations.py --study=embedding      # d_emb: perplexity, parameters, throughput, memory (Figures 14 to 16)
    python experiments/ablations.py --study=design         # one MLP of t for all weights, or one for each (Figure 18)
    python experiments/ablations.py --study=beta2          # Adam's second beta, for DiffEqFormer and GPT (Figure 7)
    python experiments/ablations.py --study=overfitting --wikitext=wiki.valid.tokens      # a short text read again and again (Figure 4)

Each run is one of diffeqformer.main in a folder of its own, which studies share; the same command goes on where it was
stopped. After each run, <study>.md, <study>.json and <study>.png in --folder show those that have ended.
"""

import json
import pathlib
import re
import statistics

from absl import app, flags
from common import articles_of_wikitext, train, validations

from diffeqformer.results import write_text

STUDY = flags.DEFINE_enum("study", None, ["embedding", "design", "beta2", "overfitting"], "Which.", required=True)
FOLDER = flags.DEFINE_string("folder", "runs/ablations", "Where the runs and their results go.")
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103, for the study of overfitting.")
STEPS = flags.DEFINE_integer("steps", 2000, "Steps of each run.")
ARTICLES = 2  # of WikiText, that are read again and again (ten were too many for 1,500 steps to over-fit)
WIDTHS = (4, 12, 24, 48, 96)  # E, the paper's d_emb


def configs(folder: pathlib.Path) -> dict[str, list[str]]:
    """The runs of the study: their names, and the options of each."""
    tiny = "--config=configs/tiny.py"
    if STUDY.value == "embedding":
        sweep = {f"diffeqformer, E {width}": [tiny, f"--config.model.time_embed_dim={width}"] for width in WIDTHS}
        return sweep | {"gpt": [f"{tiny}:gpt"]}
    if STUDY.value == "design":
        return {
            "diffeqformer, E 24": [tiny, "--config.model.time_embed_dim=24"],
            "alternative": [f"{tiny}:alternative"],
        }
    if STUDY.value == "beta2":
        return {
            f"{model}, beta2 {beta2:g}": [f"{tiny}:{model}", f"--config.optimizer.beta2={beta2}"]
            for model in ("diffeqformer", "gpt")
            for beta2 in (0.95, 0.999)
        }
    text = articles_of_wikitext(WIKITEXT.value, folder, "short", slice(ARTICLES), slice(-10, None))
    return {f"{model}, short text": [f"{tiny}:{model}", *text] for model in ("diffeqformer", "gpt", "shared")}


def step_memory(workdir: pathlib.Path) -> float:
    """MiB of arguments and temporaries of a run's compiled train step."""
    import jax

    from diffeqformer import checkpoint
    from diffeqformer.sharding import make_mesh
    from diffeqformer.step import make_program

    config = checkpoint.load_config(workdir)
    program = make_program(config, make_mesh())
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
    memory = program.train_step.lower(jax.eval_shape(program.init), tokens).compile().memory_analysis()
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20


def measure(name: str, options: list[str], folder: pathlib.Path) -> dict:
    """Train one, if nobody did yet: its validation perplexities by step, parameters, tokens/s (median) and step's MiB."""
    workdir = folder / re.sub(r"[^a-z0-9.]+", "-", name.lower())
    every = f"--config.eval_every={max(1, STEPS.value // 10)}"
    log = train(workdir, [*options, f"--config.steps={STEPS.value}", every, "--config.checkpoints_kept=1"])
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tokens/s  [\d:]+ left$", log, re.MULTILINE)]
    parameters = int(re.search(r"([\d,]+) parameters", log).group(1).replace(",", ""))
    return {
        "perplexities": validations(log),
        "parameters": parameters,
        "tokens_per_second": statistics.median(rates),
        "step_mib": step_memory(workdir),
    }


def table(results: dict[str, dict]) -> str:
    """What was found, as Markdown."""
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


def plot(results: dict[str, dict], path: pathlib.Path) -> None:
    """The validation curves of all runs; of the sweep over E also perplexity, throughput and memory against it."""
    from diffeqformer.analysis.figures import new_figure

    sweep = {name: found for name, found in results.items() if ", E " in name} if STUDY.value == "embedding" else {}
    figure, [panels] = new_figure(1, 4 if sweep else 1, (16 if sweep else 7, 4))
    for name, found in results.items():
        steps = list(found["perplexities"])[1:]  # the first would flatten all others
        panels[0].plot(
            steps, [found["perplexities"][step] for step in steps], "--" if "gpt" in name else "-", label=name
        )
    panels[0].set(title="validation perplexity of bytes", xlabel="step")
    panels[0].legend(fontsize=8)
    quantities = {
        "perplexity at the end": lambda found: found["perplexities"][max(found["perplexities"])],
        "tokens/s in training": lambda found: found["tokens_per_second"],
        "memory of the train step, MiB": lambda found: found["step_mib"],
    }
    for panel, (title, value) in zip(panels[1:], quantities.items()):
        panel.plot([int(name.split()[-1]) for name in sweep], [value(found) for found in sweep.values()], "o-")
        if "gpt" in results:
            panel.axhline(value(results["gpt"]), color="black", linestyle="--", label="gpt")
            panel.legend(fontsize=8)
        panel.set(title=title, xlabel="E, the width of the time embedding")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, options in configs(folder).items():
        results[name] = measure(name, options, folder)
        write_text(folder / f"{STUDY.value}.json", json.dumps(results, indent=1))
        write_text(folder / f"{STUDY.value}.md", table(results))
        plot(results, folder / f"{STUDY.value}.png")
    print(table(results))


if __name__ == "__main__":
    app.run(main)
