"""Documents without SeqIO: those of local files, of Python's standard library, and of the hub's corpora.

`diffeqformer.data.tasks` gives them to SeqIO. Where SeqIO isn't installed, they are prepared and scored as they are.
All have the same methods: `fetch` comes first, and `found` is what another process takes from this one in its place.
"""

import hashlib
import itertools
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diffeqformer.data import CORPUS_NAMES
from diffeqformer.data.files import PLAIN, Layout, kind, read_texts
from diffeqformer.data.sources import HUB_CORPORA, FileTexts, HubTexts, in_groups
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.data.wikitext import articles, detokenize
from diffeqformer.errors import UserError

VALIDATION_PART = 50  # one in this many files of the standard library
STDLIB_ORIGIN = f"standard library of Python {platform.python_version()}"


def uncut(text: str) -> Iterator[str]:
    """A text as one document."""
    yield text


CUTS = {"wikitext103": lambda text: map(detokenize, articles(text)), "wikitext103_raw": articles}
"""What splits a local text file that replaces a corpus into documents; other corpora leave it whole."""


class LocalTexts(FileTexts):
    """Documents in local files: plain text, JSON lines or Parquet.

    A shard is one file, or a group of consecutive files if there are very many.

    Args:
        files: paths of each split.
        cut: splits the content of a plain-text file, or of its parts if it has separators, into documents.
        layout: how documents lie in the files.
    """

    found = None

    def __init__(
        self, files: dict[str, Sequence[str]], cut: Callable[[str], Iterator[str]] = uncut, layout: Layout = Layout()
    ):
        self.splits, self.files, self.cut, self.layout = tuple(files), files, cut, layout

    def fetch(self) -> None:
        """There is nothing to fetch."""

    def groups(self, split: str) -> list[Sequence[str]]:
        """The files of each shard."""
        return in_groups(self.files[split])

    @property
    def origin(self) -> str:
        """A description for readers."""
        folders = {str(pathlib.Path(path).parent) for files in self.files.values() for path in files}
        plain = any(kind(path) == PLAIN for files in self.files.values() for path in files)
        whole = plain and self.cut is uncut and not self.layout.separator
        return f"local files in {', '.join(sorted(folders))}" + ", each plain text as one document" * whole

    def texts(self, path: str) -> Iterator[str]:
        """The documents of a file."""
        texts = read_texts(path, self.layout)
        return itertools.chain.from_iterable(map(self.cut, texts)) if kind(path) == PLAIN else texts


class StandardLibrary:
    """The `.py` files of this Python's standard library without its tests, as one shard; one document per file."""

    splits, origin, found = ("train", "validation"), STDLIB_ORIGIN, None

    def fetch(self) -> None:
        """There is nothing to fetch."""

    def sizes(self, split: str) -> list[int]:
        """Unknown."""
        return []

    def shards(self, split: str) -> int:
        """One."""
        return 1

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        """The documents, always in the same order. Files that aren't UTF-8 are left out."""
        for path in stdlib_files(split):
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue


def stdlib_files(split: str) -> list[pathlib.Path]:
    """The files of a split of the standard library, sorted by path.

    A hash of the path below the library's folder decides the split, so a file stays in its split regardless of what
    else is installed.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part in ("site-packages", "dist-packages", "test", "tests", "idle_test") for part in parts):
            continue
        digest = hashlib.sha256("/".join(parts).encode()).digest()
        is_validation = int.from_bytes(digest[:8], "big") % VALIDATION_PART == 0
        if is_validation == (split == "validation"):
            files.append(path)
    return files


def open_texts(
    corpus: str, files: dict[str, Sequence[str]] | None, tfds_dir: str = "", layout: Layout = Layout()
) -> LocalTexts | StandardLibrary | HubTexts:
    """The documents of a corpus, or of the local files that replace it.

    Args:
        files: paths of each split, if any.
        tfds_dir: folder of TFDS for a corpus of the hub; empty for its own default.
        layout: how documents lie in local files.

    Raises:
        UserError: if there is no such corpus.
    """
    if files:
        return LocalTexts(files, CUTS.get(corpus, uncut), layout)
    if corpus == "python_stdlib":
        return StandardLibrary()
    if corpus in HUB_CORPORA:
        return HUB_CORPORA[corpus](tfds_dir)
    raise UserError(f"the task must be one of {', '.join(CORPUS_NAMES)}, but it is '{corpus}'")


def stored_documents(stored: Split, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The documents of a split of a token store: their text and their ids, of which the last is end-of-text."""
    ids, start = stored.ids(0, stored.size), 0
    for end in (np.flatnonzero(ids == tokenizer.end_of_text) + 1).tolist():
        yield tokenizer.decode(ids[start : end - 1].tolist()), ids[start:end].tolist()
        start = end
