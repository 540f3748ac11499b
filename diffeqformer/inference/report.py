"""The results of `diffeqformer.evaluate`: a Markdown table, JSON, curves for TensorBoard and a figure."""

import itertools
import json
import pathlib

from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure
from diffeqformer.console.results import write_text

COLUMNS = {
    "solver": "solver",
    "num_steps": "steps",
    "paper_perplexity": "paper's perplexity",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "bits_per_byte": "bits/byte",
    "milliseconds_per_window": "ms/window",
}


def name_of(row: dict) -> str:
    """A row's solver, and the tolerance that chose its grid."""
    return row["solver"] + (f", tolerance {row['tolerance']:g}" if "tolerance" in row else "")


def series_of(row: dict) -> str:
    """The name of the curve that a row belongs to."""
    return row["solver"] + (" by tolerance" if "tolerance" in row else "")


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
        f"{first['documents']:,} documents, {first['bytes']:,} bytes, {first['words']:,} words, "
        f"{first['tokens']:,} tokens ({results['tokenizer']})",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in results["rows"]:
        perplexities = (row[name] for name in list(COLUMNS)[2:5])
        cells = [name_of(row), str(row["num_steps"])]
        cells += [f"{value:,.2f}" if value < 1e5 else f"{value:.3e}" for value in perplexities]
        cells += [f"{row['bits_per_byte']:.4f}", f"{row['milliseconds_per_window']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(results: dict, folder: pathlib.Path) -> None:
    """Write the results so far as JSON and Markdown, and the newest row for TensorBoard."""
    import tensorboardX

    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(folder / "results.md", table(results) + "\n")
    row = results["rows"][-1]
    name = f"{row['solver']}_{row['num_steps']}_steps" + (f"_{row['tolerance']:g}" if "tolerance" in row else "")
    with tensorboardX.SummaryWriter(str(folder), filename_suffix=f".{name}") as writer:
        for metric in list(COLUMNS)[2:]:
            tag = f"{results['task']}-{results['split']}/{metric}/{name}"
            writer.add_scalar(tag, row[metric], results["checkpoint_step"])


def plot(results: dict, path: pathlib.Path) -> None:
    """Plot perplexity against the number of steps, and against the time per window."""
    figure, [axes] = new_figure(1, 2, (10, 4), sharey=True)
    solvers = list(dict.fromkeys(map(series_of, results["rows"])))
    curves = {"perplexity": "o-"} if len(solvers) > 1 else {"paper_perplexity": "s--", "perplexity": "o-"}
    for colour, solver in zip(itertools.cycle(COLOURS), solvers):
        rows = sorted((row for row in results["rows"] if series_of(row) == solver), key=lambda row: row["num_steps"])
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
