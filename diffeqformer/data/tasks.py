"""The SeqIO tasks of corpora. Import this module only where TensorFlow may be imported.

    import seqio
    from diffeqformer.data import tasks
    seqio.get_dataset("wikitext103_gpt2", {"targets": 1024}, tasks.CONVERTER)

The import registers every corpus with its usual tokenizer: python_stdlib_bytes, wikitext103_gpt2, wikitext103_raw_gpt2
and openwebtext_gpt2, unless another program has taken that name. Nothing is opened or downloaded before a task is used.
`add_task` registers others.

Without a sequence length, a task's examples are documents: `targets`, their ids with end-of-text last, and
`targets_pretokenized`, their text. With one, they are windows of as many ids (`windows`). Documents of white space
alone are left out, as in training. An evaluator measures `Perplexity`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data.corpora import CORPORA, Documents, add_corpus, rekey  # noqa: F401 (users add corpora from here)
from diffeqformer.data.files import Layout
from diffeqformer.data.perplexities import WITHHELD, text_results
from diffeqformer.data.texts import LocalTexts
from diffeqformer.data.tokenizers import Tokenizer, open_tokenizer
from diffeqformer.errors import UserError


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
        """The sums over both."""
        names = ("log_likelihood", "tokens", "words", "bytes", "unknown")
        return self.replace(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @classmethod
    def empty(cls) -> "Perplexity":
        return cls()

    def compute(self) -> dict[str, Any]:
        found = text_results(float(self.log_likelihood), int(self.tokens), int(self.words), int(self.bytes))
        return found | WITHHELD if self.unknown else found


def task_name(corpus: str, tokenizer: str, suffix: str = "") -> str:
    """The name of a corpus's task. SeqIO allows no hyphen in it."""
    return f"{corpus}_{tokenizer}{suffix}".replace("-", "_")


def add_task(
    corpus: str,
    tokenizer: Tokenizer | str,
    files: dict[str, Sequence[str]] | None = None,
    suffix: str = "",
    *,
    layout: Layout = Layout(),
    preprocessors: Sequence[Callable] = (with_text, windows),
    **more,
) -> seqio.Task:
    """Register the SeqIO task `<corpus>_<tokenizer><suffix>`, replacing any earlier one of that name.

    Args:
        tokenizer: as for `TokenizerVocabulary`.
        files: local files of each split that replace the corpus, which then needs no entry in `CORPORA`.
        preprocessors: those that come after the tokenization.
        more: other arguments of `seqio.TaskRegistry.add`. Without metrics among them, the task has `Perplexity`.
    """
    if corpus not in CORPORA and not files:
        raise UserError(f"the task must be one of {', '.join(CORPORA)}, but it is '{corpus}'")
    vocabulary = TokenizerVocabulary(tokenizer)
    name = task_name(corpus, vocabulary.name, suffix)
    if name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(name)
    tokenize = [rekey, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    return seqio.TaskRegistry.add(
        name,
        source=Documents(LocalTexts(files, corpus, layout)) if files else CORPORA[corpus].source,
        preprocessors=[*tokenize, *preprocessors],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)},
        **(more if {"metric_objs", "metric_fns"} & more.keys() else {**more, "metric_objs": [Perplexity()]}),
    )


for _name, _corpus in CORPORA.items():
    if task_name(_name, _corpus.tokenizer) not in seqio.TaskRegistry.names():
        add_task(_name, _corpus.tokenizer)
