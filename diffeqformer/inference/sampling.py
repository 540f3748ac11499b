"""Text generation, token by token.

Depth weights are generated once, and keys and values are cached for every step of depth.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.cross_entropy import of_vocabulary
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.reader import (
    Reader,
    check_room,
    padded_prompt,
    positions_for,
    read_prompt,
    read_token,
    replace_text,
    split_reader,
)
from diffeqformer.transformer import Transformer

MOST = 256  # tokens that are written if no number is given
CONTEXT = 8  # ids before those that are decoded, as some tokenizers decode the first ones of a text differently


class Choice(NamedTuple):
    """How the next token is chosen.

    temperature: divides the logits; 0, or a value practically equal to 0, takes the likeliest token.
    top_k: keep this many of the likeliest tokens; 0 keeps all.
    top_p: of these, keep the smallest set of likeliest tokens with at least this total probability; 1 keeps all.
    vocab_size, unknown: ids from the first one on, which pad the vocabulary, and the second are never chosen.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None
    unknown: int | None = None

    def check(self) -> None:
        """Check that the values are in range."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: must be a number of at least 0, but it is {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise UserError(f"top_k: must be a whole number of at least 0, but it is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be above 0 and at most 1, but it is {self.top_p}")


def chances(logits: Float[Array, "B V"], choice: Choice) -> Float[Array, "B V"]:
    """The logits of the tokens as `choice` draws them at a temperature above 0: -inf for those that it excludes.

    top_p is nucleus sampling.

    @inproceedings{holtzman2020curious,
      title={The Curious Case of Neural Text Degeneration},
      author={Holtzman, Ari and Buys, Jan and Du, Li and Forbes, Maxwell and Choi, Yejin},
      booktitle={International Conference on Learning Representations},
      year={2020}}
    """
    logits = logits / choice.temperature
    if 0 < choice.top_k < logits.shape[-1]:
        logits = jnp.where(logits < jax.lax.top_k(logits, choice.top_k)[0][:, -1:], -jnp.inf, logits)
    if choice.top_p < 1:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # total probability of all likelier tokens
        least = jnp.min(jnp.where(before < choice.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], choice: Choice) -> Int[Array, "B"]:
    """One token for each row of logits."""
    if choice.temperature < 1e-6:
        return jnp.argmax(logits, axis=-1)
    return jax.vmap(jax.random.categorical)(keys, chances(logits, choice))


@functools.partial(jax.jit, static_argnames=("choice",))
def choose_next(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], position: Int[Array, "*each"], choice: Choice
) -> Int[Array, "B"]:
    """The token chosen at `position`, of each text or of all, for `checked`: -1 where logits are NaN or infinite."""
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(position, keys.shape))
    logits = of_vocabulary(logits, choice.vocab_size, choice.unknown)
    tokens = draw(logits, keys, choice)
    return jnp.where(jnp.isfinite(logits.max(axis=-1)), tokens, -1).astype(jnp.int32)


def checked(tokens: Array) -> Int[np.ndarray, "B"]:
    """The tokens of `choose_next` on the host; raises `NotFinite` if one is -1."""
    tokens = np.asarray(tokens)
    if (tokens < 0).any():
        raise NotFinite
    return tokens


def tokens_after(prompt: list[int], count: int | None, max_length: int, sliding_window: bool) -> int:
    """How many tokens are written after a prompt: `count`, or by default as many as fit, up to `MOST`."""
    room = MOST if sliding_window else max_length - len(prompt)
    if not prompt or room < 1:
        raise UserError(
            f"prompt: must have at least 1 token and fewer than the model's {max_length} positions, but it has "
            f"{len(prompt)}" + "; with sliding_window it can have more" * bool(prompt)
        )
    count = min(MOST, room) if count is None else count
    if count < 1:
        raise UserError(f"tokens: must be at least 1, but it is {count}")
    if count > room and not sliding_window:
        raise UserError(
            f"tokens: after a prompt of {len(prompt)} there is room for {room}, but it is {count}; with sliding_window "
            "there can be more"
        )
    return count


def write_tokens(
    model: Transformer,
    prompt: list[int],
    *,
    count: int | None,
    key: Key[Array, ""],
    vocab_size: int,
    unknown: int | None = None,
    choice: Choice = Choice(),
    samples: int = 1,
    num_steps: int | None = None,
    sliding_window: bool = False,
) -> Iterator[np.ndarray]:
    """Generate text after a prompt of at least one id: yields the next token of every sample, [samples] int32.

    The device computes the next token while the caller handles this one. A sample's random choices depend on its number
    and on the position, not on how many samples there are. `NotFinite` is raised where logits are NaN or
    infinite, and a UserError for what is out of range.

    Args:
        count: tokens to write in each sample; None: as many as fit, up to `MOST`.
        vocab_size, unknown: ids from the first one on, which pad the vocabulary, and the second are never written.
        num_steps: steps of depth; None: as trained.
        sliding_window: when a text fills all positions, go on from its last half (`continue_prompts`).
    """
    choice.check()
    choice = choice._replace(vocab_size=vocab_size, unknown=unknown)
    count = tokens_after(prompt, count, model.max_length, sliding_window)
    keys = sample_keys(key, samples)
    reader = _reader(model, num_steps, len(prompt) + count, samples, "samples")
    return continue_prompts(reader, model.max_length, [prompt] * samples, count=count, keys=keys, choice=choice)


def _reader(model: Transformer, num_steps: int | None, needed: int, texts: int, option: str) -> Reader:
    """What reads texts of `needed` positions, if there is room for them."""
    check_room(model, len(model.grid(num_steps).ends), positions_for(needed, model.max_length), texts, option)
    return split_reader(model, num_steps)


def sample_keys(key: Key[Array, ""], samples: int) -> Key[Array, "samples"]:
    """The random keys of the samples of a prompt: those of the first ones don't depend on how many there are."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(samples))


def continue_prompts(
    reader: Reader, max_length: int, prompts: Sequence[list[int]], *, count: int, keys: Key[Array, "B"], choice: Choice
) -> Iterator[np.ndarray]:
    """Yields `count` times the next token of every text, [B] int32. Texts don't depend on one another.

    When a text has `max_length` ids, its last half is read again, at the first positions, and the text goes on from
    there. So each id is read twice at most, and a token always sees at least half of what the model can take. Prompts
    are the ids of each text's beginning, at least one.
    """
    half = max(1, max_length // 2)
    seen = [list(prompt) if len(prompt) < max_length else prompt[-half:] for prompt in prompts]
    begun = np.array([len(prompt) for prompt in prompts], np.int32)
    alike = len(set(begun.tolist())) == 1  # one position for all texts takes less time than one for each
    length = positions_for(max(map(len, seen)) + count, max_length)

    def read(ids):
        return read_prompt(reader, padded_prompt(ids, length), len(ids))

    logits, cache = of_text = read(seen[0])
    if len(seen) > 1:
        logits = jnp.repeat(logits, len(seen), axis=0)
        cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(seen), axis=1), cache)
    for text, (before, ids) in enumerate(itertools.pairwise(seen), 1):
        of_text = of_text if ids == before else read(ids)  # equal ones beside each other are read once
        if ids != seen[0]:
            logits, cache = replace_text(logits, cache, text, *of_text)
    token = choose_next(logits, keys, begun, choice)
    for written in range(1, count):
        places = np.array([len(ids) for ids in seen], np.int32)
        logits, cache = read_token(reader, cache, token, places[0] if alike else places)
        now = checked(token)
        for text, (ids, new) in enumerate(zip(seen, now.tolist(), strict=True)):
            ids.append(new)
            if len(ids) >= max_length:
                del ids[:-half]
                logits, cache = replace_text(logits, cache, text, *read(ids))
        token = choose_next(logits, keys, begun + written, choice)
        yield now
    yield checked(token)


class Text:
    """A text that is being written.

    Args:
        prompt: the ids of its beginning. Some tokenizers decode an id differently at the beginning of a text.
        count: the most tokens; None: any number.
        until: strings before which it ends, none of them empty.
        key: the index of its random key in `write_batches`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], count: int | None = None, until: Sequence[str] = (), key: int = 0
    ):
        self.tokenizer, self.prompt, self.count, self.until, self.key = tokenizer, prompt, count, until, key
        self.ids, self.ended = [], False
        self.decoded = "", 0  # text in whole characters, and how many ids it has

    def add(self, token: int) -> None:
        """Add the next token. End-of-text and everything after the end are dropped."""
        self.ended |= token == self.tokenizer.end_of_text
        if not self.ended:
            self.ids.append(token)
            self.ended = len(self.ids) == self.count or bool(self.until) and self._stop(self._whole()) is not None

    def text(self) -> str:
        """The text so far, up to the first string that ends it."""
        text = self._whole()
        return text[: self._stop(text)]

    def settled(self) -> str:
        """The same without an end that later tokens can change or take away: a part of a character or of a string."""
        text = self.text().rstrip("\ufffd")
        parts = (stop[:size] for stop in self.until for size in range(len(stop), 0, -1))
        return text[: len(text) - max((len(part) for part in parts if text.endswith(part)), default=0)]

    def _stop(self, text: str) -> int | None:
        return min((place for place in map(text.find, self.until) if place >= 0), default=None)

    def _whole(self) -> str:
        """All of the text so far. Only what is new is decoded, after the ids before it."""
        ids, (text, known) = self.ids, self.decoded
        begin = known - CONTEXT
        before = ids[begin:known] if begin >= 0 else self.prompt[begin:] + ids[:known]
        text += self.tokenizer.decode(before + ids[known:])[len(self.tokenizer.decode(before)) :]
        if not text.endswith("\ufffd"):  # which may be the beginning of a character
            self.decoded = text, len(ids)
        return text


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt. An empty prompt gives end-of-text, which precedes every text in training."""
    try:
        return list(tokenizer.encode(prompt)) or [tokenizer.end_of_text]
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt: it must be valid text, but its character {error.start} is {error.object[error.start]!r}"
        ) from None


def generate(model: Transformer, tokenizer: Tokenizer, prompt: str, *, samples: int = 1, **how) -> list[str]:
    """`write_texts` after a single prompt, at once."""
    return list(write_texts(model, tokenizer, [prompt], samples=samples, batch_size=samples, **how))


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

    Up to rounding, a text doesn't depend on the other prompts, nor on `batch_size`. It ends before end-of-text, or
    before a string of `until`, none of which is empty. Prompts may be empty. See `write_tokens`, whose `count` is
    `tokens` here, for the other arguments and the errors.
    """
    choice.check()
    texts = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encode_prompt(tokenizer, prompt)
            count = tokens_after(ids, tokens, model.max_length, sliding_window)
        except UserError as error:
            raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        texts += [Text(tokenizer, ids, count, until, sample) for sample in range(samples)]
    size = min(batch_size, len(texts))
    reader = _reader(model, num_steps, max(len(text.prompt) + text.count for text in texts), size, "batch_size")
    return write_batches(reader, model.max_length, tokenizer, texts, sample_keys(key, samples), choice, size)


def write_batches(
    reader: Reader,
    max_length: int,
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    keys: Key[Array, "N"],
    choice: Choice,
    size: int,
) -> Iterator[str]:
    """Yields what follows each prompt, in order, `size` texts at a time (`continue_prompts`)."""
    choice = choice._replace(vocab_size=tokenizer.vocab_size, unknown=tokenizer.unknown)
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        whole = [*batch, *[batch[0]] * (size - len(batch))]  # another size would be compiled again
        prompts, each = [text.prompt for text in whole], keys[np.array([text.key for text in whole])]
        count = max(text.count for text in batch)
        for tokens in continue_prompts(reader, max_length, prompts, count=count, keys=each, choice=choice):
            for text, token in zip(batch, tokens.tolist()):
                text.add(token)
            if all(text.ended for text in batch):
                break
        yield from (text.text() for text in batch)
