"""Section 6.2 of the paper on two CPU cores: pretrain on one text, fine-tune at several depths on another.

    python experiments/finetune_depths.py --wikitext=wiki.valid.tokens --folder=runs/finetune_depths

The shape is taken from configs/tiny.py. Depths are a third of the paper's: a DiffEqFormer is pretrained in 6 steps, a
GPT in 8 layers. The base called elastic is pretrained at many depths (docs/elastic.md). The texts are Python's standard
library and the validation split of WikiText-103. All have the learning rate of configs/tiny.py. Each pretraining and
each fine-tuning is a run of diffeqformer.main in its own folder. Bases that --results holds aren't run again, and
interrupted runs go on where they were. When all runs of a base are finished, table.md and figure.png show them.
"""

import functools
import itertools
import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags
from common import articles_of_wikitext, perplexities, run_rows, train

from diffeqformer.console.figures import new_figure
from diffeqformer.console.results import spread, write_text

WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.", required=True)
FOLDER = flags.DEFINE_string("folder", "runs/finetune_depths", "Folder of the runs and their results.")
RESULTS = flags.DEFINE_string("results", "experiments/finetune_depths.json", "The bases so far; new ones are added.")
DIRECTIONS = flags.DEFINE_multi_enum(
    "direction",
    ["stdlib_to_wikitext"],
    ["stdlib_to_wikitext", "wikitext_to_stdlib"],
    "Text of pretraining and of fine-tuning; can be repeated.",
)
SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds. All bases are run with one seed before the next.")
AT_ONCE = flags.DEFINE_integer(
    "at_once", 2, "Bases side by side, each on its part of the cores (Linux).", lower_bound=1
)

MODELS = {
    "diffeqformer": ["--config=configs/tiny.py", "--config.model.num_steps=6"],
    "elastic": ["--config=configs/tiny.py:elastic"],
    "gpt": ["--config=configs/tiny.py:gpt", "--config.model.num_steps=8"],
}
DEPTHS = {"diffeqformer": (6, 3, 4, 8), "elastic": (6, 3, 4, 8), "gpt": (8,)}
MODES = {
    "full": [],
    "lora": ["--config.model.lora_rank=20"],
}  # 20 of 96 is the same proportion as the paper's 200 of 1,024
PRETRAINING = ["--config.steps=3000", "--config.eval_every=1500"]
FINETUNING = ["--config.steps=800", "--config.eval_every=100", "--config.sample.prompt=The "]


class Base(NamedTuple):
    """One pretraining, and what is fine-tuned from it."""

    direction: str
    model: str
    seed: int

    def name(self) -> str:
        """Its key in the results, and its folder."""
        return f"{self.direction.partition('_to_')[0]}-{self.model}-{self.seed}"


def finetune(texts: dict[str, list[str]], base: Base, cores: list[int] | None) -> dict:
    """Pretrain a base and fine-tune it at all its depths.

    Returns:
        the base, and the validation perplexities of bytes of each fine-tuning by step.
    """
    first, _, second = base.direction.partition("_to_")
    common = ["--config.checkpoints_kept=1", f"--config.seed={base.seed}"]
    pretrained = pathlib.Path(FOLDER.value) / base.name()
    train(pretrained, MODELS[base.model] + texts[first] + PRETRAINING + common, cores)
    runs = []
    for depth, mode in itertools.product(DEPTHS[base.model], MODES):
        options = ["--config=configs/tiny.py", f"--config.base={pretrained}", f"--config.model.num_steps={depth}"]
        workdir = pretrained.with_name(f"{pretrained.name}-to-{second}-{mode}-{depth}")
        train(workdir, options + MODES[mode] + texts[second] + FINETUNING + common, cores)
        curve = {str(step): value for step, value in perplexities(workdir).items()}  # as JSON has it
        runs.append({"mode": mode, "depth": depth, "perplexities": curve})
    pretraining = {str(step): value for step, value in perplexities(pretrained).items()}
    return {**base._asdict(), "perplexities": pretraining, "finetuned": runs}


def in_groups(results: dict[str, dict]) -> dict[tuple, list[dict[int, float]]]:
    """The curves of all seeds by (direction, base, mode, depth), in the order of the figure."""
    groups = {}
    for base in results.values():
        for run in base["finetuned"]:
            curve = {int(step): value for step, value in run["perplexities"].items()}
            groups.setdefault((base["direction"], base["model"], run["mode"], run["depth"]), []).append(curve)
    return dict(sorted(groups.items()))


def table(results: dict[str, dict]) -> str:
    """Perplexities before, at the best step and at the end, as Markdown: means over seeds."""
    lines = ["| direction | base | trained | steps | seeds | before | best | at step | at the end |", "|" + "---|" * 9]
    for (direction, base, mode, depth), curves in in_groups(results).items():
        best = [min(curve, key=curve.get) for curve in curves]
        columns = (
            [curve[0] for curve in curves],
            [curve[step] for curve, step in zip(curves, best, strict=True)],
            [curve[max(curve)] for curve in curves],
        )
        cells = [spread(column, 2) for column in columns]
        cells.insert(2, ", ".join(map(str, best)))
        lines.append(f"| {direction} | {base} | {mode} | {depth} | {len(curves)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, dict], path: pathlib.Path) -> None:
    """Plot validation perplexity against steps of fine-tuning: a row of panels for each direction, full and LoRA."""
    from matplotlib import colormaps

    groups = in_groups(results)
    directions = list(dict.fromkeys(group[0] for group in groups))
    colours = dict(zip(sorted(DEPTHS["diffeqformer"]), colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=True))
    figure, panels = new_figure(len(directions), 2, (11, 4.5 * len(directions)), sharey="row")
    for (direction, base, mode, depth), curves in groups.items():
        panel = panels[directions.index(direction)][list(MODES).index(mode)]
        steps = sorted(curves[0])[1:]  # the initial perplexity is in the table: it would flatten all curves
        mean = [statistics.mean(curve[step] for curve in curves) for step in steps]
        style = {"diffeqformer": "-", "elastic": ":", "gpt": "--"}[base]
        colour = "black" if base == "gpt" else colours[depth]
        panel.plot(steps, mean, style, color=colour, label=f"{base}, {depth} steps")
    for (row, panel_row), (column, mode) in itertools.product(enumerate(panels), enumerate(MODES)):
        title = "all weights" if mode == "full" else "adapters and embeddings"
        panel_row[column].set(title=f"{directions[row].replace('_', ' ')}: {title}", xlabel="steps of fine-tuning")
        panel_row[column].grid(alpha=0.3)
        if panel_row[column].lines:
            panel_row[column].legend(fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("validation perplexity of bytes")
    figure.savefig(path, dpi=110)


def main(_) -> None:
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    wikitext = articles_of_wikitext(WIKITEXT.value, folder, "wikitext", slice(-5), slice(-5, None))
    texts = {"stdlib": [], "wikitext": wikitext}

    def show(results):
        write_text(folder / "table.md", table(results))
        plot(results, folder / "figure.png")

    bases = [Base(*of, seed) for seed, *of in itertools.product(range(SEEDS.value), DIRECTIONS.value, MODELS)]
    work = functools.partial(finetune, texts)
    results = run_rows(bases, Base.name, work, pathlib.Path(RESULTS.value), AT_ONCE.value, show)
    show(results)
    print(table(results))


if __name__ == "__main__":
    app.run(main)
