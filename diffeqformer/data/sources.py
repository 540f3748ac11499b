"""The corpora of the hub: their files, and the documents in them.

`diffeqformer.data.corpora` makes TFDS data sets of them. Where TFDS isn't installed, `diffeqformer.data.texts` opens
them, and they are prepared and scored as they are. The folders are those of TFDS in both cases.
"""

import contextlib
import io
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from diffeqformer.data import files, wikitext
from diffeqformer.errors import UserError

OPENWEBTEXT_DOCUMENTS = 8_013_769
VALIDATION_FRACTION, VALIDATION_SEED = 0.0005, 2357
MOST_SHARDS = 256  # of a split: each costs a tenth of a second, and an open file in training


def validation_rows(count: int) -> np.ndarray:
    """The rows of OpenWebText that make up the validation split, in order, as int64 of shape [ceil(0.0005 count)].

    They are the test part of Hugging Face datasets' `train_test_split(test_size=0.0005, seed=2357, shuffle=True)`.
    """
    return np.random.default_rng(VALIDATION_SEED).permutation(count)[: math.ceil(VALIDATION_FRACTION * count)]


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turn errors of the disk that gets a corpus into a UserError."""
    try:
        yield
    except OSError as error:
        where = error.filename or "its folder"
        raise UserError(f"TFDS_DATA_DIR: {where}: {error.strerror or error}") from None


class FileTexts:
    """Documents in files.

    splits: the names of the splits.
    origin: a description for readers; written into the token store.
    found: JSON that says what `fetch` has found, the "files" of each split. Another process can take it from here.
    """

    splits: Sequence[str] = ("train", "validation")
    origin: str
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

    def texts(self, path: str) -> Iterator[str]:
        """The documents of a file, by default its rows."""
        return files.read_texts(path)


class HubTexts(FileTexts):
    """The documents of a corpus of the hub.

    name: of the TFDS data set, which is also the folder of its files in manual_dir.
    dataset, config: of the hub.
    on_hub: the splits that it has there.
    """

    name: str
    dataset: str
    config: str | None = None
    splits = on_hub = ("train", "validation", "test")

    def fetch(self) -> None:
        """Find the files in the folders that TFDS would use."""
        usual = os.environ.get("TFDS_DATA_DIR", os.path.join("~", "tensorflow_datasets"))
        downloads = os.path.join(os.path.expanduser(usual), "downloads")
        with writing():
            self.find(downloads, os.path.join(downloads, "manual"))

    def find(self, downloads: str | os.PathLike, manual: str | os.PathLike | None) -> None:
        """Find the files: those of `manual`, or else those of an earlier download, or else download them.

        Args:
            downloads, manual: TFDS' download_dir and manual_dir, if there is one.
        """
        if "://" in os.fspath(downloads):
            raise UserError(
                "TFDS_DATA_DIR: a corpus must be written to this machine's disk first, and not to "
                f"{downloads}; choose a folder here"
            )
        folder = pathlib.Path(manual or os.devnull) / self.name
        if folder.is_dir():
            paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
            print(f"{self.name}: reading {len(paths)} files of {folder}")
            by_split = self.parted(folder, paths)
        else:
            from diffeqformer.data.hub import download

            by_split = download(pathlib.Path(downloads), self.dataset, self.config, self.on_hub)
        self.found = {"files": {split: [str(path) for path in paths] for split, paths in by_split.items()}}

    def parted(self, folder: pathlib.Path, paths: list[pathlib.Path]) -> dict[str, list[pathlib.Path]]:
        """The files of manual_dir by split, by the beginnings of their names."""
        found = {}
        for split in self.on_hub:  # `valid` is short for validation
            found[split] = [path for path in paths if path.name.removeprefix("wiki.").startswith(split[:5])]
            if not found[split]:
                raise UserError(
                    f"{folder}: no file of split '{split}'; put one there ({split}.parquet, ...), or remove the folder "
                    "to download all"
                )
        return found

    def number(self, split: str) -> int:
        """A number that the documents don't exceed."""
        return 2**32


class DetokenizedWikitext(HubTexts):
    """WikiText-103 as prose. The hub's rows are used unchanged. Whether each is one article couldn't be checked."""

    name, dataset = "wikitext103/detokenized", "dlwh/wikitext_103_detokenized"
    origin = "WikiText-103, detokenized: dlwh/wikitext_103_detokenized of the Hugging Face hub, or files of manual_dir"

    def texts(self, path: str) -> Iterator[str]:
        if files.kind(path) == files.PLAIN:
            return map(wikitext.detokenize, wikitext.articles_of_lines(files.read_lines(path)))
        return super().texts(path)


class RawWikitext(HubTexts):
    """WikiText-103 as tokens, one article per document. A file may end within an article, so a split is one shard."""

    name, dataset, config = "wikitext103/raw", "Salesforce/wikitext", "wikitext-103-raw-v1"
    origin = "WikiText-103, raw: Salesforce/wikitext of the Hugging Face hub, or files of manual_dir"

    def groups(self, split: str) -> list[Sequence[str]]:
        return [self.found["files"][split]]

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        lines = itertools.chain.from_iterable(map(self.lines, self.found["files"][split]))
        return wikitext.articles_of_lines(lines)

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a file, each with a line feed. On the hub a row is a line; blank rows have no line feed."""
        if files.kind(path) == files.PLAIN:
            yield from files.read_lines(path)
        else:
            for row in files.read_texts(path):
                yield from io.StringIO(row if row.endswith("\n") else row + "\n", newline="\n")


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

    def find(self, downloads: str | os.PathLike, manual: str | os.PathLike | None) -> None:
        """As in the other corpora. Then count the rows of each file."""
        super().find(downloads, manual)
        counts = [files.count_texts(path) for path in self.found["files"]["train"]]
        self.found["counts"] = dict(zip(self.found["files"]["train"], counts))
        if sum(counts) != OPENWEBTEXT_DOCUMENTS:
            print(
                f"{self.name}: {sum(counts):,} documents instead of {OPENWEBTEXT_DOCUMENTS:,},"
                " so the validation split isn't the published one"
            )

    def parted(self, folder: pathlib.Path, paths: list[pathlib.Path]) -> dict[str, list[pathlib.Path]]:
        """All files are of the split that the hub has. Whatever else lies in the folder would be taken for text."""
        for path in paths:
            if files.kind(path) == files.PLAIN:
                raise UserError(f"{path}: OpenWebText is read from .parquet and .jsonl files; move this one away")
        if not paths:
            raise UserError(f"{folder}: the folder is empty; put the files there, or remove it to download them")
        return {"train": paths}

    def groups(self, split: str) -> list[Sequence[str]]:
        """As in the other corpora; of validation, all files."""
        return super().groups(split) if split == "train" else [self.found["files"]["train"]]

    def number(self, split: str) -> int:
        """The number of documents itself."""
        count = sum(self.found["counts"].values())
        rows = len(validation_rows(count))
        return rows if split == "validation" else count - rows

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


HUB_CORPORA = {"wikitext103": DetokenizedWikitext, "wikitext103_raw": RawWikitext, "openwebtext": OpenWebText}
"""The class of each corpus."""
