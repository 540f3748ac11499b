"""Texts after many prompts, several at once."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Array, Key

from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.choice import Choice
from diffeqformer.inference.reader import split_reader
from diffeqformer.inference.sampling import (
    Samples,
    check_room,
    continue_prompts,
    encode_prompt,
    sample_keys,
    tokens_after,
)
from diffeqformer.transformer import Transformer


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
    for name, value in (("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name}: must be at least 1, but it is {value}")
    texts, keys = [], sample_keys(key, samples)
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encode_prompt(tokenizer, prompt)
            count = tokens_after(ids, tokens, model.max_length, sliding_window)
        except UserError as error:
            raise UserError(f"prompt {number}: {error}") from None
        texts += [(ids, count, sample) for sample in range(samples)]
    if not texts:
        return iter(())
    size = min(batch_size, len(texts))
    check_room(model, [num_steps], size, "batch_size")
    reader = *split_reader(model, num_steps), model.max_length
    return _write(reader, tokenizer, texts, keys, choice, size)


def _write(reader, tokenizer, texts, keys, choice, size) -> Iterator[str]:
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        whole = batch + [batch[0]] * (size - len(batch))  # another size would be compiled again
        prompts, counts, numbers = zip(*whole)
        written = [Samples(tokenizer, prompt, 1) for prompt, *_ in batch]
        steps = continue_prompts(
            *reader, prompts, count=max(counts), keys=keys[np.array(numbers)],
            vocab_size=tokenizer.vocab_size, choice=choice,
        )  # fmt: skip
        for done, tokens in enumerate(steps):
            going_on = [i for i, text in enumerate(written) if done < counts[i] and not text.finished()]
            if not going_on:
                break
            for i in going_on:
                written[i].add(tokens[i : i + 1])
        yield from (text.text(0) for text in written)
