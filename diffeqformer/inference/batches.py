"""Texts after many prompts, several at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Key

from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.cached import check_room, positions_for
from diffeqformer.inference.choice import Choice
from diffeqformer.inference.reader import split_reader
from diffeqformer.inference.sampling import Samples, continue_prompts, encode_prompt, sample_keys, tokens_after
from diffeqformer.transformer import Transformer


class Text(NamedTuple):
    """A text to be written.

    prompt: its beginning, at least one id.
    count: the most tokens.
    key: the index of its random key.
    until: strings at which it ends, none of them empty.
    """

    prompt: list[int]
    count: int
    key: int
    until: Sequence[str] = ()


def write_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int | None,
    key: Key[Array, ""],
    choice: Choice = Choice(),
    samples: int = 1,
    batch_size: int = 8,
    num_steps: int | None = None,
    sliding_window: bool = False,
    until: Sequence[str] = (),
) -> Iterator[str]:
    """Generate a text for each sample after each prompt, in order. They come when their batch is complete.

    A text doesn't depend on the other prompts: up to rounding, it is that of `sampling.generate` for its prompt alone.

    Args:
        prompts: of any lengths; each may be empty.
        batch_size: texts that are written at once; affects only the speed.

    See `sampling.generate` for the other arguments.

    Raises:
        UserError: at once, if one of these is out of range, with the number of the prompt at fault, from 1.
    """
    choice.check()
    texts, keys = [], sample_keys(key, samples)
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encode_prompt(tokenizer, prompt)
            count = tokens_after(ids, tokens, model.max_length, sliding_window)
        except UserError as error:
            raise UserError(f"prompt {number}: {error}") from None
        texts += [Text(ids, count, sample, until) for sample in range(samples)]
    if not texts:
        return iter(())
    size = min(batch_size, len(texts))
    length = positions_for(max(len(text.prompt) + text.count for text in texts), model.max_length)
    check_room(model, [num_steps], length, size, "batch_size")
    reader = *split_reader(model, num_steps), model.max_length
    return write_batches(reader, tokenizer, texts, keys, choice, size)


def write_batches(
    reader: tuple, tokenizer: Tokenizer, texts: Sequence[Text], keys: Key[Array, "N"], choice: Choice, size: int
) -> Iterator[str]:
    """Yields the texts in order, `size` at a time: what follows each prompt, up to the string that ends it, if any.

    Args:
        reader: the first four arguments of `continue_prompts`.
    """
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        whole = [*batch, *[batch[0]] * (size - len(batch))]  # another size would be compiled again
        written = [Samples(tokenizer, text.prompt, 1, text.until) for text in batch]
        steps = continue_prompts(
            *reader, [text.prompt for text in whole], count=max(text.count for text in batch),
            keys=keys[np.array([text.key for text in whole])], vocab_size=tokenizer.vocab_size,
            unknown=tokenizer.unknown, choice=choice,
        )  # fmt: skip
        going_on = range(len(batch))
        for done, tokens in enumerate(steps, 1):
            for i in going_on:
                written[i].add(tokens[i : i + 1])
            going_on = [i for i in going_on if done < batch[i].count and not written[i].finished()]
            if not going_on:
                break
        yield from (samples.text(0) for samples in written)
