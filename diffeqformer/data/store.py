"""The token store: a corpus's ids on disk, and `batch(step)` as a pure function.

A store is a folder that `diffeqformer.data.preparation` makes. `<split>-<number>.bin` has the ids of documents one
after another, with end-of-text after each: little-endian, 16 bits wide if the vocabulary allows it, else 32.
`store.json` has the task, the tokenizer, the origin, and counts and SHA-256 of splits and shards, under a seal
(`diffeqformer.data.seals`). Those of earlier versions lack the seal and what the tokenizer loses.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool

import numpy as np
from jaxtyping import Bool, Int, Integer

from diffeqformer.data.seals import from_json, unsealed
from diffeqformer.errors import UserError

FORMAT = 2
SPLITS = ("train", "validation")
MOST_THREADS = 8  # that read a store at once


def number_of_cores() -> int:
    """The processor cores that this process may use; on macOS, which can't say, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Split:
    """The ids of one split, and their windows: window i of length S holds the ids [i S, (i + 1) S) of the whole text.

    shards: the ids, memory-mapped; no shard is empty.
    text_bytes: bytes of the source text; end-of-text ids aren't counted.
    sha256: hash of the ids.
    altered: documents whose ids decode to another text; None: an earlier version made the store.
    unknown: the number of the tokenizer's unknown ids.
    """

    shards: tuple[Integer[np.ndarray, "_"], ...]
    text_bytes: int
    sha256: str
    altered: int | None = None
    unknown: int = 0

    @classmethod
    def of(cls, shards: Iterable[Integer[np.ndarray, "_"]], entry: dict) -> "Split":
        """The split with these shards, of which some may be empty, and its record in `store.json`."""
        whole = tuple(shard for shard in shards if len(shard))
        return cls(whole, entry["bytes"], entry["sha256"], entry.get("altered"), entry.get("unknown", 0))

    @functools.cached_property
    def ends(self) -> Integer[np.ndarray, "shards"]:
        """The number of ids up to the end of each shard."""
        return np.cumsum([len(shard) for shard in self.shards])

    @property
    def size(self) -> int:
        return int(self.ends[-1])

    def ids(self, start: int, stop: int) -> Int[np.ndarray, "_"]:
        """The ids at [start, stop), cut at the end of the split, as int32."""
        stop, parts = min(stop, self.size), []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end = int(self.ends[shard])
            offset = start - (end - len(self.shards[shard]))
            parts.append(self.shards[shard][offset : offset + min(stop, end) - start])
            start, shard = min(stop, end), shard + 1
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def windows(self, indices: Integer[np.ndarray, "B"], sequence_length: int) -> Int[np.ndarray, "B S"]:
        """Complete windows by their index, as int32."""
        batch = np.empty((len(indices), sequence_length), np.int32)
        for row, start in zip(batch, (np.asarray(indices, np.int64) * sequence_length).tolist()):
            row[:] = self.ids(start, start + sequence_length)
        return batch

    def batch(
        self, step: int, batch_size: int, sequence_length: int, seed: int, rows: slice = slice(None)
    ) -> Int[np.ndarray, "B S"]:
        """The global batch of a step, or some rows of it: a function of (seed, step) only.

        Every epoch visits all complete windows once, each time in a different order. A batch may span two epochs.
        """
        count = self.size // sequence_length
        examples = step * batch_size + np.arange(batch_size)[rows]
        epochs, positions = np.divmod(examples, count)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _order(seed, int(epoch), count)[positions[here]]
        return self.windows(indices, sequence_length)

    def evaluation_batch(
        self, number: int, batch_size: int, sequence_length: int, rows: slice = slice(None)
    ) -> Int[np.ndarray, "B S"]:
        """The `number`-th batch of all whole windows in order, or some of its rows. Copies of the last fill it up."""
        indices = (number * batch_size + np.arange(batch_size))[rows]
        return self.windows(np.minimum(indices, self.size // sequence_length - 1), sequence_length)

    def evaluated(
        self, number: int, batch_size: int, sequence_length: int, rows: slice = slice(None)
    ) -> Bool[np.ndarray, "B 1"]:
        """Whether each window of an `evaluation_batch` counts. Those that pad the last batch don't."""
        indices = (number * batch_size + np.arange(batch_size))[rows]
        return (indices < self.size // sequence_length)[:, None]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Integer[np.ndarray, "N"]:
    """The order of an epoch's windows. `RandomState` streams are frozen: the same in every NumPy version."""
    return np.random.RandomState([seed, epoch]).permutation(count)


def token_type(vocab_size: int) -> np.dtype:
    """The integer type of ids on disk."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


REMEDY = "delete the folder and start again to prepare it anew"


def shards_of(about: dict) -> list[dict]:
    """The shards of a store's splits, as its `store.json` lists them."""
    return [shard for split in about["splits"].values() for shard in split["shards"]]


def _is_account(about: dict) -> bool:
    """Whether a `store.json` has entries of the right types. A KeyError or TypeError means the same as False."""
    texts = [about[name] for name in ("task", "tokenizer", "origin", "files")]
    numbers, sums = [], about["dtype"] in ("<u2", "<u4") and set(about["splits"]) == set(SPLITS)
    for split in about["splits"].values():
        tokens = [shard["tokens"] for shard in split["shards"]]
        texts += [split["sha256"], *(shard["sha256"] for shard in split["shards"])]
        numbers += [split["tokens"], split["bytes"], split.get("altered", 0), split.get("unknown", 0), *tokens]
        sums = sums and split["tokens"] == sum(tokens)
    return sums and all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in numbers)


def parse_about(content: bytes, place: str | os.PathLike) -> dict:
    """The content of a `store.json` at `place`, after checking its entries and, if it has one, its seal."""
    try:
        about = from_json(content)
        unsealed(about)
        if about["format"] != FORMAT:
            raise UserError(f"{place}: this token store has format {about['format']}, but {FORMAT} is needed; {REMEDY}")
        for shard in shards_of(about):  # a foreign store could name any file on this machine
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", shard["file"]):
                raise UserError(f"{place}: 'file' must be a plain file name, but it is {shard['file']!r}; {REMEDY}")
        if not _is_account(about):
            raise ValueError
        return about
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{place}: this file of the token store can't be read; {REMEDY}") from None


def read_about(folder: pathlib.Path) -> dict:
    """The content of `store.json`, after checking that the folder is a store and its files have the right sizes."""
    path = folder / "store.json"
    try:
        about = parse_about(path.read_bytes(), path)
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no whole token store here; {REMEDY}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {REMEDY}") from None
    width = np.dtype(about["dtype"]).itemsize
    for shard in shards_of(about):
        path, needed = folder / shard["file"], shard["tokens"] * width
        size = path.stat().st_size if path.exists() else 0
        if size != needed:
            raise UserError(f"{path}: this file of the token store has {size:,} bytes instead of {needed:,}; {REMEDY}")
    return about


def sha256(*paths: pathlib.Path) -> str:
    """The SHA-256 of files, one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def verify(folder: pathlib.Path, about: dict, vocab_size: int | None = None, splits: Iterable[str] = SPLITS) -> None:
    """Read a store's shards again and compare them with `about`: the SHA-256 of each, and of each split's ids.

    The hash of a split identifies its text, independently of the shards. It is added to `about` if it is missing there.
    Under a seal it isn't computed again, because shards as written are the split as written.

    Args:
        vocab_size: the tokenizer's, to check that all ids are below it; None: they aren't checked.
    """
    chosen = [about["splits"][name] for name in splits]
    checks = [
        functools.partial(_check_shard, folder / shard["file"], shard["sha256"], about["dtype"], vocab_size)
        for split in chosen
        for shard in split["shards"]
    ]
    if "sha256" not in about:
        checks += [functools.partial(_check_split, folder, split) for split in chosen]
    try:
        with ThreadPool(max(1, min(MOST_THREADS, number_of_cores() // 2))) as pool:
            for _ in pool.imap(lambda check: check(), checks):
                pass
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"{reason}; the token store can't be verified until its disk can be read") from None


def _check_split(folder: pathlib.Path, split: dict) -> None:
    shards = split["shards"]  # of one alone, its own check has the hash
    whole = shards[0]["sha256"] if len(shards) == 1 else sha256(*(folder / shard["file"] for shard in shards))
    if whole != split.setdefault("sha256", whole):
        raise UserError(f"{folder}: its shards aren't those of one text in order, by their SHA-256; {REMEDY}")


def _check_shard(path: pathlib.Path, recorded: str, dtype: str, vocab_size: int | None) -> None:
    digest, largest = hashlib.sha256(), -1
    with open(path, "rb") as file:
        while block := file.read(1 << 24):  # which holds whole ids
            digest.update(block)
            if vocab_size is not None:
                largest = max(largest, int(np.frombuffer(block, dtype).max()))
    if digest.hexdigest() != recorded:
        raise UserError(f"{path}: its content isn't what was written, by its SHA-256; {REMEDY}")
    if vocab_size is not None and largest >= vocab_size:
        said = f"it holds the id {largest:,}, but the tokenizer's ids are below {vocab_size:,}"
        raise UserError(f"{path}: {said}; {REMEDY}")


def verifying(folder: pathlib.Path, vocab_size: int) -> AsyncResult:
    """`verify` in the background, where hashing leaves Python free. Ask the result if the store is whole."""
    pool = ThreadPool(1)  # whose thread doesn't keep the process from ending
    done = pool.apply_async(lambda: verify(folder, read_about(folder), vocab_size))
    pool.close()
    return done


def open_store(
    folder: str | os.PathLike,
    tokenizer: str,
    sequence_length: int,
    files: Sequence[str] | None = ("",),
    task: str | None = None,
) -> dict[str, Split]:
    """The training and validation splits of the store in `folder`, after checking that it is complete and fits.

    Args:
        files: fingerprints of the local files that replace the task (`diffeqformer.data.files.Fingerprint`), of
            which the store must have one; empty for no files, None for any.
    """
    folder = pathlib.Path(folder)
    about = read_about(folder)
    if about["tokenizer"] != tokenizer:
        raise UserError(
            f"{folder}: this token store was made with tokenizer '{about['tokenizer']}', but '{tokenizer}' is needed; "
            f"{REMEDY}"
        )
    other_files = not about["files"] if files is None else about["files"] not in files
    if other_files or task not in (None, about["task"]):
        raise UserError(
            f"{folder}: this token store was made from other text ({about['origin']}); choose another config.data.dir, "
            "or delete the folder"
        )
    splits = {}
    for name in SPLITS:
        entry, dtype = about["splits"][name], np.dtype(about["dtype"])
        if entry["tokens"] < sequence_length:
            raise UserError(
                f"config.sequence_length: {sequence_length} is longer than the {entry['tokens']:,} tokens of the "
                f"{name} split in {folder}; choose a shorter one"
            )
        shards = [np.memmap(folder / shard["file"], dtype, "r") for shard in entry["shards"] if shard["tokens"]]
        splits[name] = Split.of(shards, entry)
    return splits
