"""The paper's perplexities, and a table and a picture of those found beside them."""

import pathlib

from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.console.results import write_text

_TO_WIKITEXT = "finetune_openwebtext_to_wikitext103"
PERPLEXITIES = {
    "llama_1b-validation": (9.7, 9.7),
    "llama_1b-llama-validation": (10.2, 10.2),
    **{f"{_TO_WIKITEXT}-lora-{steps}-test": (of, of) for steps, of in ((9, 23.5), (12, 22.4), (18, 21.4), (24, 21.4))},
    f"{_TO_WIKITEXT}-lora-gpt-24-test": (22.1, 22.1),
    **{f"{_TO_WIKITEXT}-full-{steps}-test-best": (19.5, 20.5) for steps in (9, 12, 18, 24, "gpt-24")},
}
"""Those published, from and to, by the output of `evaluate`: read off Figures 5 and 8."""

FINETUNED = {f"adapters, {steps} steps": f"{_TO_WIKITEXT}-lora-{steps}-test" for steps in (9, 12, 18, 24)}
FINETUNED |= {
    "adapters, gpt": f"{_TO_WIKITEXT}-lora-gpt-24-test",
    "all weights, all depths": f"{_TO_WIKITEXT}-full-18-test-best",
}
LLAMAS = {"diffeqformer": "llama_1b-validation", "llama": "llama_1b-llama-validation"}
"""What Figure 5 shows in one direction, and Figure 8 at the end: outputs by the name in pictures."""


def draw_published(axis, outputs: dict[str, str]) -> None:
    """Draw published perplexities as points; where only a range is known, its middle with the range as a bar.

    Args:
        axis: of matplotlib; its y axis gets the names, the first one on top.
        outputs: keys of `PERPLEXITIES`, by name.
    """
    low, high = zip(*(PERPLEXITIES[output] for output in outputs.values()))
    middle = [sum(bounds) / 2 for bounds in zip(low, high)]
    half = [(to - start) / 2 for start, to in zip(low, high)]
    axis.errorbar(middle, list(outputs), xerr=half, fmt="D", color="black", capsize=4, label="published, read off")
    axis.yaxis.set_inverted(True)
    axis.set_ylabel("model")
    axis.grid(False, axis="y")


def show_beside_published(name: str, found: dict[str, float], path: pathlib.Path) -> None:
    """Print a table of perplexities beside the published ones, and write it and a picture.

    Args:
        name: the exhibit.
        found: perplexities by the output of `evaluate`.
        path: the table's; the picture is beside it.
    """
    known = {output: PERPLEXITIES[output] for output in found if output in PERPLEXITIES}
    lines = [f"| {name.capitalize()} | perplexity | published |", "| -- | -- | -- |"]
    for output, value in found.items():
        published = " to ".join(f"{bound:g}" for bound in dict.fromkeys(known.get(output, ())))
        lines.append(f"| {output} | {value:.2f} | {published} |")
    write_text(path, "\n".join(lines) + "\n")
    print(f"\n{path.read_text()}")
    figure, [[axis]] = new_figure(1, 1, (8, 1.2 + 0.3 * len(found)))
    axis.barh(list(found), list(found.values()), color=COLOURS[0], height=0.6, label="here")
    if known:
        draw_published(axis, {output: output for output in known})
    axis.yaxis.set_inverted(True)
    axis.set(title=name.capitalize(), xlabel="perplexity of tokens, windows side by side", ylabel="run")
    axis.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=110)
