"""The corpora as SeqIO's sources. Import this module only where TensorFlow may be imported.

A corpus of your own needs no change here: call `add_corpus` in a module that `config.data.module` names.
"""

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

import seqio
import tensorflow as tf

from diffeqformer.data import texts
from diffeqformer.data.texts import FileTexts, LocalTexts, StandardLibrary
from diffeqformer.errors import UserError, reason_of

TEXT = tf.TensorSpec([], tf.string)
READ_AT_ONCE = 16  # shards when shuffling, as TFDS does


class Documents(seqio.DataSource):
    """Documents of `diffeqformer.data.texts` as a SeqIO source. They are found or downloaded when first read."""

    supports_arbitrary_sharding = False

    def __init__(self, documents: FileTexts):
        super().__init__(documents.splits, caching_permitted=not isinstance(documents, LocalTexts))
        self.texts = documents

    def list_shards(self, split: str) -> list[str]:
        if self.texts.found is None:
            self.texts.fetch()
        return [f"{split}-{index}" for index in range(self.texts.shards(split))]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **_) -> tf.data.Dataset:
        """The examples of a split, with the feature `text`. As in SeqIO's sources, other arguments change nothing.

        When shuffling, shards are read in random order, several at once.
        """
        index, count = (shard_info.index, shard_info.num_shards) if shard_info else (0, 1)
        total = len(self.list_shards(split))

        def read(shard):
            return ({"text": text} for text in self.texts.documents(split, int(shard), total))

        shards = tf.data.Dataset.range(index, total, count)
        return (shards.shuffle(total, seed) if shuffle else shards).interleave(
            lambda shard: tf.data.Dataset.from_generator(read, output_signature={"text": TEXT}, args=(shard,)),
            cycle_length=READ_AT_ONCE if shuffle else 1,
        )


class Corpus(NamedTuple):
    """Where documents come from.

    source: SeqIO source of examples with the feature `text`.
    origin: its description for readers; written into the token store.
    tokenizer: the kind (`config.data.tokenizer`) with which `diffeqformer.data.tasks` registers it; gpt2 or bytes.
    """

    source: seqio.DataSource
    origin: str
    tokenizer: str = "gpt2"


CORPORA: dict[str, Corpus] = {}


def add_corpus(name: str, source: seqio.DataSource, origin: str, tokenizer: str = "gpt2") -> None:
    """Add a corpus; see `Corpus`."""
    CORPORA[name] = Corpus(source, origin, tokenizer)


for _name, _texts in texts.CORPORA.items():
    add_corpus(_name, Documents(_texts()), _texts.origin, "bytes" if _texts is StandardLibrary else "gpt2")


def configure(module: str, option: str) -> None:
    """Import the module that an option names, and use the folder that TFDS_DATA_DIR names.

    The module may be in the current folder, even if the command's own script is elsewhere.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the module is the user's
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError(f"{option}: {module} can't be imported: {reason}") from None
    if folder := os.environ.get("TFDS_DATA_DIR"):  # TFDS reads it only when it is imported
        seqio.set_tfds_data_dir_override(folder)


def rekey(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The text, under the name that SeqIO expects for text to be tokenized."""
    if "text" not in dataset.element_spec:
        raise UserError(
            "config.data.task: the examples of a corpus must have a 'text', but they have "
            f"{', '.join(dataset.element_spec)}"
        )
    return dataset.map(lambda example: {"targets": example["text"]})


class SourceTexts:
    """The documents of a corpus as SeqIO reads them, with the methods of `diffeqformer.data.texts.FileTexts`."""

    found = None  # SeqIO finds the corpus again in each process

    def __init__(self, corpus: str):
        if corpus not in CORPORA:
            raise UserError(f"the task must be one of {', '.join(CORPORA)}, but it is '{corpus}'")
        self.source, self.origin, _ = CORPORA[corpus]

    def fetch(self) -> None:
        """Download the source and write it as a TensorFlow data set, if it needs one and doesn't have it yet."""
        if isinstance(self.source, seqio.TfdsDataSource):
            self.source.tfds_dataset.builder.download_and_prepare()

    @property
    def splits(self) -> Collection[str]:
        """The names of the splits. TFDS knows them once the corpus is fetched."""
        return self.source.splits

    def shards(self, split: str) -> int:
        return len(self.source.list_shards(split))

    def documents(self, split: str, index: int = 0, count: int = 1) -> Iterator[str]:
        """The documents of one of `count` shards, in order."""
        part = seqio.ShardInfo(index, count) if count > 1 else None
        examples = rekey(self.source.get_dataset(split, shuffle=False, shard_info=part))
        try:
            for example in examples.as_numpy_iterator():
                yield example["targets"].decode("utf-8")
        except tf.errors.OpError as error:  # which wraps a UserError of ours
            wrapped = re.search(r"UserError: (.*)", str(error))
            raise UserError(wrapped.group(1).strip() if wrapped else reason_of(error)) from None
