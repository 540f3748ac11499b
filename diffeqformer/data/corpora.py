"""The corpora. To add one, call `add_corpus` here and put its name into `CORPUS_NAMES` of `diffeqformer.data`.

A corpus of your own needs no change here: call `add_corpus` in a module that `config.data.module` names. Import this
module only where TensorFlow may be imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from diffeqformer.data import builders  # noqa: F401 (registers the data sets)
from diffeqformer.data.sources import HUB_CORPORA
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


class OrderedTfds(seqio.TfdsDataSource):
    """One of our TFDS data sets, downloaded and written when it is first read.

    Its examples have an order, so TFDS refuses to shuffle them. SeqIO shuffles by default: files are then read in
    random order, several at once, as those of any other data set.

    Args:
        name: of the builder, with configuration and version.
        splits: names of its splits, which TFDS would know only once the data set is written.
    """

    READ_AT_ONCE = 16  # files when shuffling, as TFDS does for unordered data sets

    def __init__(self, name: str, splits: Sequence[str]):
        super().__init__(name, splits=splits)

    def fetch(self) -> tfds.core.DatasetBuilder:
        """Download and write the data set, unless it is there, and return its builder."""
        self.tfds_dataset.builder.download_and_prepare()
        return self.tfds_dataset.builder

    def num_input_examples(self, split: str) -> int:
        self.fetch()
        return super().num_input_examples(split)

    def list_shards(self, split: str) -> Sequence[str]:
        self.fetch()
        return super().list_shards(split)

    def get_dataset(
        self,
        split: str | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        *,
        sequence_length: Mapping[str, int] | None = None,
        use_cached: bool = False,
        num_epochs: int | None = 1,
    ) -> tf.data.Dataset:
        """The examples of a split, by default train. As in SeqIO's class, the last three arguments change nothing."""
        how = self.tfds_dataset.read_config.replace(shuffle_seed=seed, skip_prefetch=True)
        if shard_info:
            how.input_context = tf.distribute.InputContext(shard_info.num_shards, shard_info.index)
        if shuffle:
            how.enable_ordering_guard, how.interleave_cycle_length = False, self.READ_AT_ONCE
        return self.fetch().as_dataset(split=split or tfds.Split.TRAIN, shuffle_files=shuffle, read_config=how)


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
for _name, _texts in HUB_CORPORA.items():
    add_corpus(_name, OrderedTfds(f"{_texts.name}:1.0.0", _texts.splits), _texts.origin, cut=CUTS.get(_name, uncut))
