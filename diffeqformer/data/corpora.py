"""The corpora. To add one, call `add_corpus` here and put its name into `CORPUS_NAMES` of `diffeqformer.data`.

The import registers the TFDS data sets `wikitext103/detokenized`, `wikitext103/raw` and `openwebtext`, with the
documents of `diffeqformer.data.sources`.

A corpus of your own needs no change here: call `add_corpus` in a module that `config.data.module` names. Import this
module only where TensorFlow may be imported.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from diffeqformer.data.sources import HUB_CORPORA, DetokenizedWikitext, HubTexts, OpenWebText, RawWikitext, writing
from diffeqformer.data.texts import StandardLibrary
from diffeqformer.errors import UserError, reason_of


class _HubBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The documents of a corpus of the hub, one per example, in the order of the source."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = "docs/data.md of diffeqformer says which files in manual_dir replace a download."

    texts: Callable[[], HubTexts]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,  # keep the order of the source; the keys are integers
        )

    def _split_generators(self, dl_manager):
        try:
            manual = dl_manager.manual_dir
        except AssertionError:  # TFDS raises this if manual_dir is missing or empty
            manual = None
        texts = self.texts()
        texts.find(dl_manager.download_dir, manual)
        return {split: self._generate_examples(texts, split) for split in texts.splits}

    def _generate_examples(self, texts: HubTexts, split: str):
        """Beyond 1 GB, TFDS sorts examples in buckets, cut evenly from keys of 128 bits: so the keys fill these."""
        step = 2**128 // texts.number(split)
        for row, text in enumerate(texts.documents(split)):
            yield row * step, {"text": text}


class Wikitext103(_HubBuilder):
    """Featured and good articles of Wikipedia (Merity et al., 2016)."""

    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="detokenized", description="As prose: dlwh/wikitext_103_detokenized."),
        tfds.core.BuilderConfig(name="raw", description="As tokens, without <unk>: Salesforce/wikitext."),
    ]

    def texts(self) -> HubTexts:
        return RawWikitext() if self.builder_config.name == "raw" else DetokenizedWikitext()


class Openwebtext(_HubBuilder):
    """Web pages that Reddit links to (Gokaslan and Cohen, 2019)."""

    texts = OpenWebText


class Corpus(NamedTuple):
    """Where documents come from.

    source: SeqIO source of examples with the feature `text`.
    origin: its description for readers; written into the token store.
    tokenizer: the kind (`config.data.tokenizer`) with which `diffeqformer.data.tasks` registers it; gpt2 or bytes.
    """

    source: seqio.DataSource
    origin: str
    tokenizer: str = "gpt2"


class OrderedTfds(seqio.TfdsDataSource):
    """One of our TFDS data sets, downloaded and written when it is first read.

    Its examples have an order, so TFDS refuses to shuffle them. SeqIO shuffles by default: files are then read in
    random order, several at once, as those of any other data set. Name its splits, which TFDS would know only once the
    data set is written.
    """

    READ_AT_ONCE = 16  # files when shuffling, as TFDS does for unordered data sets

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

    def get_dataset(self, split=None, shuffle=True, seed=None, shard_info=None, **_) -> tf.data.Dataset:
        """The examples of a split, by default train. As in SeqIO's class, other arguments change nothing."""
        how = self.tfds_dataset.read_config.replace(shuffle_seed=seed, skip_prefetch=True)
        if shard_info:
            how.input_context = tf.distribute.InputContext(shard_info.num_shards, shard_info.index)
        if shuffle:
            how.enable_ordering_guard, how.interleave_cycle_length = False, self.READ_AT_ONCE
        return self.fetch().as_dataset(split=split or tfds.Split.TRAIN, shuffle_files=shuffle, read_config=how)


CORPORA: dict[str, Corpus] = {}


def add_corpus(name: str, source: seqio.DataSource, origin: str, tokenizer: str = "gpt2") -> None:
    """Add a corpus; see `Corpus`."""
    CORPORA[name] = Corpus(source, origin, tokenizer)


def configure(module: str, option: str = "config.data.module") -> None:
    """Import a module that adds corpora, if one is named, and use the folder that TFDS_DATA_DIR names.

    The module may be in the current folder, even if the command's own script is elsewhere.
    """
    if module:
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # the module is the user's
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise UserError(f"{option}: {module} can't be imported: {reason}") from None
    if folder := os.environ.get("TFDS_DATA_DIR"):  # TFDS reads it only when it is imported, `HubTexts` at each use
        seqio.set_tfds_data_dir_override(folder)


def rekey(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The text, under the name that SeqIO expects for text to be tokenized."""
    if "text" not in dataset.element_spec:
        raise UserError(
            "config.data.task: the examples of a corpus must have a 'text', but they have "
            f"{', '.join(dataset.element_spec)}"
        )
    return dataset.map(lambda example: {"targets": example["text"]})


def one_sentence(error: Exception) -> str:
    """An error's message. For a UserError that TensorFlow has wrapped, the original message."""
    wrapped = re.search(r"UserError: (.*)", str(error))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return wrapped.group(1).strip() if wrapped else lines[0][:300]


class SourceTexts:
    """The documents of a corpus as SeqIO reads them, with the methods of `diffeqformer.data.sources.FileTexts`."""

    found = None  # SeqIO finds the corpus again in each process

    def __init__(self, corpus: str):
        if corpus not in CORPORA:
            raise UserError(f"the task must be one of {', '.join(CORPORA)}, but it is '{corpus}'")
        self.source, self.origin, _ = CORPORA[corpus]

    def fetch(self) -> None:
        """Download the source and write it as a TensorFlow data set, if it needs one and doesn't have it yet."""
        if isinstance(self.source, seqio.TfdsDataSource):
            with writing():
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
        try:
            for example in rekey(self.source.get_dataset(split, shuffle=False, shard_info=part)).as_numpy_iterator():
                yield example["targets"].decode("utf-8")
        except tf.errors.OpError as error:
            raise UserError(one_sentence(error)) from None


def stdlib_documents(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    """One document per file; always in the same order."""

    def examples():
        return ({"text": text} for text in StandardLibrary().documents(split))

    return tf.data.Dataset.from_generator(examples, output_signature={"text": tf.TensorSpec([], tf.string)})


_stdlib = seqio.FunctionDataSource(stdlib_documents, splits=("train", "validation"))
add_corpus("python_stdlib", _stdlib, StandardLibrary.origin, tokenizer="bytes")
for _name, _texts in HUB_CORPORA.items():
    add_corpus(_name, OrderedTfds(f"{_texts.name}:1.0.0", splits=_texts.splits), _texts.origin)
