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
from typing import NamedTuple

import jax
from absl import flags

from diffeqformer.analysis import report
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.figures import as_html
from diffeqformer.console.results import header, results_folder, whole_numbers, write_json
from diffeqformer.console.terminal import show_progress
from diffeqformer.data.perplexities import WITHHELD
from diffeqformer.depth.depths import trained_depths
from diffeqformer.errors import UserError, reachable
from diffeqformer.inference.harness_tasks import shown_value
from diffeqformer.inference.perplexity import plot_by_depth
from diffeqformer.inference.sampling import write_tokens
from diffeqformer.inference.scoring import Scorer, window_size
from diffeqformer.inference.text_options import define_text_flags, open_text, text_of
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Transformer, abstract_model, random_key, split_model, weights_of

COLUMNS = {"bits_per_byte": "bits/byte", "milliseconds_per_token": "ms/token", "megabytes": "weights, MB (fp32)"}


class Run(NamedTuple):
    """A checkpoint, before anything is measured."""

    workdir: str
    opened: checkpoint.Opened
    megabytes: dict[int, float]  # by steps of depth


def planned(options) -> list[Run]:
    """All runs, by configs alone. A UserError if one has no checkpoint, or can't take one of the numbers of steps."""
    runs, depths = [], whole_numbers("--num_steps", options.num_steps, 1)
    for workdir in (options.workdir, *options.beside):
        own = workdir == options.workdir
        option, step = ("--workdir", options.step) if own else ("--beside", None)
        opened = checkpoint.open_to_read(workdir, option, step)
        model, numbers = abstract_model(opened.config), (depths if own else []) or trained_depths(opened.config.model)
        runs.append(Run(workdir, opened, {number: megabytes(model, number) for number in numbers}))
    return runs


def megabytes(model: Transformer, num_steps: int) -> float:
    """The size in fp32 of the weights of all steps and the embeddings.

    Where it can be exported and has neither adapters nor padding, that is the size of the exported model.
    """
    graph, params = split_model(model)
    layers = jax.eval_shape(functools.partial(weights_of, graph, num_steps=num_steps), params).layers
    of_steps = sum(leaf.size for leaf in jax.tree.leaves(layers)) * (num_steps if model.depth.constant else 1)
    others = sum(leaf.size for name, part in params.items() if name != "depth" for leaf in jax.tree.leaves(part))
    return 4 * (of_steps + others) / 1e6


def milliseconds_per_token(opened: checkpoint.Checkpoint, num_steps: int) -> float:
    """The time in which a short text grows by a token: the median of those after the first two, which compile."""
    model = opened.model
    how = {"key": random_key(0, "sample"), "vocab_size": opened.tokenizer.vocab_size, "num_steps": num_steps}
    written = write_tokens(model, [0], count=min(34, model.max_length - 1), **how)
    times = [time.monotonic() for _ in written]
    return 1000 * statistics.median(after - before for before, after in itertools.pairwise(times[1:]))


def measured(options, run: Run, window: int) -> Iterator[dict]:
    """What is found for one run in each number of steps, in windows of so many tokens."""
    workdir, step = run.workdir, run.opened.step
    opened = checkpoint.load(workdir, step=step)
    evaluation = open_text(options, opened, *text_of(options, opened), window, window)
    unknown = sum(account["unknown_tokens"] for account in evaluation.accounts(opened.tokenizer))
    for num_steps, size in run.megabytes.items():
        scorer, show = Scorer(opened.model, num_steps, options.batch_size), show_progress(workdir)
        with logits_of(f"{workdir}, checkpoint {step}"):
            found = evaluation.full(scorer, show) | (WITHHELD if unknown else {})
        del scorer  # and its weights
        about = {**header(workdir, opened), "num_steps": num_steps, "dtype": opened.config.model.dtype}
        about |= {"text": evaluation.name, "window": window, "unknown_tokens": unknown, **found}
        about["milliseconds_per_token"] = milliseconds_per_token(opened, num_steps)
        yield about | {"megabytes": size}


def downstream_scores(folder: pathlib.Path, plan: list[Run]) -> dict[tuple[str, int, int], dict[str, str]]:
    """What `diffeqformer.downstream` has found, as text, by full path, step of the checkpoint and steps of depth.

    Raises a UserError if the folder has no results, or none of these runs.
    """
    try:
        with reachable("--downstream", folder):
            runs = json.loads((folder / "results.json").read_text())["runs"]
        found = {}
        for run in runs:
            place = os.path.realpath(run["workdir"]), run["checkpoint_step"], run["num_steps"]
            shown = {task: shown_value(results, run["shots"]) for task, results in run["tasks"].items()}
            scores = {f"{task}, {run['shots']} shots": str(value) for task, value in shown.items()}
            found.setdefault(place, {}).update(scores)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise UserError(f"--downstream: {folder} has no results of diffeqformer.downstream") from None
    if not found.keys() & {(os.path.realpath(run.workdir), run.opened.step, n) for run in plan for n in run.megabytes}:
        raise UserError(f"--downstream: {folder} has no results of these checkpoints in these numbers of steps")
    return found


def label(row: dict) -> str:
    """What a curve is called."""
    return f"{row['title']} ({row['workdir']})"


def write(rows: list[dict], folder: pathlib.Path) -> None:
    """Write the page, the picture and the numbers."""
    figure, axes = plot_by_depth(rows, label, "bits_per_byte", "milliseconds_per_token")
    axes[0].set_ylabel("bits per byte")
    axes[1].set_xlabel("ms per token, in writing (numbers: steps)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", fontsize=8)
    figure.savefig(folder / "depth.png", dpi=130)
    cells, scores = [], list(dict.fromkeys(name for row in rows for name in row["scores"]))
    for row in rows:
        found = [row["scores"].get(name, "") for name in scores]
        cells.append([label(row), row["num_steps"], *(row[name] for name in COLUMNS), *found])
    table = report.table(["model", "steps", *COLUMNS.values(), *scores], cells)
    how = f"Windows of {rows[0]['window']} tokens, disjoint. Times are of one text, one model after the other."
    html = report.paragraph(how) + table + as_html(figure, "bits per byte over depth")
    about = {"text": rows[0]["text"], "bytes": rows[0]["bytes"], "device": jax.devices()[0].device_kind}
    section = report.Section("rows", "Quality, time and size by depth", html, rows, {})
    report.write(folder, f"{rows[0]['title']} at every depth", about, [section])


def report_depths(options) -> list[dict]:
    """Measure all rows, print them one by one, and write the report; returns what it says of each."""
    hosts.check_one("depth: this command")
    plan, rows = planned(options), []
    scores = downstream_scores(pathlib.Path(options.downstream), plan) if options.downstream else {}
    model = plan[0].opened.config
    window = window_size(options.window, model, min(run.opened.config.model.max_length for run in plan), "--window")
    folder = results_folder(options.output, options.workdir, "depth")
    for run in plan:
        for row in measured(options, run, window):
            if rows and row["bytes"] != rows[0]["bytes"]:
                raise UserError(f"--beside: {row['workdir']} has another text of its own; name one with --files")
            place = os.path.realpath(row["workdir"]), row["checkpoint_step"], row["num_steps"]
            rows.append(row | {"scores": scores.get(place, {})})
            said = f"{row['bits_per_byte']:.4f} bits/byte, {row['milliseconds_per_token']:.2f} ms/token"
            print(f"{label(row)}, {row['num_steps']} steps: {said}, {row['megabytes']:,.1f} MB of weights", flush=True)
            write_json(folder / "rows.json", rows)
    write(rows, folder)
    (folder / "rows.json").unlink()  # which results.json has
    print(f"report.html, depth.png and results.json are in {folder}")
    return rows


if __name__ == "__main__":
    define_text_flags("depth")
    flags.DEFINE_list("num_steps", [], "Steps of depth; by default all of training.")
    flags.DEFINE_list("beside", [], "Folders of other runs, each in the steps of its training.")
    help_text = "Folder of results of diffeqformer.downstream whose scores are shown, too."
    flags.DEFINE_string("downstream", None, help_text)
    command_line.run(lambda: report_depths(flags.FLAGS))
