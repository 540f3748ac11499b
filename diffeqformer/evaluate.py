"""Score a checkpoint: `python -m diffeqformer.evaluate --workdir=runs/tiny [--task=wikitext103] [--num_steps=4,6,8]`.

The perplexities are defined in docs/evaluation.md.
"""

import itertools
import json
import pathlib
import statistics
import time

import jax
import tensorboardX
from absl import flags
from flax import nnx

from diffeqformer import checkpoint
from diffeqformer.console import command_line
from diffeqformer.console.progress import show_progress
from diffeqformer.console.results import results_folder, whole_numbers, write_text
from diffeqformer.data.preparation import matching_files
from diffeqformer.errors import UserError
from diffeqformer.inference.calibration import calibration_tokens, choose_times
from diffeqformer.inference.scoring import Scorer
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, solvers_of

COLUMNS = {
    "solver": "solver",
    "num_steps": "steps",
    "paper_perplexity": "paper's perplexity",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "bits_per_byte": "bits/byte",
    "milliseconds_per_window": "ms/window",
}


def define_text_flags(folder: str) -> None:
    """The options that choose a model, a text and the `folder` of results, for all commands that score."""
    flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    flags.DEFINE_string("task", None, "The corpus; by default the one of the training.")
    flags.DEFINE_string("split", "validation", "Its split: validation, or test where there is one.")
    flags.DEFINE_string(
        "files",
        None,
        "Local files in its place (.txt, .jsonl, .parquet; patterns, with commas); empty: the corpus itself.",
    )
    flags.DEFINE_string("module", None, "A Python module that adds corpora; by default the one of the training.")
    flags.DEFINE_string("tfds_dir", None, "Where corpora are downloaded to; by default as in training.")
    flags.DEFINE_integer("window", None, "Tokens of a window; by default as many as in training.")
    flags.DEFINE_integer("batch_size", 16, "Windows scored at once, over all devices.")
    flags.DEFINE_string(
        "output", None, f"Folder of the results; by default <workdir>/{folder}, or within runs/ for one on gs://."
    )


def define_flags() -> None:
    """The options of the command."""
    define_text_flags("evaluation")
    flags.DEFINE_list("num_steps", [], "Steps of depth, one row for each number; by default as many as trained.")
    flags.DEFINE_list("solver", [], "Solvers, each with every number of steps; by default the trained one.")
    flags.DEFINE_list(
        "tolerance", [], "Tolerances, each of which chooses a grid for Heun's method, on calibration text."
    )
    flags.DEFINE_string("calibration_files", None, "Local files with that text (.txt, .jsonl, .parquet; patterns).")
    flags.DEFINE_integer(
        "stride", None, "Tokens by which the full perplexity's windows move on; by default half of one."
    )


def text_of(options, opened: checkpoint.Checkpoint) -> tuple[str, list[str] | None]:
    """The corpus to be read, and the local files in its place: by default those of the training.

    Raises:
        UserError: if no file matches.
    """
    data = opened.config.data
    task = options.task or data.task
    patterns, name = options.files, "--files"
    if patterns is None and task == data.task and options.split in ("train", "validation"):
        patterns, name = (
            data[f"{options.split}_files"],
            f"--files: those of the training, config.data.{options.split}_files",
        )
    return task, matching_files(patterns, name) if patterns else None


def window_of(options, opened: checkpoint.Checkpoint) -> int:
    """Tokens of a window.

    Raises:
        UserError: if the model doesn't have so many positions.
    """
    window, most = options.window, opened.model.max_length
    window = opened.config.sequence_length if window is None else window
    if not 2 <= window <= most:
        raise UserError(f"--window: must be at least 2 and at most {most:,}, but it is {window}")
    return window


def open_text(options, opened: checkpoint.Checkpoint, task: str, files: list[str] | None, window: int, stride: int):
    """The text to be scored, a `diffeqformer.inference.perplexity.Evaluation`; TensorFlow comes with it.

    Raises:
        UserError: if there is no such text, or less than one window.
    """
    from diffeqformer.data.quiet import import_tensorflow

    import_tensorflow()
    from diffeqformer.data import tasks
    from diffeqformer.inference.perplexity import Evaluation

    data = opened.config.data
    tasks.configure(
        data.module if options.module is None else options.module,
        data.tfds_dir if options.tfds_dir is None else options.tfds_dir,
    )
    return Evaluation(task, options.split, opened.tokenizer, window, stride, files)


def calibrated(opened: checkpoint.Checkpoint, options, window: int) -> dict[float, tuple[float, ...]]:
    """The grid of each tolerance.

    Raises:
        UserError: if there is no text to calibrate on, the model's weights aren't generated, or a tolerance can't be met.
    """
    if not options.tolerance:
        return {}
    if MODELS[opened.config.model.kind].weights != "generated":
        raise UserError(
            f"--tolerance: needs generated weights, but the model is of the kind {opened.config.model.kind}"
        )
    if not options.calibration_files:
        raise UserError("--calibration_files: must name the text on which --tolerance chooses a grid")
    try:
        tolerances = [float(text) for text in options.tolerance]
    except ValueError:
        raise UserError(f"--tolerance: must be numbers with commas between, but it is {options.tolerance}") from None
    for tolerance in tolerances:
        if not 0 < tolerance < float("inf"):
            raise UserError(f"--tolerance: must be positive numbers, but it has {tolerance:g}")
    tokens = calibration_tokens(options.calibration_files, opened.tokenizer, window)
    return {tolerance: choose_times(opened.model, tokens, tolerance) for tolerance in tolerances}


def make_scorers(opened: checkpoint.Checkpoint, options, window: int) -> list[tuple[dict, Scorer]]:
    """What each row of the table is about, and its scorer.

    Raises:
        UserError: if the model can't have one of them, or there are none of a name.
    """
    config, solvers, steps = opened.config.model, options.solver, whole_numbers("--num_steps", options.num_steps, 1)
    possible = solvers_of(config.kind)
    if MODELS[config.kind].weights == "per_layer":  # whose weights are those of one time in each step
        possible = [name for name in possible if SOLVERS[name].nodes == SOLVERS[config.solver].nodes]
    for name in solvers:
        if name not in possible:
            raise UserError(
                f"--solver: must be one of {', '.join(possible)} for this model of the kind {config.kind}, but it is {name!r}"
            )
    grids = calibrated(opened, options, window)
    rows = [
        ({"solver": name, "num_steps": number}, number)
        for name, number in itertools.product(solvers or [config.solver], steps or [config.num_steps])
    ]
    rows += [
        ({"solver": "heun", "num_steps": len(times), "tolerance": tolerance, "times": times}, times)
        for tolerance, times in grids.items()
    ]
    scorers = []
    for row, grid in rows:
        model = opened.model.replace(solver=SOLVERS[row["solver"]])
        scorers.append((row, Scorer(model, grid, options.batch_size)))
    return scorers


def name_of(row: dict) -> str:
    """A row's solver, and the tolerance that chose its grid."""
    return row["solver"] + (f", tolerance {row['tolerance']:g}" if "tolerance" in row else "")


def evaluate(options) -> dict:
    """Score a checkpoint as the options say, and write and print the results.

    Raises:
        UserError: for whatever the user can put right.
    """
    opened = checkpoint.load(options.workdir)
    model, config = opened.model, opened.config
    window = window_of(options, opened)
    stride = -(-window // 2) if options.stride is None else options.stride
    if not 1 <= stride <= window:
        raise UserError(f"--stride: must be at least 1 and at most {window:,}, but it is {stride}")
    scorers = make_scorers(opened, options, window)  # what can't be is said now
    task, files = text_of(options, opened)
    evaluation = open_text(options, opened, task, files, window, stride)
    folder = results_folder(options.output, options.workdir, "evaluation", f"{task}-{options.split}")
    results = {
        "workdir": str(options.workdir),
        "config": config.name,
        "kind": config.model.kind,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "checkpoint_step": opened.step,
        "trained_solver": config.model.solver,
        "trained_num_steps": config.model.num_steps,
        "task": task,
        "files": files,
        "split": options.split,
        "tokenizer": opened.tokenizer.name,
        "window": window,
        "stride": stride,
        "batch_size": options.batch_size,
        "dtype": config.model.dtype,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "rows": [],
    }
    print(heading(results), flush=True)
    times = time_windows(evaluation, [scorer for _, scorer in scorers])
    for (row, scorer), milliseconds in zip(scorers, times):
        name = f"{name_of(row)}, {row['num_steps']} steps"
        paper = evaluation.paper(scorer, show_progress(f"{name}, disjoint windows"))
        full = evaluation.full(scorer, show_progress(f"{name}, every token"))
        row = {**row, **paper, **full, "milliseconds_per_window": milliseconds}
        results["rows"].append(row)
        write(results, folder)
    print(f"\n{table(results)}\n\nThis table, results.json and curves are in {folder}", flush=True)
    if len(scorers) > 1:
        plot(results, folder / "perplexity.png")
        print("and perplexity.png beside them")
    return results


def time_windows(evaluation, scorers: list[Scorer], rounds: int = 7) -> list[float]:
    """Milliseconds that each scorer takes for one window of a full batch: medians of rounds in which each has its turn."""
    seconds = [[] for _ in scorers]
    for _ in range(rounds + 1):
        for scorer, times in zip(scorers, seconds):
            windows = evaluation.first_windows(scorer.batch_size)
            start = time.monotonic()
            scorer(windows)
            times.append((time.monotonic() - start) / len(windows))
    return [1000 * statistics.median(times[1:]) for times in seconds]  # the first round compiled


def heading(results: dict) -> str:
    """Which model is scored, and on what."""
    return (
        f"{results['config']}: {results['kind']}, {results['parameters']:,} parameters, at step "
        f"{results['checkpoint_step']:,}, trained in {results['trained_num_steps']} "
        f"steps of {results['trained_solver']}\n{text_name(results)}; windows of "
        f"{results['window']}, stride {results['stride']}"
    )


def text_name(results: dict) -> str:
    """The corpus and its split, or the local files."""
    files = results["files"]
    if not files:
        return f"{results['task']}, {results['split']}"
    return f"{results['task']}, {files[0]}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def table(results: dict) -> str:
    """The results in Markdown."""
    first = results["rows"][0]
    lines = [
        heading(results),
        f"{first['documents']:,} documents, {first['bytes']:,} bytes, {first['words']:,} words, {first['tokens']:,} tokens "
        f"({results['tokenizer']})",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in results["rows"]:
        large = lambda value: f"{value:,.2f}" if value < 1e5 else f"{value:.3e}"  # noqa: E731
        cells = [name_of(row), str(row["num_steps"]), *(large(row[name]) for name in list(COLUMNS)[2:5])]
        cells += [f"{row['bits_per_byte']:.4f}", f"{row['milliseconds_per_window']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(results: dict, folder: pathlib.Path) -> None:
    """Write the results so far as JSON and Markdown, and the newest row for TensorBoard."""
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(folder / "results.md", table(results) + "\n")
    row = results["rows"][-1]
    name = f"{row['solver']}_{row['num_steps']}_steps" + (f"_{row['tolerance']:g}" if "tolerance" in row else "")
    with tensorboardX.SummaryWriter(str(folder), filename_suffix=f".{name}") as writer:
        for metric in list(COLUMNS)[2:]:
            tag = f"{results['task']}-{results['split']}/{metric}/{name}"
            writer.add_scalar(tag, row[metric], results["checkpoint_step"])


def plot(results: dict, path: pathlib.Path) -> None:
    """Draw perplexity against the number of steps, and against the time that a window takes."""
    from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure

    figure, [axes] = new_figure(1, 2, (10, 4), sharey=True)
    series = lambda row: row["solver"] + (" by tolerance" if "tolerance" in row else "")  # noqa: E731
    solvers = list(dict.fromkeys(map(series, results["rows"])))
    curves = {"perplexity": "o-"} if len(solvers) > 1 else {"paper_perplexity": "s--", "perplexity": "o-"}
    for colour, solver in zip(itertools.cycle(COLOURS), solvers):
        rows = sorted((row for row in results["rows"] if series(row) == solver), key=lambda row: row["num_steps"])
        for axis, across in zip(axes, ("num_steps", "milliseconds_per_window")):
            for metric, line in curves.items():
                label = solver if len(solvers) > 1 else COLUMNS[metric]
                values = [row[across] for row in rows], [row[metric] for row in rows]
                axis.plot(*values, line, color=colour, label=label, markersize=4)
        for row in rows:
            place = row["milliseconds_per_window"], row["perplexity"]
            offset = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
            axes[1].annotate(row["num_steps"], place, color=colour, fontsize=8, **offset)
    for axis in axes:
        axis.grid(alpha=0.3)
    steps = sorted({row["num_steps"] for row in results["rows"]})
    trained = results["trained_num_steps"]
    if trained in steps:
        axes[0].axvline(trained, color="grey", linestyle=":", label="as trained")
    axes[0].set(xlabel="steps of depth", ylabel="perplexity", xticks=steps)
    log_if_wide(axes[0])
    axes[0].margins(y=0.1)
    axes[1].set(xlabel=f"ms for a window of {results['window']} tokens (numbers: steps)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(f"{results['config']} at step {results['checkpoint_step']:,} on {text_name(results)}")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    define_flags()
    command_line.run(lambda: evaluate(flags.FLAGS))
