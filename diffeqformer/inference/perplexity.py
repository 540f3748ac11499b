"""The two perplexities of a text (docs/evaluation.md defines them), and the table and figure of them by depth."""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Int

from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure
from diffeqformer.console.results import markdown_table
from diffeqformer.data.perplexities import text_results, window_results
from diffeqformer.data.tokenizers import Tokenizer, describe_lost, lost_in
from diffeqformer.depth.depths import shares_of_depths
from diffeqformer.errors import UserError, counted
from diffeqformer.inference.scoring import Scorer, Show, Stretch, sliding_windows

GROUP = 4096  # windows held in memory at once
COLUMNS = {
    "solver": "solver",
    "num_steps": "steps",
    "paper_perplexity": "paper's perplexity",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "bits_per_byte": "bits/byte",
    "milliseconds_per_window": "ms/window",
}


@dataclasses.dataclass
class Evaluation:
    """A text, to be scored by one or more models."""

    documents: list[tuple[str, list[int]]]  # texts and their ids, of which the last is end-of-text
    name: str
    window: int
    stride: int  # tokens between the starts of the full perplexity's windows
    bytes: int | None = None  # of the text before a tokenizer changed it; None: those of the documents

    def __post_init__(self):
        if not self.documents:
            raise UserError(f"{self.name}: there is nothing in it but white space; choose another text")

    @functools.cached_property
    def windows(self) -> Int[np.ndarray, "N window"]:
        """All disjoint windows; raises a UserError if there is none."""
        stream = np.array([i for _, ids in self.documents for i in ids], np.int32)
        if len(stream) < self.window:
            raise UserError(
                f"{self.name} has {len(stream):,} tokens, fewer than one window of {self.window}; choose a smaller "
                "--window"
            )
        return stream[: len(stream) // self.window * self.window].reshape(-1, self.window)

    def paper(self, scorer: Scorer, show: Show) -> dict[str, float]:
        """The paper's perplexity."""
        scored = self.windows.size - len(self.windows)
        sums = _log_likelihoods([[Stretch(ids, 1)] for ids in self.windows.tolist()], scored, scorer, show)
        return window_results(sum(sums), scored)

    def full(self, scorer: Scorer, show: Show) -> dict[str, float]:
        """The full perplexity, per token, word and byte."""
        every = [ids for _, ids in self.documents]
        stretches = (sliding_windows(ids[:-1], self.window, self.stride, ids[-1]) for ids in every)
        tokens = sum(map(len, every)) - len(every)
        self.nats = [-total for total in _log_likelihoods(stretches, tokens, scorer, show)]
        words = sum(len(text.split()) for text, _ in self.documents)
        size = sum(len(text.encode()) for text, _ in self.documents) if self.bytes is None else self.bytes
        return {**text_results(-sum(self.nats), tokens, words, size), "documents": len(every)}

    def accounts(self, tokenizer: Tokenizer) -> list[dict[str, int]]:
        """Of each document: its bytes, its tokens without end-of-text, and what the tokenizer loses (`lost_in`)."""
        return [
            {"bytes": len(text.encode()), "tokens": len(ids) - 1, "unknown_tokens": unknown, "altered": int(altered)}
            for text, ids in self.documents
            for unknown, altered in [lost_in(tokenizer, text, ids)]
        ]

    def scored(self, accounts: list[dict]) -> Iterator[dict]:
        """Each document's number and account, with its negative log-likelihood by the last full perplexity."""
        for number, (account, nats) in enumerate(zip(accounts, self.nats, strict=True)):
            known = account["bytes"] and not account["unknown_tokens"]
            bits = nats / math.log(2) / account["bytes"] if known else None
            yield {"document": number, **account, "nats": nats, "bits_per_byte": bits}


def _log_likelihoods(examples: Iterable[Iterable[Stretch]], total: int, scorer: Scorer, show: Show) -> list[float]:
    """The log-likelihood in nats of each example."""
    sums, done = [], 0
    every = ((number, stretch) for number, stretches in enumerate(examples) for stretch in stretches)
    while group := list(itertools.islice(every, GROUP)):
        found = scorer([stretch for _, stretch in group], lambda here, _: show(done + here, total))
        for (number, _), scores in zip(group, found):
            sums += [0.0] * (number + 1 - len(sums))
            sums[number] += float(np.sum(scores.log_probs, dtype=np.float64))
            done += len(scores.log_probs)
    return sums


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


def plain(number: float, digits: int = 2) -> str:
    """A perplexity, or another number in a table of them, with some digits after the point unless it is large."""
    return f"{number:,.{digits}f}" if number < 1e5 else f"{number:.3e}"


def table(results: dict) -> str:
    """The results in Markdown."""
    first = results["rows"][0]
    columns = [name for name in COLUMNS if name in first]
    sizes = [counted(first[f"{name}s"], name) for name in ("document", "byte", "word", "token") if f"{name}s" in first]
    sizes = sizes or [f"{first['paper_tokens']:,} tokens"]
    rows = []
    for row in results["rows"]:
        cells = [plain(row[name], 4 if name == "bits_per_byte" else 2) for name in columns[2:]]
        rows.append([row["solver"], str(row["num_steps"]), *cells])
    lines = [heading(results), f"{', '.join(sizes)} ({results['tokenizer']})", ""]
    lines.append(markdown_table([COLUMNS[name] for name in columns], rows))
    if lost := describe_lost(results["unknown_tokens"], results["altered_documents"]):
        withheld = ", so what is divided by words or bytes is withheld" * bool(results["unknown_tokens"])
        lines += ["", f"The tokenizer loses text: {lost}{withheld}."]
    return "\n".join(lines)


def plot_by_depth(rows: list[dict], name: Callable[[dict], str], metric: str, time: str):
    """A figure of a metric against the steps of depth, and against a time; rows of one name are a line."""
    figure, [axes] = new_figure(1, 2, (11, 4), sharey=True)
    curves, numbered = {}, set()
    for row in sorted(rows, key=lambda row: row["num_steps"]):
        curves.setdefault(name(row), []).append(row)
    for colour, (label, curve) in zip(itertools.cycle(COLOURS), curves.items()):
        for axis, across in zip(axes, ("num_steps", time)):
            values = [row[across] for row in curve], [row[metric] for row in curve]
            axis.plot(*values, "o-" if len(curve) > 1 else "D", color=colour, label=label, markersize=5)
        for row in curve:
            place, offset = (row[time], row[metric]), {"xytext": (0, 6), "ha": "center"}
            if (row["num_steps"], row[time]) not in numbered:  # curves of one time have one number
                axes[1].annotate(
                    row["num_steps"], place, textcoords="offset points", color=colour, fontsize=8, **offset
                )
            numbered.add((row["num_steps"], row[time]))
    axes[0].set(xlabel="steps of depth", xticks=sorted({row["num_steps"] for row in rows}))
    log_if_wide(axes[0])
    for axis in axes:
        axis.margins(y=0.12)
    return figure, axes


def plot(results: dict, path: pathlib.Path) -> None:
    """Plot perplexity against the number of steps, and against the time per window."""
    rows = results["rows"]
    metrics = [name for name in ("perplexity", "paper_perplexity") if name in rows[0]]
    if {row["solver"] for row in rows} == {rows[0]["solver"]}:
        curves = [{**row, "curve": COLUMNS[name], "perplexity": row[name]} for name in metrics for row in rows]
    else:
        curves = [{**row, "curve": row["solver"], "perplexity": row[metrics[0]]} for row in rows]
    figure, axes = plot_by_depth(curves, lambda row: row["curve"], "perplexity", "milliseconds_per_window")
    for number, trained in enumerate(sorted({row["num_steps"] for row in rows} & {*depths_of(results)})):
        axes[0].axvline(trained, color="grey", linestyle=":", label=None if number else "as trained")
    axes[0].set_ylabel(COLUMNS[metrics[0]])
    axes[1].set_xlabel(f"ms for a window of {results['window']} tokens (numbers: steps)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(f"{results['title']} at step {results['checkpoint_step']:,} on {text_name(results)}")
    figure.savefig(path, dpi=150)
