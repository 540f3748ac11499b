"""The corpora. To add one, call `add_corpus` here and put its name into `CORPUS_NAMES` of `diffeqformer.data`.

A corpus of your own needs no change here: call `add_corpus` in a module that `config.data.module` names. Import this
module only where TensorFlow may be imported.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import seqio
import tensorflow as tf

from diffeqformer.data import builders  # noqa: F401 (registers the TFDS builders)
from diffeqformer.data.texts import CUTS, STDLIB_ORIGIN, StandardLibrary, uncut


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


def stdlib_documents(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    """One document per file; always in the same order."""

    def examples():
        return ({"text": text} for text in StandardLibrary().documents(split))

    return tf.data.Dataset.from_generator(examples, output_signature={"text": tf.TensorSpec([], tf.string)})


add_corpus(
    "python_stdlib",
    seqio.FunctionDataSource(stdlib_documents, splits=("train", "validation")),
    STDLIB_ORIGIN,
    tokenizer="bytes",
)
add_corpus(
    "wikitext103",
    seqio.TfdsDataSource("wikitext103/detokenized:1.0.0"),
    "WikiText-103, detokenized: dlwh/wikitext_103_detokenized of the Hugging Face hub, or files of manual_dir",
    cut=CUTS["wikitext103"],
)
add_corpus(
    "wikitext103_raw",
    seqio.TfdsDataSource("wikitext103/raw:1.0.0"),
    "WikiText-103, raw: Salesforce/wikitext of the Hugging Face hub, or files of manual_dir",
    cut=CUTS["wikitext103_raw"],
)
add_corpus(
    "openwebtext",
    seqio.TfdsDataSource("openwebtext:1.0.0"),
    "OpenWebText: Skylion007/openwebtext of the Hugging Face hub, or files of manual_dir; 0.0005 of it is validation",
)
