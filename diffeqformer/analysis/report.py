"""The report of `analyze`: one self-contained HTML file, and the same numbers as JSON and NPZ."""

import dataclasses
import html
import pathlib

import numpy as np

from diffeqformer.console.results import write_json, write_text

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
    """One part of a report.

    name: its key in JSON and NPZ.
    title: its heading.
    html: its content, built with the functions below.
    numbers: stored in JSON.
    arrays: stored in NPZ.
    """

    name: str
    title: str
    html: str
    numbers: dict | list
    arrays: dict[str, np.ndarray]


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def table(header: list[str], rows: list[list]) -> str:
    """An HTML table; numbers have four digits."""
    return f"<table>{_line(header, 'th')}{''.join(_line(row, 'td') for row in rows)}</table>"


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
        partial = folder / "arrays.partial.npz"
        np.savez_compressed(partial, **arrays)
        partial.replace(folder / "arrays.npz")
    write_json(folder / "results.json", numbers)  # last: others look for it
