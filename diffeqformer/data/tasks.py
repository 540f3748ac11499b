"""The corpora as SeqIO's sources and tasks. Import this module only where TensorFlow may be imported.

    import seqio
    from diffeqformer.data import tasks
    seqio.get_dataset("wikitext103_gpt2", {"targets": 1024}, tasks.CONVERTER)

The import registers every corpus with its usual tokenizer: python_stdlib_bytes, wikitext103_gpt2, wikitext103_raw_gpt2
and openwebtext_gpt2, unless another program has taken that name. Nothing is opened or downloaded before a task is used.
`add_task` registers others, and `add_corpus`, in a module that `config.data.module` names, a corpus of your own.

Without a sequence length, a task's examples are documents: `targets`, their ids with end-of-text last, and
`targets_pretokenized`, their text. With one, they are windows of as many ids (`windows`). Documents of white space
alone are left out, as in training. An evaluator measures `Perplexity`.
"""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import flax
import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data import texts
from diffeqformer.data.files import Layout
from diffeqformer.data.perplexities import WITHHELD, text_results
from diffeqformer.data.texts import FileTexts, LocalTexts
from diffeqformer.data.tokenizers import Tokenizer, open_tokenizer
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


CORPORA: dict[str, tuple[seqio.DataSource, str]] = {}
"""The source and the origin of each corpus."""


def add_corpus(name: str, source: seqio.DataSource, origin: str) -> None:
    """Add a corpus.

    Args:
        source: SeqIO source of examples with the feature `text`.
        origin: its description for readers; written into the token store.
    """
    CORPORA[name] = source, origin


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
        self.source, self.origin = CORPORA[corpus]

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


class TokenizerVocabulary(seqio.Vocabulary):
    """One of our tokenizers as a SeqIO vocabulary. End-of-text is the only special id.

    Args:
        tokenizer: the tokenizer; or gpt2 or bytes, which is opened when it is first needed.
    """

    def __init__(self, tokenizer: Tokenizer | str):
        super().__init__()
        self._given = tokenizer
        self.name = tokenizer if isinstance(tokenizer, str) else tokenizer.name

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self._given) if isinstance(self._given, str) else self._given

    @property
    def eos_id(self):
        return self.tokenizer.end_of_text

    @property
    def bos_id(self):
        return None

    @property
    def unk_id(self):
        return self.tokenizer.unknown

    @property
    def _base_vocab_size(self):
        return self.tokenizer.vocab_size

    def _encode(self, s):
        return self.tokenizer.encode(s)

    def _decode(self, ids):
        return self.tokenizer.decode(ids)

    def _encode_tf(self, s):
        def encode(text):  # bytes within a pipeline, a 0-dimensional array outside
            content = text if isinstance(text, bytes) else text.item()  # NumPy's own bytes lose NULs at their end
            return np.array(self.tokenizer.encode(content.decode("utf-8")), np.int32)

        return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32, stateful=False), [None])

    def _decode_tf(self, ids):
        return tf.numpy_function(lambda i: self.tokenizer.decode(i.tolist()), [ids], tf.string, stateful=False)

    def __eq__(self, other):
        return isinstance(other, TokenizerVocabulary) and self.name == other.name


def with_text(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The documents that aren't blank, as in a token store."""
    blank = r"[\t-\r\x1c-\x20\x{85}\p{Z}]*"  # Python's white space
    return dataset.filter(lambda example: not tf.strings.regex_full_match(example["targets_pretokenized"], blank))


def windows(dataset: tf.data.Dataset, sequence_length: Mapping[str, int | None] | None = None) -> tf.data.Dataset:
    """Concatenate documents and cut them into windows of `sequence_length["targets"]` ids.

    SeqIO itself would keep the beginning of each document alone. An incomplete last window is dropped. Without such a
    length, the documents are returned.
    """
    if not (sequence_length and sequence_length.get("targets")):
        return dataset
    ids = dataset.map(lambda example: {"targets": example["targets"]})
    return ids.rebatch(sequence_length["targets"], drop_remainder=True)


class NextToken(seqio.FeatureConverter):
    """Inputs, the ids that follow them, and weights, each of the task's length S, padded with 0.

    The weight is 1 where the next id is known, so 0 at an example's last id and on padding. Of a window of S ids, S - 1
    are predicted. SeqIO's own converter takes id 0 for padding, which is "!" in GPT-2's vocabulary.
    """

    TASK_FEATURES = {"targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)}
    MODEL_FEATURES = {
        name: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
        for name in ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    }

    def __init__(self):
        super().__init__(pack=False)

    def _convert_features(self, ds, task_feature_lengths):
        length = task_feature_lengths["targets"]

        def padded(values: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.pad(values, [[0, length - tf.shape(values)[0]]]), [length])

        def convert(example):
            ids = example["targets"]
            features = (ids, ids[1:], tf.ones_like(ids[1:]))
            return dict(zip(self.MODEL_FEATURES, map(padded, features)))

        return ds.map(convert, num_parallel_calls=tf.data.AUTOTUNE)

    def get_model_feature_lengths(self, task_feature_lengths):
        return dict.fromkeys(self.MODEL_FEATURES, task_feature_lengths["targets"])


CONVERTER = NextToken()
"""For whatever asks for a feature converter."""


@flax.struct.dataclass
class Perplexity(seqio.metrics.Metric):
    """Perplexity per token and per word, and bits per byte, of all ids but the first of each example.

    With windows, `perplexity` is the paper's. With whole documents, their end-of-text ids are among the tokens; they
    have no words and no bytes. A word that a window cuts counts in both windows. This holds for scores by `CONVERTER`.
    With unknown ids, what is divided by words or bytes is NaN.
    """

    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.SCORE
    log_likelihood: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    unknown: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name="targets", mask=None, indices_2d=None):
        """Add up scores: for each example, the sum of log-likelihoods in nats with the converter's weights."""
        tokenizer = features[target_field_name].vocabulary.tokenizer
        sums = cls()
        for number, (example, score) in enumerate(zip(inputs, np.asarray(model_output, np.float64), strict=True)):
            if mask is None or mask[number]:
                ids = example[target_field_name][1:].tolist()
                text = tokenizer.decode_bytes(ids)
                words = len(text.decode("utf-8", errors="replace").split())
                unknown = ids.count(tokenizer.unknown)
                one = cls(log_likelihood=score, tokens=len(ids), words=words, bytes=len(text), unknown=unknown)
                sums = sums.merge(one)
        return sums

    def merge(self, other: "Perplexity") -> "Perplexity":
        names = ("log_likelihood", "tokens", "words", "bytes", "unknown")
        return self.replace(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @classmethod
    def empty(cls) -> "Perplexity":
        return cls()

    def compute(self) -> dict[str, Any]:
        found = text_results(float(self.log_likelihood), int(self.tokens), int(self.words), int(self.bytes))
        return found | WITHHELD if self.unknown else found


def task_name(corpus: str, tokenizer: str) -> str:
    """The name of a corpus's task. SeqIO allows no hyphen in it."""
    return f"{corpus}_{tokenizer}".replace("-", "_")


def add_task(
    corpus: str,
    tokenizer: Tokenizer | str,
    files: dict[str, Sequence[str]] | None = None,
    *,
    layout: Layout = Layout(),
    preprocessors: Sequence[Callable] = (with_text, windows),
    **more,
) -> seqio.Task:
    """Register the SeqIO task `<corpus>_<tokenizer>`, replacing any earlier one of that name.

    Args:
        tokenizer: as for `TokenizerVocabulary`.
        files: local files of each split that replace the corpus, which then needs no entry in `CORPORA`.
        preprocessors: those that come after the tokenization.
        more: other arguments of `seqio.TaskRegistry.add`. Without metrics among them, the task has `Perplexity`.
    """
    if corpus not in CORPORA and not files:
        raise UserError(f"the task must be one of {', '.join(CORPORA)}, but it is '{corpus}'")
    vocabulary = TokenizerVocabulary(tokenizer)
    name = task_name(corpus, vocabulary.name)
    if name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(name)
    tokenize = [rekey, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    return seqio.TaskRegistry.add(
        name,
        source=Documents(LocalTexts(files, corpus, layout)) if files else CORPORA[corpus][0],
        preprocessors=[*tokenize, *preprocessors],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)},
        **(more if {"metric_objs", "metric_fns"} & more.keys() else {**more, "metric_objs": [Perplexity()]}),
    )


for _name, _texts in texts.CORPORA.items():
    add_corpus(_name, Documents(_texts()), _texts.origin)
    if task_name(_name, _texts.tokenizer) not in seqio.TaskRegistry.names():
        add_task(_name, _texts.tokenizer)
