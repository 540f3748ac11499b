"""The report of `analyze`: one self-contained HTML file, and its numbers as JSON and NPZ; and what sections share."""

import dataclasses
import functools
import html
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console.results import whole_file, write_json, write_text
from diffeqformer.errors import UserError
from diffeqformer.transformer import Transformer

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 1250px; margin: 2em auto; padding: 0 1em; }
img { max-width: 100%; } h1 { font-size: 1.5em; }
h2 { font-size: 1.2em; margin-top: 2em; border-top: 1px solid #ccc; padding-top: 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.text { font-family: monospace; white-space: pre-wrap; line-height: 2; margin: .5em 0 1em; }
.text span { padding: .15em 0; } .text span:last-child { outline: 2px solid #0072b2; }
"""


@dataclasses.dataclass
class Section:
    """One part of a report."""

    name: str  # its key in JSON and NPZ
    title: str
    html: str  # built with the functions below
    numbers: dict | list  # stored in JSON
    arrays: dict[str, np.ndarray]  # stored in NPZ


def in_float32(section: Callable) -> Callable:
    """Compute a section in fp32 throughout, regardless of the checkpoint's types and the backend's usual precision."""

    @functools.wraps(section)
    def run(opened: Checkpoint, *arguments, **options):
        float32 = jnp.dtype(jnp.float32)
        model = opened.model.replace(dtype=float32)
        with jax.default_matmul_precision("highest"):
            return section(dataclasses.replace(opened, model=model), *arguments, **options)

    return run


def check_text(model: Transformer, ids: list[int], name: str) -> None:
    """Check that a text, from the option `name`, has enough tokens for a section and fits into the positions."""
    if not 2 <= len(ids) <= model.max_length:
        raise UserError(
            f"{name}: must have at least 2 tokens and at most {model.max_length:,}, the positions of this model, "
            f"but it has {len(ids):,}"
        )


def time_label(model: Transformer) -> str:
    """The label of the axis of depth: layers, or time from 0 to 1."""
    return "layer" if model.unit_steps else "t"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def table(header: list[str], rows: list[list]) -> str:
    """An HTML table; numbers have four digits."""
    return f"<table>{_line(header, 'th')}{''.join(_line(row, 'td') for row in rows)}</table>"


def table_of_heads(label: str, times: np.ndarray, order: np.ndarray, columns: dict[str, np.ndarray]) -> str:
    """An HTML table of the five heads and times that come first in an order [T, H], with values [T, H] by column."""
    rows = []
    for step, head in zip(*np.unravel_index(np.argsort(order, axis=None)[:5], order.shape), strict=True):
        rows.append([f"{times[step]:.4g}", int(head), *(float(values[step, head]) for values in columns.values())])
    return table([label, "head", *columns], rows)


def _line(cells: list, tag: str) -> str:
    shown = (f"{cell:.4g}" if isinstance(cell, float) else html.escape(str(cell)) for cell in cells)
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in shown) + "</tr>"


def shares(values: np.ndarray) -> np.ndarray:
    """Values scaled to 0 for the smallest finite one and 1 for the largest.

    The last token is excluded, since it would make the others pale in comparison; its share is 0.
    """
    others = values[:-1]
    finite = others[np.isfinite(others)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    return np.append(np.nan_to_num((np.clip(others, low, high) - low) / ((high - low) or 1.0)), 0.0)


def highlighted(pieces: list[str], values: np.ndarray) -> str:
    """A text in HTML. The larger a token's value, the darker it is; the last token is framed."""
    spans = [
        f'<span style="background: rgba(230, 159, 0, {share:.3f})" title="{value:.4g}">{html.escape(piece)}</span>'
        for piece, value, share in zip(pieces, values, shares(values), strict=True)
    ]
    return f'<div class="text">{"".join(spans)}</div>'


def write(folder: pathlib.Path, title: str, about: dict, sections: list[Section]) -> None:
    """Write report.html, results.json and, if there are arrays, arrays.npz for the finished parts."""
    body = "".join(f"<h2>{html.escape(section.title)}</h2>{section.html}" for section in sections)
    facts = table(["", ""], [[name, value] for name, value in about.items()])
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    write_text(folder / "report.html", f"{page}<h1>{html.escape(title)}</h1>{facts}{body}\n")
    numbers = {**about, **{section.name: section.numbers for section in sections}}
    arrays = {f"{section.name}/{name}": array for section in sections for name, array in section.arrays.items()}
    if arrays:
        with whole_file(folder / "arrays.npz", "xb") as file:
            np.savez_compressed(file, **arrays)
    write_json(folder / "results.json", numbers)  # last: others look for it
