"""The two perplexities of a text. docs/evaluation.md defines them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Int

from diffeqformer.data.perplexities import text_results, window_results
from diffeqformer.data.tokenizers import Tokenizer, lost_in
from diffeqformer.errors import UserError
from diffeqformer.inference.scoring import Scorer, Stretch, sliding_windows

GROUP = 4096  # windows held in memory at once
Show = Callable[[int, int], None]  # called with the number of scored tokens and their total


class Evaluation:
    """A text, to be scored by one or more models.

    Args:
        documents: texts and their ids, of which the last is end-of-text.
        stride: tokens between the starts of the full perplexity's windows.
        text_bytes: of the text before a tokenizer changed it; None: those of `documents`.
    """

    def __init__(
        self,
        documents: Iterable[tuple[str, list[int]]],
        name: str,
        window: int,
        stride: int,
        text_bytes: int | None = None,
    ):
        self.documents, self.name, self.window, self.stride = list(documents), name, window, stride
        if not self.documents:
            raise UserError(f"{name}: there is nothing in it but white space; choose another text")
        sizes = (len(text.encode()) for text, _ in self.documents)
        self.bytes = sum(sizes) if text_bytes is None else text_bytes

    @functools.cached_property
    def windows(self) -> Int[np.ndarray, "N window"]:
        """All disjoint windows; raises a UserError if there is none."""
        stream = np.array([i for _, ids in self.documents for i in ids], np.int32)
        if len(stream) < self.window:
            raise UserError(
                f"{self.name} has {len(stream):,} tokens, fewer than one window of {self.window}; choose a smaller "
                "--window"
            )
        return stream[: len(stream) // self.window * self.window].reshape(-1, self.window)

    def paper(self, scorer: Scorer, show: Show) -> dict[str, float]:
        """The paper's perplexity."""
        scored = self.windows.size - len(self.windows)
        sums = _log_likelihoods([[Stretch(ids, 1)] for ids in self.windows.tolist()], scored, scorer, show)
        return window_results(sum(sums), scored)

    def full(self, scorer: Scorer, show: Show) -> dict[str, float]:
        """The full perplexity, per token, word and byte."""
        every = [ids for _, ids in self.documents]
        stretches = (sliding_windows(ids[:-1], self.window, self.stride, ids[-1]) for ids in every)
        tokens = sum(map(len, every)) - len(every)
        self.nats = [-total for total in _log_likelihoods(stretches, tokens, scorer, show)]
        words = sum(len(text.split()) for text, _ in self.documents)
        return {**text_results(-sum(self.nats), tokens, words, self.bytes), "documents": len(every)}

    def accounts(self, tokenizer: Tokenizer) -> list[dict[str, int]]:
        """Of each document: its bytes, its tokens without end-of-text, and what the tokenizer loses (`lost_in`)."""
        return [
            {"bytes": len(text.encode()), "tokens": len(ids) - 1, "unknown_tokens": unknown, "altered": int(altered)}
            for text, ids in self.documents
            for unknown, altered in [lost_in(tokenizer, text, ids)]
        ]

    def scored(self, accounts: list[dict]) -> Iterator[dict]:
        """Each document's number and account, with its negative log-likelihood by the last full perplexity."""
        for number, (account, nats) in enumerate(zip(accounts, self.nats, strict=True)):
            known = account["bytes"] and not account["unknown_tokens"]
            bits = nats / math.log(2) / account["bytes"] if known else None
            yield {"document": number, **account, "nats": nats, "bits_per_byte": bits}


def _log_likelihoods(examples: Iterable[Iterable[Stretch]], total: int, scorer: Scorer, show: Show) -> list[float]:
    """The log-likelihood in nats of each example."""
    sums, done = [], 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        show(done, total)

    every = ((number, stretch) for number, stretches in enumerate(examples) for stretch in stretches)
    while group := list(itertools.islice(every, GROUP)):
        for (number, _), scores in zip(group, scorer([stretch for _, stretch in group], count)):
            sums += [0.0] * (number + 1 - len(sums))
            sums[number] += float(np.sum(scores.log_probs, dtype=np.float64))
    return sums
