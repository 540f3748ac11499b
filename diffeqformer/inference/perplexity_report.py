"""The results of `diffeqformer.evaluate`: a Markdown table, JSON, curves for TensorBoard and a figure."""

import itertools
import math
import pathlib

from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure
from diffeqformer.data.tokenizers import describe_lost
from diffeqformer.depth.depths import shares_of_depths
from diffeqformer.errors import counted

COLUMNS = {
    "solver": "solver",
    "num_steps": "steps",
    "paper_perplexity": "paper's perplexity",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "bits_per_byte": "bits/byte",
    "milliseconds_per_window": "ms/window",
}


def depths_of(results: dict) -> list[int]:
    """The numbers of steps in which a model was trained, by the header of its results."""
    return list(shares_of_depths(results["training_depths"])) or [results["trained_num_steps"]]


def as_trained(results: dict) -> str:
    """How a model was trained, by the header of its results."""
    depths = depths_of(results)
    return f"trained in {', '.join(map(str, depths))} step{'s' * (depths != [1])} of {results['trained_solver']}"


def text_name(results: dict) -> str:
    """What is scored (`text_options.name_of_text`), and from which local files."""
    files = results["files"]
    if not files:
        return results["text"]
    return f"{results['text']} ({files[0]}" + (f" and {len(files) - 1} more files)" if len(files) > 1 else ")")


def heading(results: dict) -> str:
    """Which model is scored, and on what."""
    return (
        f"{results['title']}: {results['kind']}, {results['parameters']:,} parameters, at step "
        f"{results['checkpoint_step']:,}, {as_trained(results)}\n{text_name(results)}; windows of "
        f"{results['window']}, stride {results['stride']}"
    )


def table(results: dict) -> str:
    """The results in Markdown."""
    first = results["rows"][0]
    columns = [name for name in COLUMNS if name in first]
    sizes = [counted(first[f"{name}s"], name) for name in ("document", "byte", "word", "token") if f"{name}s" in first]
    sizes = sizes or [f"{first['paper_tokens']:,} tokens"]
    lines = [
        heading(results),
        f"{', '.join(sizes)} ({results['tokenizer']})",
        "",
        "| " + " | ".join(COLUMNS[name] for name in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in results["rows"]:
        cells = [row["solver"], str(row["num_steps"])]
        for name in columns[2:]:
            digits = 4 if name == "bits_per_byte" else 2
            cells.append(f"{row[name]:,.{digits}f}" if row[name] < 1e5 else f"{row[name]:.3e}")
        lines.append("| " + " | ".join(cells) + " |")
    if lost := describe_lost(results["unknown_tokens"], results["altered_documents"]):
        withheld = ", so what is divided by words or bytes is withheld" * bool(results["unknown_tokens"])
        lines += ["", f"The tokenizer loses text: {lost}{withheld}."]
    return "\n".join(lines)


def curves(results: dict) -> dict[str, list[dict]]:
    """The rows of each curve over depth, by its name, in the order of their steps."""
    rows = sorted(results["rows"], key=lambda row: row["num_steps"])
    names = dict.fromkeys(row["solver"] for row in results["rows"])
    return {name: [row for row in rows if row["solver"] == name] for name in names}


def write_curves(results: dict, folder: pathlib.Path) -> None:
    """Write curves for TensorBoard: each metric over the steps of depth, of each solver as a run of its own."""
    import tensorboardX

    for name, rows in curves(results).items():
        with tensorboardX.SummaryWriter(str(folder / "tensorboard" / name)) as writer:
            for row in rows:
                for metric in list(COLUMNS)[2:]:
                    if math.isfinite(row.get(metric, math.nan)):
                        writer.add_scalar(f"{results['text']}/{metric}_over_depth", row[metric], row["num_steps"])


def plot(results: dict, path: pathlib.Path) -> None:
    """Plot perplexity against the number of steps, and against the time per window."""
    figure, [axes] = new_figure(1, 2, (10, 4), sharey=True)
    solvers = curves(results)
    metrics = [name for name in ("perplexity", "paper_perplexity") if name in results["rows"][0]]
    metrics = metrics[:1] if len(solvers) > 1 else metrics
    for colour, (solver, rows) in zip(itertools.cycle(COLOURS), solvers.items()):
        for axis, across in zip(axes, ("num_steps", "milliseconds_per_window")):
            for metric, line in zip(metrics, ("o-", "s--")):
                label = solver if len(solvers) > 1 else COLUMNS[metric]
                values = [row[across] for row in rows], [row[metric] for row in rows]
                axis.plot(*values, line, color=colour, label=label, markersize=4)
        for row in rows:
            place = row["milliseconds_per_window"], row[metrics[0]]
            offset = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
            axes[1].annotate(row["num_steps"], place, color=colour, fontsize=8, **offset)
    for axis in axes:
        axis.grid(alpha=0.3)
    steps = sorted({row["num_steps"] for row in results["rows"]})
    for number, trained in enumerate(sorted({*steps} & {*depths_of(results)})):
        axes[0].axvline(trained, color="grey", linestyle=":", label=None if number else "as trained")
    axes[0].set(xlabel="steps of depth", ylabel=COLUMNS[metrics[0]], xticks=steps)
    log_if_wide(axes[0])
    axes[0].margins(y=0.1)
    axes[1].set(xlabel=f"ms for a window of {results['window']} tokens (numbers: steps)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(f"{results['title']} at step {results['checkpoint_step']:,} on {text_name(results)}")
    figure.savefig(path, dpi=150)
