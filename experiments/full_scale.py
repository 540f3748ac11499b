"""The settings of the large configs, trained at a shape for one CPU core.

    python experiments/full_scale.py                     # large and llama_1b, in bfloat16 and in float32
    python experiments/full_scale.py --stage=show        # the table and the picture of the rows so far

A row is one run of diffeqformer.main: a config with `shrunken`'s changes and no others, in its bfloat16 or in float32.
The text is Python's standard library, in pieces of a SentencePiece model that is trained on it first. An interrupted
row goes on where it was, and complete rows aren't run again.
"""

import io
import itertools
import pathlib
import runpy
import statistics
from typing import NamedTuple

from absl import app, flags
from common import curve, define_flags, folder_of, read_results, results_file, run_rows, table, train

from diffeqformer.console.results import spread

STAGE = flags.DEFINE_enum("stage", "published", ["published", "show"], "What to run.")
STEPS = flags.DEFINE_integer("steps", 2000, "Training steps of a row.", lower_bound=1)
define_flags("full_scale")

CONFIGS = ("large", "llama_1b")
TYPES = ("bfloat16", "float32")
LOG_EVERY = 10


def shrunken(config, tokenizer_file: str) -> dict:
    """The fields that bring a config to the common shape, text and vocabulary; all others stay as published."""
    width = 128
    return {
        "steps": STEPS.value, "batch_size": 9, "sequence_length": 128, "mesh.fsdp": 1,
        "model.width": width, "model.heads": 4, "model.mlp": width * config.model.mlp // config.model.width,
        "model.num_steps": 8, "model.max_length": 128, "model.vocab_size": 2000, "model.vocab_multiple": 128,
        "data.task": "python_stdlib", "data.tokenizer": "sentencepiece", "data.tokenizer_file": tokenizer_file,
        "log_every": LOG_EVERY, "eval_every": 500, "checkpoint_every": 250, "checkpoints_kept": 1,
    }  # fmt: skip


class Row(NamedTuple):
    """One run: the config, the compute type and the seed."""

    config: str
    dtype: str
    seed: int

    def name(self) -> str:
        """Its key in the results, and its folder."""
        return f"{self.config}, {self.dtype}, {STEPS.value} steps, seed {self.seed}"

    def options(self) -> list[str]:
        """What `main` is told."""
        path = f"configs/{self.config}.py"
        config = runpy.run_path(path)["get_config"]()
        changes = shrunken(config, str(tokenizer_file())) | {"seed": self.seed, "model.dtype": self.dtype}
        return [f"--config={path}", *(f"--config.{field}={value}" for field, value in changes.items())]


def all_rows() -> list[Row]:
    """The rows, in the order in which they are run."""
    return [
        Row(config, dtype, seed) for seed, config, dtype in itertools.product(range(flags.FLAGS.seeds), CONFIGS, TYPES)
    ]


def tokenizer_file() -> pathlib.Path:
    """The file of the tokenizer."""
    return pathlib.Path(flags.FLAGS.folder) / "python_stdlib_2000.model"


def make_tokenizer() -> None:
    """Train the tokenizer if it is missing: always the same one on the same version of Python.

    Every text survives it: line ends are pieces of their own, and rare characters are bytes.
    """
    if tokenizer_file().exists():
        return
    import sentencepiece

    from diffeqformer.data.texts import StandardLibrary

    texts = StandardLibrary().documents("train")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=itertools.chain.from_iterable(text.split("\n") for text in texts), model_writer=model,
        vocab_size=2000, model_type="bpe", byte_fallback=True, user_defined_symbols=["\n"], minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    temporary = tokenizer_file().with_suffix(".part")
    temporary.write_bytes(model.getvalue())
    temporary.rename(tokenizer_file())


def work(row: Row, cores: list[int] | None) -> dict:
    """Train a row.

    Returns:
        its curves by step, the keys as JSON has them: losses in nats per token, and norms before clipping.
    """
    workdir = folder_of(row.name())
    train(workdir, row.options(), cores)
    names = {"train/loss": "loss", "train/gradient_norm": "gradient_norm", "validation/loss": "validation"}
    return {
        name: {step: float(f"{value:.6g}") for step, value in curve(workdir, tag).items()}
        for tag, name in names.items()
    }


def differences(results: dict[Row, dict], row: Row, curve: str) -> dict[int, float]:
    """A loss of a row less that of the same in float32, by step."""
    ours, theirs = results[row][curve], results[row._replace(dtype="float32")][curve]
    return {int(step): value - theirs[step] for step, value in ours.items()}


def in_bfloat16(results: dict[Row, dict]) -> dict[str, list[Row]]:
    """The rows in bfloat16 that have a counterpart in float32, by config."""
    rows = [row for row in results if row.dtype == "bfloat16" and row._replace(dtype="float32") in results]
    return {config: of for config in CONFIGS if (of := [row for row in rows if row.config == config])}


def cells(results: dict[Row, dict], config: str, rows: list[Row]) -> dict[str, str]:
    """What bfloat16 changes in a config, a row of the table: means over seeds of differences of the same seed."""
    norms = [results[row]["gradient_norm"].values() for row in rows]
    ends = [list(differences(results, row, "validation").values())[-1] for row in rows]
    return {
        "config": config,
        "seeds": str(len(rows)),
        "validation loss at the end, bfloat16 less float32": spread(ends, 4),
        "largest difference of training losses": spread(
            [max(map(abs, differences(results, row, "loss").values())) for row in rows], 3
        ),
        "gradient norm, median": spread(list(map(statistics.median, norms)), 2),
        "above 1, %": spread([100.0 * statistics.mean(norm > 1 for norm in each) for each in norms], 0),
    }


def plot(results: dict[Row, dict], path: pathlib.Path) -> None:
    """Plot losses and norms, in colours of the seeds, and what bfloat16 changes: a line of panels for each config."""
    from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure

    compared = in_bfloat16(results)
    figure, axes = new_figure(len(compared), 3, (14, 3.6 * len(compared)))
    for (config, rows), panels in zip(compared.items(), axes):
        for row, colour in zip(rows, COLOURS):
            exact = row._replace(dtype="float32")
            for panel, name in zip(panels, ("loss", "gradient_norm")):
                panel.plot(*smoothed(results[row][name]), color=colour, label=f"seed {row.seed}")
                label = "the same in float32" if row is rows[0] else None
                panel.plot(*smoothed(results[exact][name]), ":", color="black", linewidth=1, label=label, zorder=3)
            validation = {int(step): value for step, value in results[row]["validation"].items()}
            panels[0].plot(list(validation), list(validation.values()), "o", markersize=4, color=colour)
            difference = differences(results, row, "loss")
            panels[2].plot(list(difference), list(difference.values()), linewidth=0.6, color=colour)
        panels[0].set(title=f"{config}: loss; dots: validation", ylabel="nats per token")
        panels[1].set(title="before clipping at 1", ylabel="norm of the gradient")
        panels[1].axhline(1, color="black", linewidth=0.8)
        panels[2].set(title="loss in bfloat16 less that in float32", ylabel="nats per token")
        panels[2].axhline(0, color="black", linewidth=0.8)
        log_if_wide(panels[1])
        for panel in panels:
            panel.set_xlabel("step")
        panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def smoothed(curve: dict[str, float], count: int = 5) -> tuple[list[int], list[float]]:
    """Steps, and the mean of the values at the last `count` logged steps."""
    steps, values = [int(step) for step in curve], list(curve.values())
    return steps, [statistics.mean(values[max(0, i + 1 - count) : i + 1]) for i in range(len(values))]


def main(_) -> None:
    pathlib.Path(flags.FLAGS.folder).mkdir(parents=True, exist_ok=True)
    rows, path = all_rows(), results_file()
    results = read_results(path)
    if STAGE.value == "published" and any(row.name() not in results for row in rows):
        make_tokenizer()
        results = run_rows(rows, Row.name, work)
    shown = {row: results[row.name()] for row in rows if row.name() in results}
    compared = in_bfloat16(shown)
    print(table([cells(shown, *each) for each in compared.items()]))
    if compared:
        plot(shown, path.with_suffix(".png"))


if __name__ == "__main__":
    app.run(main)
