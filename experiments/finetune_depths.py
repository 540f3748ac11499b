"""Section 6.2 of the paper on two CPU cores: pretrain on one text, fine-tune at several depths on another.

    python experiments/finetune_depths.py --wikitext=wiki.valid.tokens --folder=runs/finetune_depths

The shape is that of configs/tiny.py, and decay and adapters are as published. Depths are a third of the paper's: a
DiffEqFormer is pretrained in 6 steps, and a GPT in 8 layers. --base=recipe and --base=llama are the same for the recipe
of docs/recipe.md, with Muon for all but adapters. The texts are Python's standard library and the validation split of
WikiText-103.

Every base has the same budget: each of the rates with the seed 0, for fine-tuning at one depth, then the best of them
with --seeds others, which are those shown. Each pretraining and each fine-tuning is a run of diffeqformer.main in its
own folder. Rows that --results holds aren't run again, and interrupted runs go on where they were. As bases are
finished, table.md and figure.png in --folder show those of --base and --direction.
"""

import functools
import itertools
import pathlib
import statistics
from typing import NamedTuple

from absl import app, flags
from common import articles_of_wikitext, curve, define_flags, folder_of, run_rows, table, train
from published import FINETUNED, draw_published

from diffeqformer.console.figures import new_figure
from diffeqformer.console.results import spread, write_text

WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.", required=True)
DIRECTIONS = flags.DEFINE_multi_enum(
    "direction",
    ["stdlib_to_wikitext", "wikitext_to_stdlib"],
    ["stdlib_to_wikitext", "wikitext_to_stdlib"],
    "Text of pretraining and of fine-tuning; can be repeated.",
)
BASES = flags.DEFINE_multi_enum(
    "base",
    ["diffeqformer", "gpt"],
    ["diffeqformer", "gpt", "recipe", "llama"],
    "What is pretrained; can be repeated.",
)
define_flags("finetune_depths", at_once=2)

MUON = "--config.optimizer.name=muon"
MODELS = {
    "diffeqformer": ["--config=configs/tiny.py:diffeqformer", "--config.model.num_steps=6"],
    "gpt": ["--config=configs/tiny.py:gpt", "--config.model.num_steps=8"],
    "recipe": ["--config=configs/tiny.py", *(f"--config.model.{n}=6" for n in ("num_steps", "time_embed_dim", "span"))],
    "llama": ["--config=configs/tiny.py:llama", "--config.model.num_steps=8", MUON],
}
BASELINES = ("gpt", "llama")
DEPTHS = (6, 3, 4, 8)
MODES = {
    "full": [],
    "lora": ["--config.model.lora_rank=20", "--config.model.lora_start=published"],
}  # 20 of 96 is the same proportion as 200 of 1,024 in the authors' YAML
RATES = {
    "pretraining": (2e-3, 4e-3, 8e-3),
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
    "lora": (2e-3, 4e-3, 8e-3, 1.6e-2),
}
PRETRAINING = ["--config.steps=1500", "--config.eval_every=500"]
FINETUNING = ["--config.steps=400", "--config.eval_every=100", "--config.sample.prompt=The "]


class Base(NamedTuple):
    """A pretraining, and what is fine-tuned from it. The seed 0 finds the rates of the others."""

    direction: str
    model: str
    seed: int

    def name(self) -> str:
        """Its key in the results."""
        return f"{self.direction.partition('_to_')[0]}-{self.model}-{self.seed}"

    def depths(self) -> tuple[int, ...]:
        """The numbers of steps at which it is fine-tuned. Rates are found at the first."""
        return (8,) if self.model in BASELINES else DEPTHS

    def text(self, stage: str) -> str:
        """The text of a stage of `RATES`."""
        first, _, second = self.direction.partition("_to_")
        return first if stage == "pretraining" else second

    def pretrained(self, rate: float) -> pathlib.Path:
        """The folder of its pretraining."""
        return folder_of(f"{self.name()}-rate-{rate:g}")


def run(
    texts: dict[str, list[str]],
    base: Base,
    stage: str,
    rates: dict[str, float],
    cores: list[int] | None,
    depth: int | None = None,
) -> dict[str, float]:
    """Pretrain a base, or fine-tune it.

    Args:
        stage: of `RATES`.
        rates: those of pretraining and of this stage.
        depth: number of steps of the fine-tuning; by default the one at which rates are tuned.

    Returns:
        validation perplexities of bytes by step, the keys as JSON has them.
    """
    workdir = base.pretrained(rates["pretraining"])
    options = MODELS[base.model] + PRETRAINING
    if stage != "pretraining":
        depth = depth or base.depths()[0]
        options = [f"--config.base={workdir}", f"--config.model.num_steps={depth}", *MODES[stage], *FINETUNING]
        options += [MUON] * (stage == "full" and base.model in ("recipe", "llama"))
        workdir = workdir.with_name(f"{workdir.name}-{stage}-{depth}-rate-{rates[stage]:g}")
        kind = base.model if base.model in BASELINES else "discretized"
        options = [f"--config=configs/tiny.py:{kind}", *options]
    options += [f"--config.optimizer.learning_rate={rates[stage]:g}", "--config.optimizer.decay=everything"]
    options += [*texts[base.text(stage)], "--config.checkpoints_kept=1", f"--config.seed={base.seed}"]
    train(workdir, options, cores)
    return curve(workdir, "validation/perplexity")


def best_rate(found: dict[str, float]) -> float:
    """The rate with the lowest perplexity."""
    return float(min(found, key=found.get))


def tuned(texts: dict[str, list[str]], base: Base, cores: list[int] | None) -> dict:
    """Find the rates of a base: first that of pretraining, then those of fine-tuning its best.

    Returns:
        the base, and the best validation perplexity of bytes of each stage by rate.
    """
    found, rates = {}, {}
    for stage in RATES:
        curves = {rate: run(texts, base, stage, {**rates, stage: rate}, cores) for rate in RATES[stage]}
        found[stage] = {f"{rate:g}": min(curve.values()) for rate, curve in curves.items()}
        rates[stage] = best_rate(found[stage])
    return {**base._asdict(), "tuned": found}


def finetuned(texts: dict[str, list[str]], tunings: dict[str, dict], base: Base, cores: list[int] | None) -> dict:
    """Pretrain a base and fine-tune it at all its depths, with the rates found.

    Args:
        tunings: results of `tuned`, by name.

    Returns:
        the base, and the validation perplexities of bytes of its pretraining and of each fine-tuning by step.
    """
    rates = {stage: best_rate(found) for stage, found in tunings[base._replace(seed=0).name()]["tuned"].items()}
    pretraining = run(texts, base, "pretraining", rates, cores)
    runs = [
        {"mode": mode, "depth": depth, "perplexities": run(texts, base, mode, rates, cores, depth)}
        for depth, mode in itertools.product(base.depths(), MODES)
    ]
    return {**base._asdict(), "perplexities": pretraining, "finetuned": runs}


def in_groups(results: dict[str, dict]) -> dict[tuple, list[dict[int, float]]]:
    """The curves of all seeds by (direction, base, mode, depth), of --direction and --base, in the figure's order."""
    groups = {}
    for base in results.values():
        shown = base["direction"] in DIRECTIONS.value and base["model"] in BASES.value
        for each in base.get("finetuned", []) if shown else []:
            curve = {int(step): value for step, value in each["perplexities"].items()}
            groups.setdefault((base["direction"], base["model"], each["mode"], each["depth"]), []).append(curve)
    return dict(sorted(groups.items()))


def cells(group: tuple, curves: list[dict[int, float]]) -> dict[str, str]:
    """A row of the table: perplexities before, at the best step and at the end, means over seeds."""
    return dict(zip(("direction", "base", "trained", "steps"), map(str, group))) | {
        "seeds": str(len(curves)),
        "before": spread([curve[0] for curve in curves], 2),
        "best": spread([min(curve.values()) for curve in curves], 2),
        "at step": ", ".join(str(min(curve, key=curve.get)) for curve in curves),
        "at the end": spread([curve[max(curve)] for curve in curves], 2),
    }


def plot(groups: dict[tuple, list[dict[int, float]]], path: pathlib.Path) -> None:
    """Plot validation perplexity against steps of fine-tuning: a row of panels for each direction, full and LoRA.

    Curves are means over seeds, with their range. Beside them is what was published at best, in the first direction.
    """
    from matplotlib import colormaps

    directions = list(dict.fromkeys(group[0] for group in groups))
    colours = dict(zip(sorted(DEPTHS), colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=True))
    figure, panels = new_figure(len(directions), 3, (15, 4.5 * len(directions)), width_ratios=(3, 3, 2))
    for (direction, base, mode, depth), curves in groups.items():
        panel = panels[directions.index(direction)][list(MODES).index(mode)]
        steps = sorted(curves[0])[1:]  # the initial perplexity is in the table: it would flatten all curves
        mean = [statistics.mean(curve[step] for curve in curves) for step in steps]
        style = "--" if base in BASELINES else "-"
        colour = "black" if base in BASELINES else colours[depth]
        panel.plot(steps, mean, style, color=colour, label=f"{base}, {depth} steps")
        ends = ([end(curve[step] for curve in curves) for step in steps] for end in (min, max))
        panel.fill_between(steps, *ends, color=colour, alpha=0.15, linewidth=0)
    for (row, panel_row), (column, mode) in itertools.product(enumerate(panels), enumerate(MODES)):
        title = "all weights" if mode == "full" else "adapters and embeddings"
        panel_row[column].set(title=f"{directions[row].replace('_', ' ')}: {title}", xlabel="steps of fine-tuning")
        if panel_row[column].lines:
            panel_row[column].legend(fontsize=8)
    for direction, (full, lora, published) in zip(directions, panels, strict=True):
        full.set_ylabel("validation perplexity of bytes")
        lora.sharey(full)
        lora.tick_params(labelleft=False)
        if direction == "stdlib_to_wikitext":
            draw_published(published, FINETUNED)
            published.set(title="published, read off Figure 5", xlabel="perplexity of tokens")
            published.margins(0.2)
        else:
            published.remove()
    figure.savefig(path, dpi=110)


def main(_) -> None:
    folder = pathlib.Path(flags.FLAGS.folder)
    wikitext = articles_of_wikitext(WIKITEXT.value, folder, "wikitext", slice(-5), slice(-5, None))
    texts = {"stdlib": [], "wikitext": wikitext}

    def show(results):
        if groups := in_groups(results):
            write_text(folder / "table.md", table([cells(*each) for each in groups.items()]))
            plot(groups, folder / "figure.png")

    rows = functools.partial(run_rows, name=Base.name)
    for direction in DIRECTIONS.value:
        results = rows([Base(direction, model, 0) for model in BASES.value], work=functools.partial(tuned, texts))
        bases = [Base(direction, model, seed) for seed in range(1, 1 + flags.FLAGS.seeds) for model in BASES.value]
        work = functools.partial(finetuned, texts, results)
        results = rows(bases, work=work, then=show)
    show(results)
    print(table([cells(*each) for each in in_groups(results).items()]))


if __name__ == "__main__":
    app.run(main)
