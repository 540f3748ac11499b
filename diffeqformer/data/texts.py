"""Documents without SeqIO: those of local files, of Python's standard library, and of the hub's corpora.

Where SeqIO isn't installed, they are prepared and scored as they are.
"""

import contextlib
import hashlib
import itertools
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np

from diffeqformer.data import CORPUS_NAMES, quiet
from diffeqformer.data.files import PLAIN, Layout, kind, read_texts
from diffeqformer.data.sources import HUB_CORPORA, FileTexts
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.data.wikitext import articles, detokenize
from diffeqformer.errors import UserError

VALIDATION_PART = 50  # one in this many files of the standard library


CUTS = {"wikitext103": lambda text: map(detokenize, articles(text)), "wikitext103_raw": articles}
"""What splits a local text file that replaces a corpus into documents; other corpora leave it whole."""


class LocalTexts(FileTexts):
    """Documents in local files: plain text, JSON lines or Parquet.

    A shard is one file, or a group of consecutive files if there are very many.

    Args:
        corpus: the one that they replace, by which plain text, or its parts between separators, is cut (`CUTS`).
    """

    def __init__(self, files: dict[str, Sequence[str]], corpus: str = "", layout: Layout = Layout()):
        self.splits, self.found, self.layout = tuple(files), {"files": files}, layout
        self.cut = CUTS.get(corpus)

    @property
    def origin(self) -> str:
        paths = list(itertools.chain(*self.found["files"].values()))
        folders, plain = {str(pathlib.Path(path).parent) for path in paths}, PLAIN in map(kind, paths)
        whole = plain and not (self.cut or self.layout.separator)
        return f"local files in {', '.join(sorted(folders))}" + ", each plain text as one document" * whole

    def texts(self, path: str) -> Iterator[str]:
        texts = read_texts(path, self.layout)
        return itertools.chain.from_iterable(map(self.cut, texts)) if self.cut and kind(path) == PLAIN else texts


class StandardLibrary(FileTexts):
    """The `.py` files of this Python's standard library without its tests, as one shard; one document per file."""

    origin = f"standard library of Python {platform.python_version()}"

    def groups(self, split: str) -> list[Sequence[str]]:
        """All files, sorted by path, as one shard."""
        return [list(map(str, stdlib_files(split)))]

    def texts(self, path: str) -> Iterator[str]:
        """The file, unless it isn't UTF-8."""
        with contextlib.suppress(UnicodeDecodeError):
            yield pathlib.Path(path).read_bytes().decode("utf-8")


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


def open_texts(corpus: str, files: dict[str, Sequence[str]] | None, layout: Layout = Layout()) -> FileTexts:
    """The documents of a corpus, or of the local files of each split that replace it."""
    if files:
        return LocalTexts(files, corpus, layout)
    if corpus == "python_stdlib":
        return StandardLibrary()
    if corpus in HUB_CORPORA:
        return HUB_CORPORA[corpus]()
    if corpus in CORPUS_NAMES:
        quiet.check_installed(f"config.data.task: {corpus}")
    raise UserError(f"the task must be one of {', '.join(CORPUS_NAMES)}, but it is '{corpus}'")


def open_corpus(
    corpus: str,
    files: dict[str, Sequence[str]] | None,
    layout: Layout,
    module: str = "",
    option: str = "config.data.module",
):
    """The same, or `corpora.SourceTexts`: a corpus is read by SeqIO if that is installed.

    Args:
        module: one that adds corpora, which the option named.
    """
    if module and not files:
        quiet.check_installed(f"{option}: {module}")
    if files or quiet.not_installed():
        return open_texts(corpus, files, layout)
    quiet.import_tensorflow()
    from diffeqformer.data import corpora

    corpora.configure(module, option)
    return corpora.SourceTexts(corpus)


def stored_documents(stored: Split, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The documents of a split of a token store: their text and their ids, of which the last is end-of-text."""
    ids, start = stored.ids(0, stored.size), 0
    for end in (np.flatnonzero(ids == tokenizer.end_of_text) + 1).tolist():
        yield tokenizer.decode(ids[start : end - 1].tolist()), ids[start:end].tolist()
        start = end
