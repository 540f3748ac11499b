"""Section 6.2 of the paper on two CPU cores: pretrain in 18 steps on one text, fine-tune in 9 to 24 on another.

    python experiments/finetune_depths.py --wikitext=wiki.valid.tokens --folder=runs/finetune_depths

The shape is taken from configs/tiny.py. The texts are Python's standard library and the validation split of
WikiText-103. Rows are run one after the other; each is a run of diffeqformer.main in its own folder. The same command
resumes an interrupted experiment. After each row, table.md, results.json and figure.png show the finished rows.
"""

import itertools
import json
import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags
from common import articles_of_wikitext, perplexities, train

from diffeqformer.console.figures import new_figure
from diffeqformer.console.results import write_text

WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.", required=True)
FOLDER = flags.DEFINE_string("folder", "runs/finetune_depths", "Folder of the runs and their results.")
DIRECTIONS = flags.DEFINE_multi_enum(
    "direction",
    ["stdlib_to_wikitext"],
    ["stdlib_to_wikitext", "wikitext_to_stdlib"],
    "Text of pretraining and of fine-tuning; can be repeated.",
)
BASES = flags.DEFINE_multi_enum(
    "base", ["diffeqformer", "gpt"], ["diffeqformer", "gpt"], "Models that are pretrained; can be repeated."
)
SEEDS = flags.DEFINE_integer("seeds", 1, "Number of seeds. All rows are run with one seed before the next.")

MODELS = {
    "diffeqformer": ["--config=configs/tiny.py", "--config.model.num_steps=18"],
    "gpt": ["--config=configs/tiny.py:gpt", "--config.model.num_steps=24"],
}
DEPTHS = {"diffeqformer": (18, 9, 12, 24), "gpt": (24,)}
MODES = {
    "full": [],
    "lora": ["--config.model.lora_rank=20"],
}  # 20 of 96 is the same proportion as the paper's 200 of 1,024
PRETRAINING = ["--config.steps=3000", "--config.eval_every=1500"]
FINETUNING = ["--config.steps=800", "--config.eval_every=100", "--config.sample.prompt=The "]


class Row(NamedTuple):
    """One fine-tuning."""

    direction: str
    base: str
    mode: str
    depth: int
    seed: int


def finetune(row: Row, texts: dict[str, list[str]], folder: pathlib.Path) -> dict[int, float]:
    """Fine-tune one row, after pretraining its base if needed. Returns validation perplexities of bytes, by step."""
    first, _, second = row.direction.partition("_to_")
    common = ["--config.checkpoints_kept=1", f"--config.seed={row.seed}"]
    base = folder / f"{first}-{row.base}-{row.seed}"
    train(base, MODELS[row.base] + texts[first] + PRETRAINING + common)
    options = [MODELS[row.base][0], f"--config.base={base}", f"--config.model.num_steps={row.depth}", *MODES[row.mode]]
    workdir = folder / f"{base.name}-to-{second}-{row.mode}-{row.depth}"
    train(workdir, options + texts[second] + FINETUNING + common)
    return perplexities(workdir)


def in_groups(results: dict[Row, dict[int, float]]) -> dict[tuple, list[dict[int, float]]]:
    """The curves of all seeds of each row, in the order of the figure."""
    groups = {}
    for row in sorted(results):
        groups.setdefault(row[:-1], []).append(results[row])
    return groups


def table(results: dict[Row, dict[int, float]]) -> str:
    """Perplexities before, at the best step and at the end, as Markdown: means over seeds."""
    lines = ["| direction | base | trained | steps | seeds | before | best | at step | at the end |", "|" + "---|" * 9]
    for (direction, base, mode, depth), curves in in_groups(results).items():
        best = [min(curve, key=curve.get) for curve in curves]
        columns = (
            [curve[0] for curve in curves],
            [curve[step] for curve, step in zip(curves, best, strict=True)],
            [curve[max(curve)] for curve in curves],
        )
        cells = [
            f"{statistics.mean(column):.2f}" + (f" ± {statistics.stdev(column):.2f}" if len(column) > 1 else "")
            for column in columns
        ]
        cells.insert(2, ", ".join(map(str, best)))
        lines.append(f"| {direction} | {base} | {mode} | {depth} | {len(curves)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: dict[Row, dict[int, float]], path: pathlib.Path) -> None:
    """Plot validation perplexity against steps of fine-tuning: a row of panels for each direction, full and LoRA."""
    from matplotlib import colormaps

    groups = in_groups(results)
    directions = list(dict.fromkeys(group[0] for group in groups))
    colours = dict(zip((9, 12, 18, 24), colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=True))
    figure, panels = new_figure(len(directions), 2, (11, 4.5 * len(directions)), sharey="row")
    for (direction, base, mode, depth), curves in groups.items():
        panel = panels[directions.index(direction)][list(MODES).index(mode)]
        steps = sorted(curves[0])[1:]  # the initial perplexity is in the table: it would flatten all curves
        mean = [statistics.mean(curve[step] for curve in curves) for step in steps]
        style = {"diffeqformer": "-", "gpt": "--"}[base]
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
    texts, results = {"stdlib": [], "wikitext": wikitext}, {}
    for seed, direction, base in itertools.product(range(SEEDS.value), DIRECTIONS.value, BASES.value):
        for depth, mode in itertools.product(DEPTHS[base], MODES):
            row = Row(direction, base, mode, depth, seed)
            results[row] = finetune(row, texts, folder)
            named = [{**key._asdict(), "perplexity_by_step": curve} for key, curve in results.items()]
            write_text(folder / "results.json", json.dumps(named, indent=1))
            write_text(folder / "table.md", table(results))
            plot(results, folder / "figure.png")
    print(table(results))


if __name__ == "__main__":
    app.run(main)
