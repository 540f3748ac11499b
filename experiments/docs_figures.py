"""The pictures of docs/pictures, drawn anew from runs: `make docs-figures`.

    python experiments/docs_figures.py                       # all of them, in about an hour on two cores
    python experiments/docs_figures.py --only=ode_published  # one of them

Those of studies are drawn from the rows in this repository, in seconds. Those of single runs take a training each,
in --folder, unless that has finished there. Three need WikiText-103's wiki.valid.tokens, given by --wikitext, and are
left as they are otherwise. Look at every picture before you commit it.
"""

import base64
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

from absl import app, flags
from common import articles_of_wikitext, report, train

ONLY = flags.DEFINE_list("only", [], "Names of the pictures to draw, without .png; by default all.")
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.")
FOLDER = flags.DEFINE_string("folder", "runs/docs", "Folder of the runs.")

PICTURES = pathlib.Path("docs/pictures")
RUNS = {
    "published": [],
    "wikitext": ["--config.steps=2000"],
    "deep": ["--config.model.num_steps=18", "--config.steps=3000"],
}
"""What a run changes in tiny.py:diffeqformer. `wikitext` reads 50 articles of WikiText; the rest validates."""


class Drawn(NamedTuple):
    """A picture of one run.

    run: a key of `RUNS`; command: that draws it, and its options.
    file: the PNG among its results, or report.html, whose image of the given `alt` is meant.
    """

    run: str
    command: str
    options: tuple[str, ...]
    file: str
    alt: str = ""


OF_RUNS = {
    "spectrum_qk": Drawn("deep", "analyze", ("--parts=spectra", "--nofeed_forward"), "report.html", "spectrum of QK"),
    "ode_published": Drawn("published", "ode", (), "ode.png"),
    "depth": Drawn("wikitext", "evaluate", ("--num_steps=4,6,9,12,18,24", "--batch_size=32"), "perplexity.png"),
}


class Study(NamedTuple):
    """A picture that a study draws of its rows: the command, which trains none of them again, and the file."""

    command: str
    file: str


OF_STUDIES = {
    "ablation_embedding": Study("experiments/ablations.py --study=embedding", "runs/ablations/tiny-embedding.png"),
    "ablation_beta2": Study("experiments/ablations.py --study=beta2", "runs/ablations/tiny-beta2.png"),
    "ablation_llama": Study("experiments/ablations.py --study=llama", "runs/ablations/tiny-llama.png"),
    "ablation_overfitting": Study(
        "experiments/ablations.py --study=overfitting --wikitext={wikitext}", "runs/ablations/tiny-overfitting.png"
    ),
    "finetune_depths": Study("experiments/finetune_depths.py --wikitext={wikitext}", "runs/finetune_depths/figure.png"),
    "full_scale": Study("experiments/full_scale.py --stage=show", "experiments/full_scale.png"),
    "recipe": Study("experiments/recipe.py", "runs/recipe/tiny-recipe.png"),
    "coordinates": Study(
        "experiments/coordinates.py --output=docs/pictures/coordinates.png", "docs/pictures/coordinates.png"
    ),
    "clustering": Study("experiments/simulation.py", "runs/simulation/clustering.png"),
    "clustering_equal_total": Study("experiments/simulation.py", "runs/simulation/clustering_equal_total.png"),
    "elastic": Study("experiments/elastic.py", "experiments/elastic.png"),
    "any_depth": Study("experiments/any_depth.py --draw", "experiments/any_depth.png"),
    "depth_memory": Study("benchmarks/depth_memory.py --draw", "docs/pictures/depth_memory.png"),
}
WITH_WIKITEXT = ("depth", "ablation_overfitting", "finetune_depths")


def draw_study(name: str, study: Study) -> None:
    """Draw the picture of a study."""
    command = study.command.format(wikitext=shlex.quote(WIKITEXT.value or ""))
    if status := subprocess.run([sys.executable, *shlex.split(command)]).returncode:
        sys.exit(f"{name}: its command ended with status {status}; see above")
    if pathlib.Path(study.file).parent != PICTURES:
        shutil.copy(study.file, PICTURES / f"{name}.png")
    print(f"{PICTURES / name}.png")


def draw(name: str, drawn: Drawn) -> None:
    """Train the run of a picture if need be, and draw the picture."""
    folder = pathlib.Path(FOLDER.value)
    workdir, texts = folder / drawn.run, []
    if drawn.run == "wikitext":
        texts = articles_of_wikitext(WIKITEXT.value, folder, "articles", slice(50), slice(50, None))
    train(workdir, ["--config=configs/tiny.py:diffeqformer", *RUNS[drawn.run], *texts])
    report(drawn.command, workdir, "drawn", drawn.options)
    file = workdir / "drawn" / drawn.file
    if drawn.file == "report.html":
        pattern = rf'alt="{drawn.alt}" src="data:image/png;base64,([^"]+)"'
        image = re.search(pattern, file.read_text(encoding="utf-8"))
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(image[1]))
    else:
        shutil.copy(file, PICTURES / f"{name}.png")
    print(f"{PICTURES / name}.png")


def main(_) -> None:
    known = {**OF_STUDIES, **OF_RUNS}
    for name in ONLY.value:
        if name not in known:
            sys.exit(f"--only: must be of {', '.join(known)}, but it has {name!r}")
    for name in ONLY.value or known:
        if name in WITH_WIKITEXT and not WIKITEXT.value:
            print(f"left as it is: {PICTURES / name}.png, because --wikitext isn't given")
        elif name in OF_STUDIES:
            draw_study(name, OF_STUDIES[name])
        else:
            draw(name, OF_RUNS[name])


if __name__ == "__main__":
    app.run(main)
