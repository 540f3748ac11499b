"""Perplexities without SeqIO, where it isn't installed; `diffeqformer.inference.perplexity` computes them with it."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from diffeqformer.data.files import Layout
from diffeqformer.data.perplexities import text_results, window_results
from diffeqformer.data.store import Split
from diffeqformer.data.texts import open_texts, stored_documents
from diffeqformer.data.tokenizers import Tokenizer, lost_in
from diffeqformer.errors import UserError
from diffeqformer.inference.scoring import Scorer, Stretch, sliding_windows

GROUP = 4096  # windows held in memory at once


def check_size(corpus: str, split: str, files: Sequence[str] | None, tokens: int, window: int) -> None:
    """Check that a text has at least one window, which the paper's perplexity needs."""
    if tokens < window:
        place = ", ".join(files) if files else f"{corpus}: the {split} split"
        raise UserError(f"{place} has {tokens:,} tokens, fewer than one window of {window}; choose a smaller --window")


def accounts_of(documents: Iterable[tuple[str, list[int]]], tokenizer: Tokenizer) -> list[dict[str, int]]:
    """Of each document: its bytes, its tokens without end-of-text, and what the tokenizer loses of it (`lost_in`).

    Args:
        documents: texts and their ids, of which the last is end-of-text.
    """
    return [
        {"bytes": len(text.encode()), "tokens": len(ids) - 1, "unknown_tokens": lost[0], "altered": int(lost[1])}
        for text, ids in documents
        for lost in [lost_in(tokenizer, text, ids)]
    ]


def log_likelihoods_of(
    examples: Iterable[list[int]],
    scorer: Scorer,
    show: Callable[[int, int], None],
    stretches_of: Callable[[list[int]], Iterable[Stretch]],
) -> list[float]:
    """The log-likelihood in nats of each example.

    Args:
        examples: ids, of which all but one each are scored.
        show: called with the number of scored tokens and their total.
        stretches_of: what to score of an example.
    """
    if not (examples := list(examples)):
        raise UserError("the text to be scored: there is nothing in it but white space; choose another")
    sums, total, done = [0.0] * len(examples), sum(len(ids) - 1 for ids in examples), 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        show(done, total)

    every = ((i, stretch) for i, ids in enumerate(examples) for stretch in stretches_of(ids))
    while group := list(itertools.islice(every, GROUP)):
        for (i, _), scores in zip(group, scorer([stretch for _, stretch in group], count)):
            sums[i] += float(np.sum(scores.log_probs, dtype=np.float64))
    return sums


class PlainEvaluation:
    """The text of one split, to be scored by one or more models: `diffeqformer.inference.perplexity.Evaluation`.

    Args:
        corpus: name of the corpus.
        window: tokens of a window.
        stride: tokens between the starts of the full perplexity's windows.
        files: local files to use instead of the corpus, if any.
        stored: the split in a token store, to use instead. Its text is what the tokenizer decodes.
        layout: how documents lie in local files.
        tfds_dir: folder of TFDS for a corpus of the hub; empty for its own default.

    nats: the negative log-likelihood of each document, by the last full perplexity.

    Raises:
        UserError: if there is no such corpus or split, or it can't be fetched.
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
        tfds_dir: str = "",
    ):
        self.window, self.stride, self.end_of_text, self.stored = window, stride, tokenizer.end_of_text, stored
        if stored:
            self.documents = list(stored_documents(stored, tokenizer))
        else:
            texts = open_texts(corpus, {split: files} if files else None, tfds_dir, layout)
            if split not in texts.splits:
                raise UserError(f"--split: {corpus} has {', '.join(texts.splits)}, but it is '{split}'")
            texts.fetch()
            every = (text for text in texts.documents(split) if text.strip())
            self.documents = [(text, [*tokenizer.encode(text), self.end_of_text]) for text in every]
        self.text = corpus, split, files

    def read(self) -> Iterator[tuple[str, list[int]]]:
        """The text and the ids of each document."""
        return iter(self.documents)

    @functools.cached_property
    def windows(self) -> Int[np.ndarray, "N window"]:
        """All disjoint windows; raises a UserError if there is none."""
        stream = np.array([i for _, ids in self.documents for i in ids], np.int32)
        check_size(*self.text, len(stream), self.window)
        return stream[: len(stream) // self.window * self.window].reshape(-1, self.window)

    def first_windows(self, count: int) -> list[Stretch]:
        """The first disjoint windows, at most `count`."""
        return [Stretch(ids, 1) for ids in self.windows[:count].tolist()]

    def paper(self, scorer: Scorer, show: Callable[[int, int], None]) -> dict[str, float]:
        """The paper's perplexity; `show` is called with the number of scored tokens and their total."""
        sums = log_likelihoods_of(self.windows.tolist(), scorer, show, lambda ids: [Stretch(ids, 1)])
        return window_results(sum(sums), self.windows.size - len(self.windows))

    def full(self, scorer: Scorer, show: Callable[[int, int], None]) -> dict[str, float]:
        """The full perplexity, per token, word and byte."""
        all_ids = [ids for _, ids in self.documents]
        sums = log_likelihoods_of(
            all_ids, scorer, show, lambda ids: sliding_windows(ids[:-1], self.window, self.stride, self.end_of_text)
        )
        self.nats = [-total for total in sums]
        size = sum(len(text.encode()) for text, _ in self.documents)
        results = text_results(
            sum(sums),
            tokens=sum(map(len, all_ids)) - len(all_ids),
            words=sum(len(text.split()) for text, _ in self.documents),
            bytes=self.stored.text_bytes if self.stored else size,  # a tokenizer may have normalized the text
        )
        return {**results, "documents": len(all_ids)}
