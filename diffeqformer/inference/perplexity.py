"""Perplexities as SeqIO metrics, and the evaluation that computes them. Imports TensorFlow.

docs/evaluation.md defines them. Two tasks score the same text: one scores disjoint windows, as in the paper; the other
scores every token of every document.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import flax
import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data import tasks
from diffeqformer.data.files import Layout
from diffeqformer.data.perplexities import text_results, window_results
from diffeqformer.data.quiet import quiet
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.plain_text import check_size, log_likelihoods_of
from diffeqformer.inference.scoring import Scorer, Stretch, sliding_windows


@flax.struct.dataclass
class WindowPerplexity(seqio.metrics.Metric):
    """The paper's perplexity: over all tokens but the first of disjoint windows."""

    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.SCORE
    log_likelihood: float = 0.0
    tokens: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name="targets", mask=None, indices_2d=None):
        tokens = sum(len(example[target_field_name]) - 1 for example in inputs)
        return cls(log_likelihood=float(np.sum(model_output, dtype=np.float64)), tokens=tokens)

    def compute(self):
        return window_results(self.log_likelihood, self.tokens)


@flax.struct.dataclass
class TextPerplexity(seqio.metrics.Metric):
    """The full perplexity: over every token of every document, and also per word and per byte of their text."""

    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.SCORE
    log_likelihood: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    documents: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name="targets", mask=None, indices_2d=None):
        tokens, words, size, documents = 0, 0, 0, 0
        for example in inputs:
            text = example[f"{target_field_name}_pretokenized"]
            tokens += len(example[target_field_name]) - 1  # all but end-of-text
            words, size, documents = words + len(text.decode("utf-8").split()), size + len(text), documents + 1
        return cls(
            log_likelihood=float(np.sum(model_output, dtype=np.float64)), tokens=tokens, words=words, bytes=size,
            documents=documents,
        )  # fmt: skip

    def compute(self):
        results = text_results(self.log_likelihood, self.tokens, self.words, self.bytes)
        return {**results, "documents": self.documents}


class AsTheyAre(seqio.FeatureConverter):
    """Passes ids to a model without padding, so that no id can be mistaken for padding and left unscored."""

    TASK_FEATURES = {"targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)}
    MODEL_FEATURES = {"targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)}

    def _convert_features(self, ds, task_feature_lengths):
        return ds.map(lambda example: {"targets": example["targets"]})

    def get_model_feature_lengths(self, task_feature_lengths):
        return task_feature_lengths


class Evaluation:
    """The text of one split of a corpus, to be scored by one or more models.

    Args:
        corpus: name of the corpus.
        window: tokens of a window.
        stride: tokens between the starts of the full perplexity's windows.
        files: local files to use instead of the corpus, if any.
        stored: the split in a token store, to use instead. Its text is what the tokenizer decodes.
        layout: how documents lie in local files.

    nats: the negative log-likelihood of each document, by the last full perplexity.

    Raises:
        UserError: if there is no such split.
    """

    def __init__(
        self,
        corpus: str,
        split: str,
        tokenizer: Tokenizer,
        window: int,
        stride: int,
        files: Sequence[str] | None = None,
        stored: Split | None = None,
        layout: Layout = Layout(),
    ):
        self.window, self.stride, self.end_of_text, self.stored = window, stride, tokenizer.end_of_text, stored
        self.split, self.text = split, (corpus, split, files)
        text = corpus, tokenizer, {split: files} if files else None
        how = {"stored": stored, "layout": layout}
        self.cut = tasks.add_task(
            *text, f"_windows_{window}", **how, metric_objs=[WindowPerplexity],
            preprocessors=[tasks.with_text, lambda texts: tasks.windows(texts, {"targets": window})],
        )  # fmt: skip
        self.task = documents = tasks.add_task(
            *text, "_documents", **how, preprocessors=[tasks.with_text], metric_objs=[TextPerplexity]
        )
        tasks.fetch(documents)
        if split not in documents.splits:
            raise UserError(f"--split: {corpus} has {', '.join(documents.splits)}, but it is '{split}'")

    def read(self) -> Iterator[tuple[str, list[int]]]:
        """The text and the ids of each document."""
        return ((text.decode("utf-8"), ids.tolist()) for text, ids in tasks.examples(self.task, self.split, 0, 1))

    def _evaluator(self, task: seqio.Task) -> seqio.Evaluator:
        """An evaluator, which reads and tokenizes the whole text."""
        try:
            with quiet():  # otherwise a broken document is reported twice, with a full traceback
                converter = AsTheyAre(pack=False, apply_length_check=False)
                return seqio.Evaluator(task.name, converter, self.split, async_compute_metrics=False)
        except tf.errors.OpError as error:
            raise UserError(tasks.one_sentence(error)) from None

    @functools.cached_property
    def windows(self) -> seqio.Evaluator:
        """Of the windows, made when they are first needed; raises a UserError if there is none."""
        evaluator = self._evaluator(self.cut)
        [dataset] = evaluator.cached_model_datasets.values()
        if not any(True for _ in dataset.take(1)):
            check_size(*self.text, sum(len(ids) for _, ids in self.read()), self.window)
        return evaluator

    @functools.cached_property
    def documents(self) -> seqio.Evaluator:
        """Of the documents, made when they are first needed."""
        return self._evaluator(self.task)

    def first_windows(self, count: int) -> list[Stretch]:
        """The first disjoint windows, at most `count`."""
        [dataset] = self.windows.cached_model_datasets.values()
        first = dataset.take(count).as_numpy_iterator()
        return [Stretch(example["targets"].tolist(), 1) for _, example in first]

    def paper(self, scorer: Scorer, show: Callable[[int, int], None]) -> dict[str, float]:
        """The paper's perplexity; `show` is called with the number of scored tokens and their total."""
        return self._evaluate(self.windows, scorer, show, lambda ids: [Stretch(ids, 1)])

    def full(self, scorer: Scorer, show: Callable[[int, int], None]) -> dict[str, float]:
        """The full perplexity, per token, word and byte."""
        result = self._evaluate(
            self.documents, scorer, show,
            lambda ids: sliding_windows(ids[:-1], self.window, self.stride, self.end_of_text),
        )  # fmt: skip
        if self.stored:  # it knows the bytes of the original text, which a tokenizer may have normalized
            size = self.stored.text_bytes
            result |= {"bytes": size, "bits_per_byte": result["bits_per_byte"] * result["bytes"] / size}
        return result

    def _evaluate(self, evaluator, scorer, show, stretches_of) -> dict[str, float]:
        def log_likelihoods(dataset: tf.data.Dataset) -> list[tuple[int, float]]:
            examples = {int(i): example["targets"].tolist() for i, example in dataset.as_numpy_iterator()}
            found = log_likelihoods_of(examples.values(), scorer, show, stretches_of)
            self.nats = [-total for total in found]
            return list(zip(examples, found))

        metrics, _ = evaluator.evaluate(compute_metrics=True, score_fn=log_likelihoods)
        [result] = metrics.result().values()
        return result
