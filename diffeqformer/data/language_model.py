"""How SeqIO gives the ids of a task to a language model, and what it measures of one. Imports TensorFlow.

SeqIO's own converter for language models takes id 0 for padding, which is "!" in GPT-2's vocabulary, and puts it in
front of every example. Here the place of an id decides alone, as in training: each id is predicted from those before
it, so the first of an example isn't predicted.
"""

from typing import Any

import flax
import numpy as np
import seqio
import tensorflow as tf

from diffeqformer.data.perplexities import WITHHELD, text_results


class NextToken(seqio.FeatureConverter):
    """Inputs, the ids that follow them, and weights, each of the task's length S, padded with 0.

    The weight is 1 where the next id is known, so 0 at an example's last id and on padding. Of a window of S ids, S - 1
    are predicted.
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

        def convert(example):
            ids = example["targets"]
            features = {
                "decoder_input_tokens": ids,
                "decoder_target_tokens": ids[1:],
                "decoder_loss_weights": tf.ones_like(ids[1:]),
            }
            return {name: self._padded(values, length) for name, values in features.items()}

        return ds.map(convert, num_parallel_calls=tf.data.AUTOTUNE)

    def _padded(self, values: tf.Tensor, length: int) -> tf.Tensor:
        return tf.ensure_shape(tf.pad(values, [[0, length - tf.shape(values)[0]]]), [length])

    def get_model_feature_lengths(self, task_feature_lengths):
        return dict.fromkeys(self.MODEL_FEATURES, task_feature_lengths["targets"])


CONVERTER = NextToken()
"""For `seqio.get_dataset`, `seqio.Evaluator` and whatever else asks for a feature converter."""


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
