"""The SeqIO tasks of corpora. Import this module only where TensorFlow may be imported.

    import seqio
    from diffeqformer.data import tasks
    seqio.get_dataset("wikitext103_gpt2", {"targets": 1024}, tasks.CONVERTER)

The import registers every corpus with its usual tokenizer: python_stdlib_bytes, wikitext103_gpt2, wikitext103_raw_gpt2
and openwebtext_gpt2, unless another program has taken that name. Nothing is opened or downloaded before a task is used.
`add_task` registers others.

Without a sequence length, a task's examples are documents: `targets`, their ids with end-of-text last, and
`targets_pretokenized`, their text. With one, they are windows of as many ids (`windows`). Documents of white space
alone are left out, as in training. An evaluator measures `diffeqformer.data.language_model.Perplexity`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data import TASK_NAME, TASK_NAME_SAYS
from diffeqformer.data.corpora import CORPORA, add_corpus, rekey  # noqa: F401 (users add corpora from here)
from diffeqformer.data.files import Layout
from diffeqformer.data.language_model import CONVERTER, Perplexity  # noqa: F401 (users take the converter from here)
from diffeqformer.data.texts import LocalTexts
from diffeqformer.data.tokenizers import Tokenizer, open_tokenizer
from diffeqformer.errors import UserError

TEXT = tf.TensorSpec([], tf.string)


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


class LocalFiles(seqio.DataSource):
    """Documents in local files that replace a corpus, as a SeqIO source (`diffeqformer.data.texts.LocalTexts`)."""

    supports_arbitrary_sharding = False

    def __init__(self, files: dict[str, Sequence[str]], corpus: str = "", layout: Layout = Layout()):
        super().__init__(splits=files, caching_permitted=False)
        self.texts = LocalTexts(files, corpus, layout)

    def list_shards(self, split: str):
        return [files[0] for files in self.texts.groups(split)]

    def get_dataset(self, split, shuffle=False, seed=None, shard_info=None, **_):
        part = (shard_info.index, shard_info.num_shards) if shard_info else ()
        return tf.data.Dataset.from_generator(
            lambda: ({"text": text} for text in self.texts.documents(split, *part)), output_signature={"text": TEXT}
        )


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
    if not re.fullmatch(TASK_NAME, corpus):
        raise UserError(f"the task {TASK_NAME_SAYS}, but it is '{corpus}'")
    vocabulary = TokenizerVocabulary(tokenizer)
    name = task_name(corpus, vocabulary.name, suffix)
    if name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(name)
    tokenize = [rekey, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    return seqio.TaskRegistry.add(
        name,
        source=LocalFiles(files, corpus, layout) if files else CORPORA[corpus].source,
        preprocessors=[*tokenize, *preprocessors],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)},
        **(more if {"metric_objs", "metric_fns"} & more.keys() else {**more, "metric_objs": [Perplexity()]}),
    )


for _name, _corpus in CORPORA.items():
    if task_name(_name, _corpus.tokenizer) not in seqio.TaskRegistry.names():
        add_task(_name, _corpus.tokenizer)
