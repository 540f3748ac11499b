"""Documents: those of local files, of Python's standard library, and of the hub's corpora, without TensorFlow.

Token stores and scores read them from here, and so do SeqIO's tasks (`diffeqformer.data.tasks`). The hub's files lie
in the folders that TFDS would use.
"""

import contextlib
import hashlib
import io
import itertools
import math
import os
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from diffeqformer.data.files import PLAIN, Layout, count_texts, kind, read_lines, read_texts
from diffeqformer.data.quiet import import_tensorflow
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.data.wikitext import articles, detokenize
from diffeqformer.errors import UserError, reachable

VALIDATION_PART = 50  # one in this many files of the standard library
OPENWEBTEXT_DOCUMENTS = 8_013_769
VALIDATION_FRACTION, VALIDATION_SEED = 0.0005, 2357
MOST_SHARDS = 256  # of a split: each costs a tenth of a second, and an open file in training


class FileTexts:
    """Documents in files.

    origin: a description for readers; written into the token store.
    tokenizer: the kind that its SeqIO task has; gpt2 or bytes.
    cut: what makes documents of the lines of a plain-text file; None: a separator of the layout cuts it, if any.
    found: JSON that says what `fetch` has found, the "files" of each split. Another process can take it from here.
    """

    splits: Sequence[str] = ("train", "validation")
    origin: str
    tokenizer = "gpt2"
    cut: Callable[[Iterable[str]], Iterable[str]] | None = None
    layout = Layout()
    found = None

    def fetch(self) -> None:
        """Find or download the files, if they aren't known."""

    def groups(self, split: str) -> list[Sequence[str]]:
        """The files of each shard: one, or some consecutive ones if there are very many."""
        paths = self.found["files"][split]
        count = min(len(paths), MOST_SHARDS)
        return [paths[i * len(paths) // count : (i + 1) * len(paths) // count] for i in range(count)]

    def shards(self, split: str) -> int:
        return len(self.groups(split))

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        """The documents of every `count`-th shard from `index` on, in the order of the source; by default of all."""
        return itertools.chain.from_iterable(map(self.texts, itertools.chain(*self.groups(split)[index::count])))

    def texts(self, path: str) -> Iterable[str]:
        if not (self.cut and kind(path) == PLAIN):
            return read_texts(path, self.layout)
        if not self.layout.separator:
            return self.cut(read_lines(path))
        parts = read_texts(path, self.layout)
        return itertools.chain.from_iterable(self.cut(io.StringIO(part, newline="\n")) for part in parts)


def prose(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a WikiText file, detokenized."""
    return map(detokenize, articles(lines))


CUTS = {"wikitext103": prose, "wikitext103_raw": articles}
"""What makes documents of the lines of a local text file that replaces a corpus."""


class LocalTexts(FileTexts):
    """Documents in local files: plain text, JSON lines or Parquet.

    Args:
        corpus: the one that they replace, by which plain text is cut (`CUTS`).
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


class StandardLibrary(FileTexts):
    """The `.py` files of this Python's standard library without its tests, as one shard; one document per file."""

    origin = f"standard library of Python {platform.python_version()}"
    tokenizer = "bytes"

    def groups(self, split: str) -> list[Sequence[str]]:
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


class HubTexts(FileTexts):
    """The documents of a corpus of the hub.

    name: the folder of its files in manual_dir.
    on_hub: the splits that it has there.
    """

    name: str
    dataset: str
    config: str | None = None
    splits = on_hub = ("train", "validation", "test")

    def fetch(self) -> None:
        """Find the files: those of manual_dir, or else those of an earlier download, or else download them."""
        home = os.environ.get("TFDS_DATA_DIR", os.path.join("~", "tensorflow_datasets"))
        if "://" in home:
            raise UserError(
                "TFDS_DATA_DIR: a corpus must be written to this machine's disk first, and not to "
                f"{home}; choose a folder here"
            )
        downloads = pathlib.Path(os.path.expanduser(home), "downloads")
        folder = downloads / "manual" / self.name
        with reachable("TFDS_DATA_DIR", downloads):
            if folder.is_dir():
                print(f"{self.name}: reading the files of {folder}")
                paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
                found = {split: [path for path in paths if self.belongs(path, split)] for split in self.on_hub}
                if missing := [split for split, files in found.items() if not files]:
                    raise UserError(
                        f"{folder}: no file of split '{missing[0]}'; put one there ({missing[0]}.parquet, ...), or "
                        "remove the folder to download all"
                    )
            else:
                from diffeqformer.data.hub import download

                found = download(downloads, self.dataset, self.config, self.on_hub)
        self.found = {"files": {split: list(map(str, paths)) for split, paths in found.items()}}

    def belongs(self, path: pathlib.Path, split: str) -> bool:
        """Whether a file of manual_dir is of a split, by the beginning of its name; `valid` is short for validation."""
        return path.name.removeprefix("wiki.").startswith(split[:5])


class DetokenizedWikitext(HubTexts):
    """WikiText-103 as prose. The hub's rows are used unchanged. Whether each is one article couldn't be checked."""

    name, dataset, cut = "wikitext103/detokenized", "dlwh/wikitext_103_detokenized", staticmethod(prose)
    origin = "WikiText-103, detokenized: dlwh/wikitext_103_detokenized of the Hugging Face hub, or files of manual_dir"


class RawWikitext(HubTexts):
    """WikiText-103 as tokens, one article per document. A file may end within an article, so a split is one shard."""

    name, dataset, config = "wikitext103/raw", "Salesforce/wikitext", "wikitext-103-raw-v1"
    origin = "WikiText-103, raw: Salesforce/wikitext of the Hugging Face hub, or files of manual_dir"

    def groups(self, split: str) -> list[Sequence[str]]:
        return [self.found["files"][split]]

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        return articles(itertools.chain.from_iterable(map(self.lines, self.found["files"][split])))

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, each with a line feed. On the hub a row is a line; blank rows have no line feed."""
        if kind(path) == PLAIN:
            yield from read_lines(path)
        else:
            for row in read_texts(path):
                yield from io.StringIO(row if row.endswith("\n") else row + "\n", newline="\n")


def validation_rows(count: int) -> np.ndarray:
    """The rows of OpenWebText that make up the validation split, in order, as int64 of shape [ceil(0.0005 count)].

    They are the test part of Hugging Face datasets' `train_test_split(test_size=0.0005, seed=2357, shuffle=True)`.
    """
    return np.random.default_rng(VALIDATION_SEED).permutation(count)[: math.ceil(VALIDATION_FRACTION * count)]


class OpenWebText(HubTexts):
    """OpenWebText: `train` in the order of the source's rows, `validation` in the order of `validation_rows`.

    The split is the published one if the hub's rows are still in their original order, which couldn't be checked. Their
    number, 8,013,769, is checked, and a difference is printed. `validation` is one shard, because it needs all files.
    """

    name, dataset = "openwebtext", "Skylion007/openwebtext"
    splits, on_hub = ("train", "validation"), ("train",)
    origin = (
        "OpenWebText: Skylion007/openwebtext of the Hugging Face hub, or files of manual_dir; "
        f"{VALIDATION_FRACTION} of it is validation"
    )

    def fetch(self) -> None:
        """As in the other corpora. Then count the rows of each file."""
        super().fetch()
        paths = self.found["files"]["train"]
        self.found["counts"] = dict(zip(paths, map(count_texts, paths)))
        count = sum(self.found["counts"].values())
        if count != OPENWEBTEXT_DOCUMENTS:
            print(
                f"{self.name}: {count:,} documents instead of {OPENWEBTEXT_DOCUMENTS:,},"
                " so the validation split isn't the published one"
            )

    def belongs(self, path: pathlib.Path, split: str) -> bool:
        """All .parquet and .jsonl files are of the split that the hub has."""
        if kind(path) == PLAIN:
            raise UserError(f"{path}: OpenWebText is read from .parquet and .jsonl files; move this one away")
        return True

    def groups(self, split: str) -> list[Sequence[str]]:
        return super().groups(split) if split == "train" else [self.found["files"]["train"]]

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        counts = self.found["counts"]
        starts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0)))
        chosen = dict.fromkeys(validation_rows(sum(counts.values())).tolist())
        paths = itertools.chain(*self.groups(split)[index::count])
        rows = itertools.chain.from_iterable(enumerate(self.texts(path), starts[path]) for path in paths)
        if split == "validation":
            texts = {row: text for row, text in rows if row in chosen}
            return (texts[row] for row in chosen)
        return (text for row, text in rows if row not in chosen)


CORPORA: dict[str, type[FileTexts]] = {
    "python_stdlib": StandardLibrary,
    "wikitext103": DetokenizedWikitext,
    "wikitext103_raw": RawWikitext,
    "openwebtext": OpenWebText,
}
"""The corpora of this package. A module of the user's can add others by `diffeqformer.data.tasks.add_corpus`."""


def open_corpus(
    corpus: str,
    files: dict[str, Sequence[str]] | None,
    layout: Layout = Layout(),
    module: str = "",
    option: str = "config.data.module",
):
    """The documents of a corpus, or of the local files of each split that replace it.

    Returns:
        a `FileTexts`, or with a module the like of it (`diffeqformer.data.tasks.SourceTexts`).

    Args:
        module: one that adds corpora, which SeqIO then reads; the option named it.
    """
    if files:
        return LocalTexts(files, corpus, layout)
    if module:
        import_tensorflow(f"{option}: {module}")
        from diffeqformer.data import tasks

        tasks.configure(module, option)
        return tasks.SourceTexts(corpus)
    if corpus not in CORPORA:
        raise UserError(f"the task must be one of {', '.join(CORPORA)}, but it is '{corpus}'")
    return CORPORA[corpus]()


def stored_documents(stored: Split, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The documents of a split of a token store: their text and their ids, of which the last is end-of-text."""
    ids = stored.ids(0, stored.size)
    for document in np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text) + 1)[:-1]:
        yield tokenizer.decode(document[:-1].tolist()), document.tolist()
