"""One pretrained Llama for several numbers of layers: does it heal where layers are left out, and what does that cost?

    diffeqformer import --from=smollm2 --workdir=runs/any_depth/pretrained
    python experiments/any_depth.py --wikitext=wiki.valid.tokens --left_out=16,17,18,14,15,5,13,3,25,26,4,6,7,12,10

Each row trains the same model on the same batches: in all its layers (the control), in fewer, or in several numbers of
layers by turns; "distilled", with the model before training as the teacher; "fitted" or "learned", from layers that
`diffeqformer leave_out` fitted to the training text first, without epochs or with them; "taught", from the learned
ones, with the trained control as the teacher. `leave_out` finds the layers, too. The text is `python_packages`; each
row is scored on files of other packages before, halfway and after, and on WikiText-103.
"""

import functools
import pathlib
import subprocess
import sys

from absl import app, flags
from common import (
    articles_of_wikitext,
    curve,
    define_flags,
    folder_of,
    read_results,
    report,
    results_file,
    run_rows,
    train,
)
from python_packages import write_corpus

from diffeqformer.checkpoints.checkpoint import load_config
from diffeqformer.checkpoints.folder import folder_of as checkpoints_of
from diffeqformer.checkpoints.folder import steps_of
from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.console.progress import BITS_AT

WIKITEXT = flags.DEFINE_string("wikitext", "", "wiki.valid.tokens of WikiText-103.")
LEFT_OUT = flags.DEFINE_list("left_out", [], "Layers that are left out, in this order.")
ROWS = flags.DEFINE_multi_string(
    "row",
    ["30", "24", "24 fitted", "24 learned", "15,24,30 distilled"],
    "The numbers of layers in which a model is trained.",
)
STEPS = flags.DEFINE_integer("steps", 300, "Steps of training, of 1,024 tokens each.", lower_bound=1)
RATE = flags.DEFINE_float("rate", 1e-4, "Learning rate.", lower_bound=0)
DRAW = flags.DEFINE_bool("draw", False, "Only draw experiments/any_depth.png, of the rows so far.")
define_flags("any_depth", at_once=2)

FROM = {"fitted": "fitted", "learned": "learned", "taught": "learned"}
"""The model of fewer layers that a kind of rows begins with; by default the pretrained one."""
TEACHER_WEIGHT = 4  # of the trained control: it knows more of the text than the model before training
BYTES = {"train": 2_000_000, "validation": 60_000}
TEXTS = {"python by depth": "Python files of other packages", "wikitext": "WikiText-103"}


def bits_by_depth(
    workdir: pathlib.Path, text: pathlib.Path, name: str, depths: list[int], cores: list[int] | None
) -> dict:
    """The bits per byte of a run's newest checkpoint, by depth, in windows as in training."""
    options = [f"--files={text}", "--perplexity=full", "--batch_size=2", "--window=512", "--stride=512"]
    rows = report("evaluate", workdir, name, [*options, f"--num_steps={','.join(map(str, depths))}"], cores)
    return {str(row["num_steps"]): row["bits_per_byte"] for row in rows["rows"]}


def start_of(kind: str) -> pathlib.Path:
    """The folder of the model that a kind of rows begins with."""
    layers, _, suffix = kind.partition(" ")
    return folder_of(f"{layers} {FROM[suffix]}" if suffix in FROM else "pretrained")


def fit(kind: str, text: pathlib.Path) -> None:
    """Make the model of fewer layers that a kind of rows begins with, unless it is there."""
    base, folder, layers = folder_of("pretrained"), start_of(kind), int(kind.split()[0])
    if not steps_of(checkpoints_of(folder)):
        order = ",".join(LEFT_OUT.value[: load_config(base).model.num_steps - layers])
        options = [f"--workdir={base}", f"--to={folder}", f"--order={order}", f"--files={text}", "--window=512"]
        options += ["--epochs=0"] * kind.endswith("fitted")
        command = [sys.executable, "-m", "diffeqformer.leave_out", *options]
        subprocess.run(command, check=True)


def work(text: list[str], folder: pathlib.Path, row: str, cores: list[int] | None) -> dict:
    """Train a row, named by its numbers of layers, its steps and its seed.

    Returns:
        bits per byte of the Python text by depth and step; after training, of it and of WikiText-103 by depth, also at
        depths between those of training.
    """
    workdir, (kind, seed) = folder_of(row), row.split(f", {STEPS.value} steps, seed ")
    depths = sorted(map(int, kind.split()[0].split(",")))
    base = start_of(kind)
    config = load_config(base)
    layers, tokenizer = config.model.num_steps, config.data.tokenizer_file
    options = ["--config=configs/tiny.py:llama", f"--config.base={base}", *text]
    if depths != [layers]:
        options += [f"--config.model.left_out={','.join(LEFT_OUT.value)}"]
        options += [f"--config.model.training_depths={','.join(map(str, depths))}"]
    options += ["--config.teacher_weight=1"] * kind.endswith("distilled")
    if kind.endswith("taught"):
        control = folder_of(f"{load_config(folder_of('pretrained')).model.num_steps}, {STEPS.value} steps, seed {seed}")
        if STEPS.value not in steps_of(checkpoints_of(control)):
            sys.exit(f"{row}: needs the control's run first, in {control}")
        options += [f"--config.teacher={control}", f"--config.teacher_weight={TEACHER_WEIGHT}"]
    options += ["--config.data.tokenizer=huggingface", f"--config.data.tokenizer_file={tokenizer}"]
    options += ["--config.sequence_length=512", "--config.batch_size=2", "--config.model.remat=none"]
    options += [f"--config.seed={seed}"]
    options += [f"--config.steps={STEPS.value}", f"--config.eval_every={-(-STEPS.value // 2)}"]
    options += ["--config.checkpoint_every=100", "--config.checkpoints_kept=1", "--config.log_every=10"]
    train(workdir, [*options, f"--config.optimizer.learning_rate={RATE.value:g}"], cores)
    tags = {depth: "bits_per_byte" if depth == layers else f"{BITS_AT}{depth}" for depth in depths}
    python = {str(depth): curve(workdir, f"validation/{tag}") for depth, tag in tags.items()}
    between = sorted({*depths, *range(min(depths), max(depths), max(1, (max(depths) - min(depths)) // 3))})
    files = {"python by depth": "validation.jsonl", "wikitext": "wikitext-validation.txt"}
    after = {name: bits_by_depth(workdir, folder / files[name], name, between, cores) for name in TEXTS}
    return {"python": python, **after}


def draw(results: dict[str, dict]) -> None:
    """Draw the bits per byte after training over the number of layers, of the rows of the longest training."""
    figure, [axes] = new_figure(1, 2, (10, 3.8))
    most = max(int(name.split(", ")[1].removesuffix(" steps")) for name in results)
    results = {name.replace(f", {most} steps", ""): row for name, row in results.items() if f", {most} steps" in name}
    for colour, kind in zip(COLOURS, dict.fromkeys(name.partition(", seed ")[0] for name in results)):
        rows = [row for name, row in results.items() if name.startswith(f"{kind}, seed")]
        for axis, (name, title) in zip(axes, TEXTS.items()):
            for row in rows:
                points = sorted((int(depth), bits) for depth, bits in row[name].items())
                axis.plot(
                    *zip(*points),
                    "o-" if len(points) > 1 else "D",
                    color=colour,
                    label=f"trained in {kind}",
                    markersize=5,
                )
            axis.set(title=title, xlabel="layers", ylabel="bits per byte, after training")
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles))
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(results_file().with_suffix(".png"), dpi=110)


def main(_) -> None:
    if DRAW.value:
        return draw(read_results(results_file()))
    if not (WIKITEXT.value and LEFT_OUT.value):
        sys.exit("--wikitext and --left_out: must be given, unless --draw is")
    folder = pathlib.Path(flags.FLAGS.folder)
    text = write_corpus(folder, BYTES)
    articles_of_wikitext(WIKITEXT.value, folder, "wikitext", slice(0), slice(4))
    for kind in ROWS.value:
        if kind.partition(" ")[2] in FROM:
            fit(kind, folder / "train.jsonl")
    rows = [f"{kind}, {STEPS.value} steps, seed {seed}" for seed in range(flags.FLAGS.seeds) for kind in ROWS.value]
    draw(run_rows(rows, str, functools.partial(work, text, folder)))


if __name__ == "__main__":
    app.run(main)
