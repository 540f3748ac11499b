"""The paper's comparisons of models for one config; by default configs/tiny.py, on two CPU cores.

    python experiments/ablations.py --study=perplexity # DiffEqFormer, GPT and shared weights (Tables 1 and 2)
    python experiments/ablations.py --study=llama      # the same with the block of a Llama (Table 2, Figure 8)
    python experiments/ablations.py --study=embedding  # d_emb: perplexity (Figure 14)
    python experiments/ablations.py --study=design     # one MLP of t for all weights, or one for each (Figure 18)
    python experiments/ablations.py --study=beta2      # Adam's second beta, for DiffEqFormer and GPT (Figure 7)
    python experiments/ablations.py --study=shared     # two forms of the baseline with shared weights
    python experiments/ablations.py --study=overfitting --wikitext=wiki.valid.tokens  # a short text repeated (Figure 4)

tuning.py says how they are run; studies share runs. Other configs need their own rates and file: --rates=2e-4,4e-4
--config=configs/medium.py --width=12 --width=48 --results=medium.json.
"""

import itertools
import pathlib
import statistics

from absl import app, flags
from common import articles_of_wikitext, define_flags
from published import LLAMAS, draw_published
from tuning import OWN_TEXT, Comparison, Form, Study

from diffeqformer.config import get_field

STUDIES = ["perplexity", "llama", "embedding", "design", "beta2", "shared", "overfitting"]
STUDY = flags.DEFINE_enum("study", None, STUDIES, "Which.", required=True)
WIDTHS = flags.DEFINE_multi_integer(
    "width", [4, 12, 24, 48, 96], "E, the paper's d_emb, in the study of the embedding; can be repeated."
)
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103, for the study of overfitting.")
ARTICLES = 2  # of WikiText, which are read repeatedly
define_flags("ablations")

GPT = {"gpt": Form("gpt")}
OURS = {"diffeqformer": Form("diffeqformer", "gpt")}
MODELS = OURS | GPT | {"shared": Form("shared", "gpt")}
FIXED = {
    "perplexity": MODELS,
    "overfitting": MODELS,
    "design": OURS | {"alternative": Form("alternative", "diffeqformer")},
    "llama": {
        "diffeqformer, llama": Form("diffeqformer", "llama", {"model.field": "llama"}),
        "llama": Form("llama"),
    },
    "shared": {
        "shared": MODELS["shared"],
        "shared, a GPT's steps": Form("shared", "shared", {"model.span": 0.0, "model.solver": "lie_trotter"}),
    },
}
"""The forms of the studies that don't depend on the config."""


def varied(model: str, field: str, values: list) -> dict[str, Form]:
    """A model with the values of a field. That of the config has the model's name, so that studies share its runs."""
    own, name = get_field(Form(model).config(), field), field.partition(".")[2]
    return {
        model if value == own else f"{model}, {name} {value:g}": Form(model, changes={field: value}) for value in values
    }


def forms() -> dict[str, Form]:
    """What the study compares, by name."""
    if STUDY.value == "embedding":
        return varied("diffeqformer", "model.time_embed_dim", WIDTHS.value) | GPT
    if STUDY.value == "beta2":
        return varied("diffeqformer", "optimizer.beta2", [0.95, 0.999]) | varied(
            "gpt", "optimizer.beta2", [0.95, 0.999]
        )
    return FIXED[STUDY.value]


def plot_curves(found: list[Comparison], path: pathlib.Path) -> None:
    """Plot the validation curves: means over seeds, and the range of the seeds.

    Beside those with the block of a Llama is what was published at the end.
    """
    from diffeqformer.console.figures import COLOURS, new_figure

    explodes = STUDY.value == "overfitting"
    widths = (6, 3) if STUDY.value == "llama" else (6,)
    figure, [[panel, *beside]] = new_figure(1, len(widths), (1 + sum(widths), 4), width_ratios=widths)
    lines = itertools.cycle(("-", "--", ":", "-."))  # curves may cover one another
    for colour, line, each in zip(itertools.cycle(COLOURS), lines, found):
        steps = list(each.curves[0])
        steps = steps if explodes else steps[1:]  # the first would flatten all others
        curves = [[curve[step] for curve in each.curves] for step in steps]
        at = [int(step) for step in steps]
        panel.plot(at, list(map(statistics.mean, curves)), line, color=colour, label=f"{each.name}, {each.rate}")
        panel.fill_between(at, list(map(min, curves)), list(map(max, curves)), color=colour, alpha=0.2, linewidth=0)
    panel.set(ylabel="validation perplexity", xlabel="training step", yscale="log" if explodes else "linear")
    panel.legend(fontsize=8, title="model, peak learning rate", title_fontsize=8)
    for published in beside:
        draw_published(published, LLAMAS)
        published.set(title="published, read off: OpenWebText", xlabel="perplexity of tokens")
        published.margins(0.2)
    figure.savefig(path, dpi=110)


def plot_sweep(found: list[Comparison], path: pathlib.Path) -> None:
    """Plot perplexity against E, with GPT as a horizontal line."""
    from diffeqformer.console.figures import COLOURS, new_figure

    figure, [[panel]] = new_figure(1, 1, (7, 4))
    ends = {each.form.changes["model.time_embed_dim"]: each.ends() for each in found if each.form.changes}
    errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in ends.values()]
    panel.errorbar(
        list(ends), list(map(statistics.mean, ends.values())), errors, fmt="o-", capsize=3, label="diffeqformer"
    )
    for gpt in (each for each in found if each.name == "gpt"):
        panel.axhline(statistics.mean(gpt.ends()), linestyle="--", color=COLOURS[1], label="gpt")
    panel.set(ylabel="validation perplexity, at the end", xlabel="E, the width of the time embedding")
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    texts = OWN_TEXT
    if STUDY.value == "overfitting":
        folder = pathlib.Path(flags.FLAGS.folder)
        options = articles_of_wikitext(WIKITEXT.value, folder, "short", slice(ARTICLES), slice(-10, None))
        texts = {f"{ARTICLES}_articles": options}
    draw = plot_sweep if STUDY.value == "embedding" else plot_curves
    Study(STUDY.value, forms(), "perplexity", draw, texts).run(forms())


if __name__ == "__main__":
    app.run(main)
