"""The formulas of perplexities. docs/evaluation.md defines them."""

import math

LARGEST = 700.0  # exponents beyond this overflow
WITHHELD = dict.fromkeys(("word_perplexity", "bits_per_byte"), math.nan)  # behind an unknown id can be any text


def window_results(log_likelihood: float, tokens: int) -> dict[str, float]:
    """The paper's perplexity, from the log-likelihood in nats of all tokens but the first of disjoint windows."""
    loss = -log_likelihood / tokens
    return {"paper_perplexity": math.exp(min(loss, LARGEST)), "paper_loss": loss, "paper_tokens": tokens}


def text_results(log_likelihood: float, tokens: int, words: int, bytes: int) -> dict[str, float]:
    """The perplexity of a text from its log-likelihood in nats: per token and per word, and in bits per byte.

    What has no tokens, words or bytes to be divided by is NaN.
    """
    loss, per_word, per_byte = (-log_likelihood / size if size else math.nan for size in (tokens, words, bytes))
    return {
        "perplexity": math.exp(min(loss, LARGEST)),
        "word_perplexity": math.exp(min(per_word, LARGEST)),
        "bits_per_byte": per_byte / math.log(2),
        "loss": loss,
        "tokens": tokens,
        "words": words,
        "bytes": bytes,
    }
