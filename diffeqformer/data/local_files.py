"""The local files that a config's patterns name, and what identifies their text."""

import glob
import hashlib
import os
from typing import NamedTuple

from ml_collections import ConfigDict

from diffeqformer.data.files import Layout, kind
from diffeqformer.data.store import SPLITS
from diffeqformer.errors import UserError


class NoFile(UserError):
    """A text isn't here: no file matches a pattern, or one can't be read."""


def layout_of(data: ConfigDict) -> Layout:
    """How documents lie in the local files of a config's `data` part."""
    return Layout(data.text_field, data.separator)


def local_files(data: ConfigDict) -> dict[str, list[str]] | None:
    """The local files of each split that replace the task, if any: its `matching_files`, of which none is in both."""
    if not data.train_files:
        return None
    files = {split: matching_files(data[f"{split}_files"], f"config.data.{split}_files") for split in SPLITS}
    trained = set(map(os.path.realpath, files["train"]))
    for path in files["validation"]:
        if os.path.realpath(path) in trained:
            raise UserError(f"config.data.train_files: {path} is a validation file, too; leave it out of one of them")
    return files


def matching_files(patterns: str, option: str) -> list[str]:
    """The files that comma-separated names and patterns mean; the matches of each pattern are sorted by path.

    A name that is there means itself, whatever characters it has, and so does the folder before a pattern.
    """
    files, seen = [], set()
    names = [patterns] if os.path.lexists(patterns) else patterns.split(",")
    for name in (name for name in names if name.strip() or not files):  # a comma may be at the end
        found = _matches(name) or _matches(name.strip())
        if not found:
            raise NoFile(f"{option}: no file matches '{name.strip()}'")
        for path in found:
            if os.path.isdir(path):
                raise UserError(f"{option}: {path} is a folder; name the files in it, such as '{path}/*.txt'")
            if not os.access(path, os.R_OK):
                raise NoFile(f"{option}: {path} can't be read; put a readable file there")
            if not os.path.isfile(path):
                raise UserError(f"{option}: {path} isn't a file that can be read twice; write its text into one")
            if not os.path.getsize(path):
                raise UserError(f"{option}: {path} is empty; put a file with text there")
            kind(path)
            if (target := os.path.realpath(path)) in seen:
                raise UserError(f"{option}: {path} is named twice; leave one of them out")
            seen.add(target)
        files += found
    return files


def _matches(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return sorted(glob.glob(glob.escape(folder) + pattern[len(folder) :], recursive=True))


class Fingerprint(NamedTuple):
    """Hashes that identify the text of local files; empty if there are none.

    text: of their formats, sizes, and first and last 64 KiB, and of their layout, whatever their names and order.
    order: the same in their order.
    earlier: as earlier versions made it, of names in their order instead of formats.
    """

    text: str = ""
    order: str = ""
    earlier: str = ""


def fingerprint(files: dict[str, list[str]] | None, layout: Layout = Layout()) -> Fingerprint:
    """The hashes of the local files of both splits, if there are any."""
    if not files:
        return Fingerprint()
    each, earlier = [], hashlib.sha256()
    for split, path in [(name, path) for name in SPLITS for path in files[name]]:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            beginning = file.read(1 << 16)
            file.seek(max(0, size - (1 << 16)))
            content = (size, beginning, file.read())
        earlier.update(repr((split, os.path.basename(path), *content)).encode())
        each.append(hashlib.sha256(repr((split, kind(path), *content)).encode()).hexdigest())
    text, order = (hashlib.sha256(repr((layout, *found)).encode()).hexdigest() for found in (sorted(each), each))
    return Fingerprint(text, order, earlier.hexdigest() if layout == Layout() else text)
