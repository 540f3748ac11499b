"""What does a model give, and cost, in each number of steps? `python -m diffeqformer.depth_report --workdir=runs/tiny`

One text is scored in each number of steps, beside other runs in their own, such as models of one depth and the same
model trained in its native depth alone. Texts are written to take the time of a token. `--downstream` adds the scores
that `diffeqformer.downstream` has found for the same runs. The report is a page, a picture and JSON.
"""

import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Iterator

import jax
from absl import flags

from diffeqformer.analysis import report
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.figures import COLOURS, as_html, log_if_wide, new_figure
from diffeqformer.console.results import header, results_folder, whole_numbers
from diffeqformer.console.terminal import show_progress
from diffeqformer.depth.depths import trained_depths
from diffeqformer.errors import UserError, reachable
from diffeqformer.inference.sampling import write_tokens
from diffeqformer.inference.scoring import Scorer, window_size
from diffeqformer.inference.task_table import Value, columns_of
from diffeqformer.inference.text_options import define_text_flags, open_text, text_of
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Transformer, random_key, split_model, weights_of

COLUMNS = {"bits_per_byte": "bits/byte", "milliseconds_per_token": "ms/token", "megabytes": "weights, MB (fp32)"}


def define_flags() -> None:
    define_text_flags("depth")
    flags.DEFINE_list("num_steps", [], "Steps of depth; by default all of training.")
    flags.DEFINE_list("beside", [], "Folders of other runs, each in the steps of its training.")
    flags.DEFINE_string("downstream", None, "Folder of results of diffeqformer.downstream whose scores are shown, too.")


def megabytes(model: Transformer, num_steps: int) -> float:
    """The size in fp32 of the weights of all steps with the embeddings: that of the exported model, if there is one."""
    graph, params = split_model(model)
    layers = jax.eval_shape(functools.partial(weights_of, graph, num_steps=num_steps), params).layers
    of_steps = sum(leaf.size for leaf in jax.tree.leaves(layers)) * (num_steps if model.depth.constant else 1)
    others = sum(leaf.size for name, part in params.items() if name != "depth" for leaf in jax.tree.leaves(part))
    return 4 * (of_steps + others) / 1e6


def milliseconds_per_token(opened: checkpoint.Checkpoint, num_steps: int, rounds: int = 5) -> float:
    """The time in which one text grows by a token: the median of some rounds, the first of which compiles."""
    model, times = opened.model, []
    prompt, count = [0] * (model.max_length // 4 or 1), min(33, model.max_length // 2)
    for _ in range(rounds + 1):
        written = write_tokens(
            model,
            prompt,
            count=count,
            key=random_key(0, "sample"),
            vocab_size=opened.tokenizer.vocab_size,
            num_steps=num_steps,
        )
        next(written)
        start = time.monotonic()
        for _ in written:
            pass
        times.append((time.monotonic() - start) / (count - 1))
    return 1000 * statistics.median(times[1:])


def measured(options, workdir: str, depths: list[int]) -> Iterator[dict]:
    """A row for each number of steps of a run's checkpoint, by default those of its training."""
    own = workdir == options.workdir
    opened = checkpoint.load(workdir, step=options.step if own else None, of="--workdir" if own else "--beside")
    model, config = opened.model, opened.config.model
    window = window_size(options.window, opened.config, model.max_length, "--window")
    evaluation = open_text(options, opened, *text_of(options, opened), window, window)
    for number in depths or list(trained_depths(config)):
        scorer, show = Scorer(model, number, options.batch_size), show_progress(f"{workdir}, {number} steps")
        with logits_of(f"{workdir}, checkpoint {opened.step}"):
            found = evaluation.full(scorer, show)
        del scorer  # and its weights
        row = {**header(workdir, opened), "num_steps": number, "text": evaluation.name, **found}
        row["milliseconds_per_token"] = milliseconds_per_token(opened, number)
        yield row | {"megabytes": megabytes(model, number), "scores": {}}


def downstream_runs(folder: pathlib.Path) -> list[dict]:
    """What `diffeqformer.downstream` has written into a folder of results."""
    with reachable("--downstream", folder):
        try:
            return json.loads((folder / "results.json").read_text())["runs"]
        except (FileNotFoundError, ValueError, KeyError):
            raise UserError(f"--downstream: {folder} has no results of diffeqformer.downstream") from None


def add_scores(rows: list[dict], runs: list[dict]) -> list[str]:
    """Add the scores of downstream `runs` to the rows of the same checkpoints and steps; returns the columns."""
    names: dict[str, None] = {}
    for row, run in itertools.product(rows, runs):
        if same(row, run):
            [column] = columns_of([run])
            for task, value in column.values[run["shots"]].items():
                name = f"{task}, {run['shots']} shots"
                names[name] = None
                row["scores"][name] = value._asdict()
    return list(names)


def same(row: dict, run: dict) -> bool:
    """Whether two results are of one checkpoint in equally many steps."""
    places = (os.path.realpath(each["workdir"]) for each in (row, run))
    return len({*places}) == 1 and all(row[name] == run[name] for name in ("checkpoint_step", "num_steps"))


def label(row: dict) -> str:
    """What a curve is called."""
    return f"{row['title']} ({row['workdir']})"


def plot(rows: list[dict]):
    """Bits per byte against steps of depth, and against the time of a token; a run in several steps is a line."""
    figure, [axes] = new_figure(1, 2, (11, 4), sharey=True)
    names = dict.fromkeys(map(label, rows))
    for number, name in enumerate(names):
        of_run = sorted((row for row in rows if label(row) == name), key=lambda row: row["num_steps"])
        colour, line = COLOURS[number % len(COLOURS)], "o-" if len(of_run) > 1 else "D"
        for axis, across in zip(axes, ("num_steps", "milliseconds_per_token")):
            values = [row[across] for row in of_run], [row["bits_per_byte"] for row in of_run]
            axis.plot(*values, line, color=colour, label=name, markersize=5)
        for row in of_run:
            place, offset = (row["milliseconds_per_token"], row["bits_per_byte"]), {"xytext": (0, 6), "ha": "center"}
            axes[1].annotate(row["num_steps"], place, textcoords="offset points", color=colour, fontsize=8, **offset)
    steps = sorted({row["num_steps"] for row in rows})
    axes[0].set(xlabel="steps of depth", ylabel="bits per byte", xticks=steps)
    log_if_wide(axes[0])
    axes[1].set(xlabel="ms per token, in writing (numbers: steps)")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.margins(y=0.12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", fontsize=8)
    return figure


def write(rows: list[dict], scores: list[str], folder: pathlib.Path) -> None:
    """Write the page, the picture and the numbers."""
    figure, cells = plot(rows), []
    figure.savefig(folder / "depth.png", dpi=130)
    for row in rows:
        found = [str(Value(**row["scores"][name])) if name in row["scores"] else "" for name in scores]
        cells.append([label(row), row["num_steps"], *(row[name] for name in COLUMNS), *found])
    table = report.table(["model", "steps", *COLUMNS.values(), *scores], cells)
    how = "Windows are disjoint. Times are of one text, on this machine, one model after the other."
    html = report.paragraph(how) + table + as_html(figure, "bits per byte over depth")
    about = {"text": rows[0]["text"], "bytes": rows[0]["bytes"], "device": jax.devices()[0].device_kind}
    section = report.Section("rows", "Quality, time and size by depth", html, rows, {})
    report.write(folder, f"{rows[0]['title']} at every depth", about, [section])


def report_depths(options) -> list[dict]:
    """Measure all rows, print them one by one, and write the report; returns the rows."""
    hosts.check_one("depth: this command")
    depths, rows = whole_numbers("--num_steps", options.num_steps, 1), []
    downstream = downstream_runs(pathlib.Path(options.downstream)) if options.downstream else []
    if options.output:  # before the work whose results it will hold
        results_folder(options.output, options.workdir)
    for workdir in (options.workdir, *options.beside):
        for row in measured(options, workdir, depths if workdir == options.workdir else []):
            if rows and row["bytes"] != rows[0]["bytes"]:
                raise UserError(f"--beside: {workdir} has another text of its own; name one for all with --files")
            rows.append(row)
            said = f"{row['bits_per_byte']:.4f} bits/byte, {row['milliseconds_per_token']:.2f} ms/token"
            print(f"{workdir}, {row['num_steps']} steps: {said}, {row['megabytes']:,.1f} MB of weights", flush=True)
    folder = results_folder(options.output, options.workdir, "depth")
    write(rows, add_scores(rows, downstream), folder)
    print(f"report.html, depth.png and results.json are in {folder}")
    return rows


def command() -> None:
    report_depths(flags.FLAGS)


if __name__ == "__main__":
    define_flags()
    command_line.run(command)
