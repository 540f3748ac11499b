"""SeqIO tasks. Import this module only where TensorFlow may be imported.

A task's documents have one feature, `targets`: the ids of a whole document, end-of-text last. Its
name and tokenizer also stand in `diffeqformer.data.TASK_TOKENIZERS`.
"""

import hashlib
import pathlib
import platform
import sysconfig

import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data import TASK_TOKENIZERS
from diffeqformer.data.tokenizers import TOKENIZERS

ORIGINS: dict[str, str] = {}
VALIDATION_PART = 50  # one file of the standard library in so many


class TokenizerVocabulary(seqio.Vocabulary):
    """One of our tokenizers as SeqIO wants it. No id is special but end-of-text."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    @property
    def eos_id(self):
        return self.tokenizer.end_of_text

    @property
    def bos_id(self):
        return None

    @property
    def unk_id(self):
        return None

    @property
    def _base_vocab_size(self):
        return self.tokenizer.vocab_size

    def _encode(self, s):
        return self.tokenizer.encode(s)

    def _decode(self, ids):
        return self.tokenizer.decode(ids)

    def _encode_tf(self, s):
        def encode(text):  # bytes within a pipeline, an array of no dimensions outside
            return np.array(self.tokenizer.encode(np.asarray(text).item()), np.int32)

        return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32, stateful=False), [None])

    def _decode_tf(self, ids):
        return tf.numpy_function(lambda i: self.tokenizer.decode(i), [ids], tf.string, stateful=False)

    def __eq__(self, other):
        return isinstance(other, TokenizerVocabulary) and self.tokenizer.name == other.tokenizer.name


def stdlib_files(split: str) -> list[pathlib.Path]:
    """The `.py` files of this Python's standard library, tests left out, in order of their paths.

    A hash of the path below the library's folder decides the split, so a file stays on its side
    whatever else is installed. Files that aren't UTF-8 are left out.
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


def add_task(name: str, source: seqio.DataSource, origin: str) -> seqio.Task:
    """Register a task whose source yields `text`, with the tokenizer that `TASK_TOKENIZERS` names.

    `origin` says where the text comes from, for people: it is written into the token store.
    """
    ORIGINS[name] = origin
    vocabulary = TokenizerVocabulary(TOKENIZERS[TASK_TOKENIZERS[name]]())
    return seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            lambda dataset: seqio.preprocessors.rekey(dataset, {"targets": "text"}),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos,
        ],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)},
    )


add_task(
    "python_stdlib",
    seqio.FunctionDataSource(stdlib_documents, splits=("train", "validation")),
    origin=f"standard library of Python {platform.python_version()}",
)
