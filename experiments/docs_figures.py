"""The pictures of docs/pictures, drawn anew from runs: `make docs-figures`.

    python experiments/docs_figures.py                    # those of single runs, trained in about an hour on two cores
    python experiments/docs_figures.py --only=ode_jitter  # one of them
    python experiments/docs_figures.py --studies          # those of studies, where these have left results

One of them needs WikiText-103's wiki.valid.tokens, given by --wikitext, and is left out otherwise. Runs are trained
in --folder unless they have finished there. `python benchmarks/depth_memory.py --draw` draws depth_memory.png. Look at
every picture before you commit it.
"""

import base64
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from absl import app, flags
from common import articles_of_wikitext, train

ONLY = flags.DEFINE_list("only", [], "Names of the pictures to draw, without .png; by default all of single runs.")
STUDIES = flags.DEFINE_boolean("studies", False, "Draw those of studies instead.")
WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.")
FOLDER = flags.DEFINE_string("folder", "runs/docs", "Folder of the runs.")

PICTURES = pathlib.Path("docs/pictures")
RUNS = {
    "published": [],
    "jitter": ["--config.model.training_times=jittered"],
    "low_shifted": ["--config.model.time_frequency=10", "--config.model.training_times=shifted"],
    "wikitext": ["--config.steps=2000"],
    "deep": ["--config.model.num_steps=18", "--config.steps=3000"],
}
"""What a run changes in configs/tiny.py. `wikitext` reads 50 articles of WikiText, and is validated on the rest."""
CALIBRATION = 4000  # bytes of the training text


class Drawn(NamedTuple):
    """A picture of one run.

    run: a key of `RUNS`; command: that draws it, and its options.
    file: the PNG among its results, or report.html, whose image of the given `alt` and `number` is meant.
    """

    run: str
    command: str
    options: tuple[str, ...]
    file: str
    alt: str = ""
    number: int = 0


DIAL = (
    "--solver=euler,midpoint,heun", "--num_steps=2,3,4,6,8,12", "--tolerance=1,0.5,0.25", "--batch_size=32",
    "--stride=128",
)  # fmt: skip
OF_RUNS = {
    "spectrum_qk": Drawn("deep", "analyze", ("--parts=spectra", "--nofeed_forward"), "report.html", "spectrum of QK"),
    "clustering": Drawn("published", "analyze", ("--parts=simulation",), "report.html", "simulated particles"),
    "clustering_equal_total": Drawn(
        "published", "analyze", ("--parts=simulation",), "report.html", "simulated particles", 2
    ),
    "ode_published": Drawn("published", "ode", (), "ode.png"),
    "ode_jitter": Drawn("jitter", "ode", (), "ode.png"),
    "depth": Drawn("wikitext", "evaluate", ("--num_steps=4,6,9,12,18,24", "--batch_size=32"), "perplexity.png"),
    "dial": Drawn("low_shifted", "evaluate", DIAL, "perplexity.png"),
}
OF_STUDIES = {
    "ablation_embedding": "runs/ablations/tiny-embedding.png",
    "ablation_beta2": "runs/ablations/tiny-beta2.png",
    "ablation_llama": "runs/ablations/tiny-llama.png",
    "ablation_overfitting": "runs/ablations/tiny-overfitting.png",
    "finetune_depths": "runs/finetune_depths/figure.png",
    "full_scale": "experiments/full_scale.png",
    "elastic": "experiments/elastic.png",
}
"""The file that a study has drawn. Its own command draws it again; docs name the commands."""


def draw(name: str, drawn: Drawn) -> None:
    """Train the run of a picture if need be, and draw the picture."""
    folder = pathlib.Path(FOLDER.value)
    workdir, texts = folder / drawn.run, []
    if drawn.run == "wikitext":
        folder.mkdir(parents=True, exist_ok=True)
        texts = articles_of_wikitext(WIKITEXT.value, folder, "articles", slice(50), slice(50, None))
    train(workdir, ["--config=configs/tiny.py", *RUNS[drawn.run], *texts])
    options = list(drawn.options)
    with tempfile.TemporaryDirectory() as scratch:
        output = pathlib.Path(scratch) / "out"
        if any(option.startswith("--tolerance") for option in options):
            from diffeqformer.data.texts import stdlib_files

            text = pathlib.Path(scratch) / "calibration.txt"
            text.write_bytes(stdlib_files("train")[0].read_bytes()[:CALIBRATION])
            options.append(f"--calibration_files={text}")
        command = [sys.executable, "-m", f"diffeqformer.{drawn.command}", f"--workdir={workdir}", f"--output={output}"]
        if status := subprocess.run([*command, *options]).returncode:
            sys.exit(f"{name}: its command ended with status {status}; see above")
        if drawn.file == "report.html":
            pattern = rf'alt="{drawn.alt}" src="data:image/png;base64,([^"]+)"'
            images = re.findall(pattern, (output / "report.html").read_text(encoding="utf-8"))
            (PICTURES / f"{name}.png").write_bytes(base64.b64decode(images[drawn.number]))
        else:
            shutil.copy(output / drawn.file, PICTURES / f"{name}.png")
    print(f"{PICTURES / name}.png")


def main(_) -> None:
    known = OF_STUDIES if STUDIES.value else OF_RUNS
    for name in ONLY.value:
        if name not in known:
            sys.exit(f"--only: must be of {', '.join(known)}, but it has {name!r}")
    for name in ONLY.value or known:
        if name == "depth" and not WIKITEXT.value:
            print(f"left as it is: {PICTURES / name}.png, because --wikitext isn't given")
        elif not STUDIES.value:
            draw(name, OF_RUNS[name])
        elif pathlib.Path(OF_STUDIES[name]).is_file():
            shutil.copy(OF_STUDIES[name], PICTURES / f"{name}.png")
            print(f"{PICTURES / name}.png, from {OF_STUDIES[name]}")
        else:
            print(f"left as it is: {PICTURES / name}.png, because there is no {OF_STUDIES[name]}")


if __name__ == "__main__":
    app.run(main)
