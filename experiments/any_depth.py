"""One pretrained Llama for several numbers of layers: does it heal where layers are left out, and what does that cost?

    diffeqformer import --from=smollm2 --workdir=runs/any_depth/pretrained
    python experiments/any_depth.py --wikitext=wiki.valid.tokens --left_out=16,17,18,14,15,5

Each row trains the same model on the same batches: whole (the control), in the fewest layers alone, or in both numbers
by turns; distilled, with the model before training as the teacher. `diffeqformer leave_out` finds the layers. The text
is `python_packages`; each row is scored on files of other packages before, halfway and after, and on WikiText-103.
"""

import functools
import pathlib

from absl import app, flags
from common import articles_of_wikitext, curve, define_flags, folder_of, report, run_rows, train
from python_packages import write_corpus

from diffeqformer.checkpoints.checkpoint import load_config
from diffeqformer.console.progress import BITS_AT

WIKITEXT = flags.DEFINE_string("wikitext", None, "wiki.valid.tokens of WikiText-103.", required=True)
LEFT_OUT = flags.DEFINE_list("left_out", None, "Layers that are left out, in this order.", required=True)
STEPS = flags.DEFINE_integer("steps", 150, "Steps of training, of 1,024 tokens each.", lower_bound=1)
RATE = flags.DEFINE_float("rate", 1e-4, "Learning rate.", lower_bound=0)
define_flags("any_depth", at_once=2)

BYTES = {"train": 2_000_000, "validation": 60_000}
KINDS = ("whole", "fewer layers", "fewer layers distilled", "both", "both distilled")


def bits_by_depth(
    workdir: pathlib.Path, text: pathlib.Path, name: str, depths: list[int], cores: list[int] | None
) -> dict:
    """The bits per byte of a run's newest checkpoint, by depth, in windows as in training."""
    options = [f"--files={text}", "--perplexity=full", "--batch_size=2", "--window=512", "--stride=512"]
    rows = report("evaluate", workdir, name, [*options, f"--num_steps={','.join(map(str, depths))}"], cores)
    return {str(row["num_steps"]): row["bits_per_byte"] for row in rows["rows"]}


def work(text: list[str], folder: pathlib.Path, row: str, cores: list[int] | None) -> dict:
    """Train a row, named by its kind and its seed.

    Returns:
        bits per byte of the Python text by depth and step; after training, of it and of WikiText-103 by depth, also at
        depths between those of training.
    """
    base, workdir, (kind, seed) = folder_of("pretrained"), folder_of(row), row.split(", seed ")
    config = load_config(base)
    layers, tokenizer = config.model.num_steps, config.data.tokenizer_file
    fewest = layers - len(LEFT_OUT.value)
    depths = {"whole": [layers], "fewer": [fewest], "both": [fewest, layers]}[kind.split()[0]]
    options = ["--config=configs/tiny.py:llama", f"--config.base={base}", *text]
    if kind != "whole":
        options += [f"--config.model.left_out={','.join(LEFT_OUT.value)}"]
        options += [f"--config.model.training_depths={','.join(map(str, depths))}"]
    options += ["--config.teacher_weight=1"] * kind.endswith("distilled")
    options += ["--config.data.tokenizer=huggingface", f"--config.data.tokenizer_file={tokenizer}"]
    options += ["--config.sequence_length=512", "--config.batch_size=2", "--config.model.remat=none"]
    options += [f"--config.seed={seed}"]
    options += [f"--config.steps={STEPS.value}", f"--config.eval_every={-(-STEPS.value // 2)}"]
    options += ["--config.checkpoint_every=100", "--config.checkpoints_kept=1", "--config.log_every=10"]
    train(workdir, [*options, f"--config.optimizer.learning_rate={RATE.value:g}"], cores)
    tags = {depth: "bits_per_byte" if depth == layers else f"{BITS_AT}{depth}" for depth in depths}
    python = {str(depth): curve(workdir, f"validation/{tag}") for depth, tag in tags.items()}
    between = sorted({*depths, *range(min(depths), max(depths), 2)})
    texts = {"python by depth": "validation.jsonl", "wikitext": "wikitext-validation.txt"}
    after = {name: bits_by_depth(workdir, folder / file, name, between, cores) for name, file in texts.items()}
    return {"python": python, **after}


def main(_) -> None:
    folder = pathlib.Path(flags.FLAGS.folder)
    text = write_corpus(folder, BYTES)
    articles_of_wikitext(WIKITEXT.value, folder, "wikitext", slice(0), slice(4))
    rows = [f"{kind}, seed {seed}" for seed in range(flags.FLAGS.seeds) for kind in KINDS]
    run_rows(rows, str, functools.partial(work, text, folder))


if __name__ == "__main__":
    app.run(main)
