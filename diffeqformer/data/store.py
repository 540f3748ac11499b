"""The token store: a task's ids on disk, and `batch(step)` as a pure function.

A store is a folder with `<split>.bin` (the ids of all documents one after another, little-endian,
16 bits wide if the vocabulary allows it, else 32) and `store.json` (task, tokenizer, and of each split
the tokens, documents, bytes of text and SHA-256). It appears under its name only when it is complete.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int, Integer

from diffeqformer.errors import UserError

FORMAT = 1


def write_store(
    folder: pathlib.Path, task: str, tokenizer, source: str, splits: dict[str, Iterable[tuple[np.ndarray, int]]]
) -> None:
    """Write a store from, for each split, its documents as (ids with end-of-text, bytes of text).

    Everything goes into a temporary folder beside `folder`, which takes its name at the end.

    Args:
        folder: where the store shall be; if another process makes it meanwhile, that one stays.
        source: where the text comes from, for people.

    Raises:
        OSError: if the disk is full or the folder can't be written; nothing is left behind.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    about = {
        "format": FORMAT,
        "task": task,
        "source": source,
        "tokenizer": tokenizer.name,
        "dtype": dtype.str,
        "splits": {},
    }
    try:
        for split, documents in splits.items():
            digest, tokens, count, text_bytes = hashlib.sha256(), 0, 0, 0
            with open(partial / f"{split}.bin", "wb") as file:
                for ids, size in documents:
                    data = ids.astype(dtype).tobytes()
                    file.write(data)
                    digest.update(data)
                    tokens, count, text_bytes = tokens + len(ids), count + 1, text_bytes + size
                file.flush()
                os.fsync(file.fileno())
            about["splits"][split] = {
                "tokens": tokens,
                "documents": count,
                "bytes": text_bytes,
                "sha256": digest.hexdigest(),
            }
        (partial / "store.json").write_text(json.dumps(about, indent=1))
        if folder.exists():  # another process was faster, with the same content
            return
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Split:
    """The windows of one split: window i holds the ids [i S, (i + 1) S) of the whole text.

    tokens: all ids, memory-mapped.
    text_bytes: bytes of the text they came from, end-of-text ids not counted.
    sha256: hash of the ids.
    """

    tokens: Integer[np.ndarray, "N"]
    text_bytes: int
    sha256: str

    def windows(self, indices: Integer[np.ndarray, "B"], sequence_length: int) -> Int[np.ndarray, "B S"]:
        """Whole windows by their index, as int32."""
        starts = np.asarray(indices, np.int64)[:, None] * sequence_length
        return self.tokens[starts + np.arange(sequence_length)].astype(np.int32)

    def batch(
        self, step: int, batch_size: int, sequence_length: int, seed: int, rows: slice = slice(None)
    ) -> Int[np.ndarray, "B S"]:
        """The global batch of a step, or some rows of it: a function of (seed, step) and of nothing else.

        Every epoch goes through all whole windows once, in an order of its own; a batch may span two epochs.
        """
        count = len(self.tokens) // sequence_length
        examples = step * batch_size + np.arange(batch_size)[rows]
        epochs, positions = np.divmod(examples, count)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _order(seed, int(epoch), count)[positions[here]]
        return self.windows(indices, sequence_length)

    def evaluation_batches(self, batch_size: int, sequence_length: int):
        """All windows in order, the last incomplete one included, as (tokens [B, S], valid [B, S] bool) pairs.

        What fills up the last window and the last batch is not valid.
        """
        per_batch = batch_size * sequence_length
        for start in range(0, len(self.tokens), per_batch):
            ids = self.tokens[start : start + per_batch].astype(np.int32)
            valid = np.arange(per_batch) < len(ids)
            ids = np.pad(ids, (0, per_batch - len(ids)))
            yield ids.reshape(batch_size, sequence_length), valid.reshape(batch_size, sequence_length)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Integer[np.ndarray, "N"]:
    """The order of an epoch's windows. `RandomState` streams are frozen: the same in every NumPy version."""
    return np.random.RandomState([seed, epoch]).permutation(count)


def open_store(folder: str | os.PathLike, tokenizer: str, sequence_length: int) -> dict[str, Split]:
    """The training and validation splits of the store in `folder`, after checking that it is whole and meant for `tokenizer`.

    Raises:
        UserError: if the store is missing, incomplete, of another tokenizer, or shorter than one window.
    """
    folder = pathlib.Path(folder)
    remedy = "delete the folder and start again to prepare it anew"
    try:
        about = json.loads((folder / "store.json").read_text())
        found, dtype, made_with = about["format"], np.dtype(about["dtype"]), about["tokenizer"]
        entries = {split: about["splits"][split] for split in ("train", "validation")}
        sizes = {split: (entry["tokens"], entry["bytes"], entry["sha256"]) for split, entry in entries.items()}
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no whole token store here; {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / 'store.json'}: this file of the token store can't be read; {remedy}") from None
    if found != FORMAT:
        raise UserError(f"{folder}: this token store has format {found}, but {FORMAT} is needed; {remedy}")
    if made_with != tokenizer:
        raise UserError(
            f"{folder}: this token store was made with tokenizer '{made_with}', but '{tokenizer}' is needed; {remedy}"
        )
    splits = {}
    for split, (tokens, text_bytes, sha256) in sizes.items():
        path = folder / f"{split}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size != tokens * dtype.itemsize:
            raise UserError(
                f"{path}: this file of the token store has {size:,} bytes instead of {tokens * dtype.itemsize:,}; {remedy}"
            )
        if tokens < sequence_length:
            raise UserError(
                f"config.sequence_length: {sequence_length} is longer than the {tokens:,} tokens of {path}; choose a shorter one"
            )
        splits[split] = Split(np.memmap(path, dtype, "r"), text_bytes, sha256)
    return splits
