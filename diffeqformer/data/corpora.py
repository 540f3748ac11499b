"""The corpora. To add one, call `add_corpus` here and put its name into `CORPUS_NAMES` of `diffeqformer.data`.

A corpus of your own needs no change here: call `add_corpus` in a module that `config.data.module` names. Import this
module only where TensorFlow may be imported.
"""

import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterator
from typing import NamedTuple

import seqio
import tensorflow as tf

from diffeqformer.data import builders  # noqa: F401 (registers the TFDS builders)
from diffeqformer.data.wikitext import articles, detokenize

VALIDATION_PART = 50  # one in this many files of the standard library


def uncut(text: str) -> Iterator[str]:
    """A text as one document."""
    yield text


class Corpus(NamedTuple):
    """Where documents come from.

    source: SeqIO source of examples with the feature `text`.
    origin: its description for readers; written into the token store.
    cut: splits a local text file that replaces the corpus into documents.
    tokenizer: the kind (`config.data.tokenizer`) with which `diffeqformer.data.tasks` registers it; gpt2 or bytes.
    """

    source: seqio.DataSource
    origin: str
    cut: Callable[[str], Iterator[str]] = uncut
    tokenizer: str = "gpt2"


CORPORA: dict[str, Corpus] = {}


def add_corpus(name: str, source: seqio.DataSource, origin: str, **how) -> None:
    """Add a corpus; see `Corpus`."""
    CORPORA[name] = Corpus(source, origin, **how)


def stdlib_files(split: str) -> list[pathlib.Path]:
    """The `.py` files of this Python's standard library without its tests, sorted by path.

    A hash of the path below the library's folder decides the split, so a file stays in its split regardless of what
    else is installed. Files that aren't UTF-8 are left out.
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


def stdlib_documents(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    """One document per file; always in the same order."""

    def texts():
        for path in stdlib_files(split):
            try:
                yield {"text": path.read_bytes().decode("utf-8")}
            except UnicodeDecodeError:
                continue

    return tf.data.Dataset.from_generator(texts, output_signature={"text": tf.TensorSpec([], tf.string)})


add_corpus(
    "python_stdlib",
    seqio.FunctionDataSource(stdlib_documents, splits=("train", "validation")),
    f"standard library of Python {platform.python_version()}",
    tokenizer="bytes",
)
add_corpus(
    "wikitext103",
    seqio.TfdsDataSource("wikitext103/detokenized:1.0.0"),
    "WikiText-103, detokenized: dlwh/wikitext_103_detokenized of the Hugging Face hub, or files of manual_dir",
    cut=lambda text: map(detokenize, articles(text)),
)
add_corpus(
    "wikitext103_raw",
    seqio.TfdsDataSource("wikitext103/raw:1.0.0"),
    "WikiText-103, raw: Salesforce/wikitext of the Hugging Face hub, or files of manual_dir",
    cut=articles,
)
add_corpus(
    "openwebtext",
    seqio.TfdsDataSource("openwebtext:1.0.0"),
    "OpenWebText: Skylion007/openwebtext of the Hugging Face hub, or files of manual_dir; 0.0005 of it is validation",
)
