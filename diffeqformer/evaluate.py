"""Score a checkpoint: `python -m diffeqformer.evaluate --workdir=runs/tiny [--task=wikitext103] [--num_steps=4,6,8]`.

The perplexities are defined in docs/evaluation.md.
"""

import dataclasses
import itertools
import json
import statistics
import time

import jax
from absl import flags
from flax import nnx

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.results import header, results_folder, whole_numbers, write_json, write_text
from diffeqformer.console.terminal import show_progress
from diffeqformer.data.perplexities import WITHHELD
from diffeqformer.errors import UserError
from diffeqformer.inference.perplexity import heading, plot, table
from diffeqformer.inference.reader import with_solver, without_depth
from diffeqformer.inference.scoring import Scorer, Stretch, lead, window_size
from diffeqformer.inference.text_options import define_text_flags, name_of_text, open_text, text_of
from diffeqformer.parallel import hosts

PERPLEXITIES = {"paper": "disjoint windows", "full": "every token"}  # by the method of `Evaluation`
ROUNDS, ENOUGH = 7, 30.0  # of timing; after so many seconds no further one begins


def score_checkpoint(options) -> dict | None:
    """Score a checkpoint according to the options, then write and print the results.

    They are None on all processes but the first, which only help to score.
    """
    opened = checkpoint.load_on_all(options.workdir, options.step)
    config = opened.config.model
    window = window_size(options.window, opened.config, opened.model.max_length, "--window")
    for name in ("stride", "per_document"):
        if options.perplexity == "paper" and getattr(options, name):
            raise UserError(f"--{name}: is for the full perplexity, which --perplexity=paper leaves out; leave it out")
    stride = -(-window // 2) if options.stride is None else options.stride
    if not 1 <= stride <= window:
        raise UserError(f"--stride: must be at least 1 and at most {window:,}, but it is {stride}")
    steps = whole_numbers("--num_steps", options.num_steps, 1) or [config.num_steps]
    models = {name: with_solver(opened.model, name, config) for name in options.solver or [config.solver]}
    scorers = [  # invalid options fail here, before anything is scored
        ({"solver": name, "num_steps": number}, Scorer(models[name], number, options.batch_size))
        for name, number in itertools.product(models, steps)
    ]
    results = {
        **header(options.workdir, opened),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(opened.model, nnx.Param))),
        "tokenizer": opened.tokenizer.name,
        "window": window,
        "stride": stride,
        "batch_size": options.batch_size,
        "dtype": config.dtype,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
    opened, models = dataclasses.replace(opened, model=without_depth(opened.model)), {}  # frees a hypernetwork's memory
    naming = logits_of(f"{options.workdir}, checkpoint {opened.step}")
    return lead([scorer for _, scorer in scorers], naming(lambda: score_text(opened, options, results, scorers)))


def score_text(opened: checkpoint.Checkpoint, options, results: dict, scorers: list[tuple[dict, Scorer]]) -> dict:
    """Score the text of the options with every scorer, then write and print the results."""
    task, files, stored = text_of(options, opened)
    evaluation = open_text(options, opened, task, files, stored, results["window"], results["stride"])
    chosen = {name: what for name, what in PERPLEXITIES.items() if options.perplexity in (name, "both")}
    if "paper" in chosen:
        _ = evaluation.windows  # an error comes before anything is compiled
    name = name_of_text(options, task, files)
    folder = results_folder(options.output, options.workdir, "evaluation", name)
    results = {**results, "text": name, "task": task, "files": files, "split": options.split, "rows": []}
    accounts, lines = evaluation.accounts(opened.tokenizer), []
    results["unknown_tokens"] = sum(account["unknown_tokens"] for account in accounts)
    results["altered_documents"] = sum(account["altered"] for account in accounts)
    if stored and not opened.tokenizer.exact and stored.altered != 0:  # its texts are what ids decode to
        results["altered_documents"] = stored.altered
        accounts = [{**account, "bytes": None, "altered": None} for account in accounts]
    print(heading(results), flush=True)
    times = time_windows([scorer for _, scorer in scorers], results["window"])
    for (how, scorer), milliseconds in zip(scorers, times):
        row = {**how, "milliseconds_per_window": milliseconds}
        for name, what in chosen.items():
            show = show_progress(f"{row['solver']}, {row['num_steps']} steps, {what}")
            row |= getattr(evaluation, name)(scorer, show)
        row |= WITHHELD if results["unknown_tokens"] and "full" in chosen else {}
        results["rows"].append(row)
        write_json(folder / "results.json", results)
        write_text(folder / "results.md", table(results) + "\n")
        if options.per_document:
            lines += [json.dumps(how | document) for document in evaluation.scored(accounts)]
            write_text(folder / "documents.jsonl", "\n".join(lines) + "\n")
    print(f"\n{table(results)}\n\nThis table and results.json are in {folder}", flush=True)
    if len(scorers) > 1:
        plot(results, folder / "perplexity.png")
        print("and perplexity.png beside them")
    return results


def time_windows(scorers: list[Scorer], window: int) -> list[float]:
    """Milliseconds that scorers of one batch size take for a window of a full batch: medians of alternating rounds."""
    seconds, windows = [[] for _ in scorers], [Stretch([0] * window, 1)] * scorers[0].batch_size  # any ids
    begun = time.monotonic()
    while len(seconds[0]) < 2 or (len(seconds[0]) <= ROUNDS and time.monotonic() - begun < ENOUGH):
        for scorer, times in zip(scorers, seconds):
            start = time.monotonic()
            scorer(windows)
            times.append((time.monotonic() - start) / len(windows))
    return [1000 * statistics.median(times[1:]) for times in seconds]  # the first round compiled


if __name__ == "__main__":
    define_text_flags("evaluation")
    flags.DEFINE_list("num_steps", [], "Steps of depth, one row for each number; by default as in training.")
    flags.DEFINE_list("solver", [], "Solvers, each with every number of steps; by default the trained one.")
    help_text = "Which to compute; paper alone takes a third of the time."
    flags.DEFINE_enum("perplexity", "both", ("both", *PERPLEXITIES), help_text)
    flags.DEFINE_integer("stride", None, "Tokens between the starts of the full perplexity's windows; by default half.")
    flags.DEFINE_bool("per_document", False, "Also write the full perplexity's score of each document.")
    hosts.define_flags()
    command_line.run(hosts.joined(flags.FLAGS)(lambda: score_checkpoint(flags.FLAGS)))
