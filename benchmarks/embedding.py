"""Parameters, throughput and memory of training by the width of the time embedding, E (Table 6, Figures 15 and 16).

    python benchmarks/embedding.py --shape=tiny --embed_dim=4 --embed_dim=24 --embed_dim=96
    python benchmarks/embedding.py --shape=medium --batch_size=32    # a GPU with 80 GB

Each width is measured beside a GPT of that shape, in alternating rounds, so at most two models are in memory. --output
gets the table and a picture.
"""

import pathlib
from typing import NamedTuple

import numpy as np
from absl import flags
from common import MODEL_NAMES, TIME_EMBED_DIM, alternate, make_config, mebibytes, print_table, seconds
from train_step import Run

from diffeqformer.console import command_line
from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.console.results import write_text
from diffeqformer.errors import UserError

EMBED_DIMS = flags.DEFINE_multi_integer("embed_dim", [20, 48, 72, 96, 120, 144], "E; can be repeated.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "runs/embedding", "Folder of the results.")


class Row(NamedTuple):
    """A width. throughput: that of its train step as a share of GPT's: the median and the quartiles of all calls."""

    width: int
    parameters: int
    throughput: np.ndarray
    mebibytes: float


def measure(width: int, gpt: Run) -> Row:
    """Train steps of a DiffEqFormer of one width beside a GPT's."""
    config = make_config("gpt:diffeqformer")
    config.model.time_embed_dim = width
    run = Run(config)
    times = alternate(lambda each: seconds(each.step), {"gpt": gpt, "diffeqformer": run})
    throughput = np.percentile(times["gpt"] / times["diffeqformer"], [50, 25, 75])
    return Row(width, run.parameters, throughput, sum(mebibytes(run.train_step)))


def plot(rows: list[Row], gpt: Run, path: pathlib.Path) -> None:
    """Plot all three against E, with GPT as a horizontal line."""
    figure, [panels] = new_figure(1, 3, (14, 4))
    widths = [row.width for row in rows]
    median, low, high = np.array([row.throughput for row in rows]).T
    panels[0].plot(widths, [row.parameters / 1e6 for row in rows], "o-", label="diffeqformer")
    panels[1].errorbar(widths, median, [median - low, high - median], fmt="o-", capsize=3)
    panels[2].plot(widths, [row.mebibytes for row in rows], "o-")
    titles = "parameters, millions", "throughput in training, share of gpt's", "memory of the train step, MiB"
    for panel, title, of_gpt in zip(panels, titles, (gpt.parameters / 1e6, 1.0, sum(mebibytes(gpt.train_step)))):
        panel.axhline(of_gpt, linestyle="--", color=COLOURS[1], label="gpt")
        panel.set(ylabel=title, xlabel="E, the width of the time embedding")
        panel.set_ylim(0)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def benchmark() -> None:
    if MODEL_NAMES.present or TIME_EMBED_DIM.present:
        raise UserError("--models, --time_embed_dim: have no meaning here; leave them out, and see --embed_dim")
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    gpt = Run(make_config("gpt:gpt"))
    rows = [measure(width, gpt) for width in EMBED_DIMS.value]
    cells = [("gpt", gpt.parameters, 1.0, "", float(sum(mebibytes(gpt.train_step))))]
    for row in rows:
        median, low, high = row.throughput
        cells.append(
            (f"diffeqformer, E {row.width}", row.parameters, median, f"{low:.2f} to {high:.2f}", row.mebibytes)
        )
    text = print_table(("model", "parameters", "throughput", "quartiles", "memory MiB"), cells)
    write_text(folder / "embedding.md", text)
    plot(rows, gpt, folder / "embedding.png")


if __name__ == "__main__":
    command_line.run(benchmark)
