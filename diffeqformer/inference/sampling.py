"""Text generation, token by token.

Depth weights are generated once, and keys and values are cached for every step of depth.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import fold_in
from diffeqformer.inference.reader import split_reader
from diffeqformer.solvers import KeyValueCache
from diffeqformer.transformer import Transformer

CHUNK = 64  # positions of the prompt that are processed at once; the cache's length is a multiple of this


class Choice(NamedTuple):
    """How the next token is chosen.

    temperature: divides the logits; 0, or a value practically equal to 0, takes the likeliest token.
    top_k: keep this many of the likeliest tokens; 0 keeps all.
    top_p: of these, keep the smallest set of likeliest tokens with at least this total probability; 1 keeps all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Check that the values are in range.

        Raises:
            UserError: for the first that isn't, with its name.
        """
        for name, value, holds, needed in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not holds:
                raise UserError(f"{name}: must be {needed}, but it is {value}")


def chances(logits: Float[Array, "B V"], choice: Choice) -> Float[Array, "B V"]:
    """The logits of the tokens as `choice` draws them: -inf for those that it excludes.

    top_p is nucleus sampling.

    @inproceedings{holtzman2020curious,
      title={The Curious Case of Neural Text Degeneration},
      author={Holtzman, Ari and Buys, Jan and Du, Li and Forbes, Maxwell and Choi, Yejin},
      booktitle={International Conference on Learning Representations},
      year={2020}}
    """
    if choice.temperature < 1e-6:
        likeliest = jnp.argmax(logits, axis=-1, keepdims=True)
        return jnp.where(jnp.arange(logits.shape[-1]) == likeliest, 0.0, -jnp.inf)
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


def padded_prompt(prompt: list[int], room: int) -> Int[np.ndarray, "1 length"]:
    """A prompt in an array of at least `room` positions, in whole chunks, for `read_prompt`."""
    tokens = np.zeros((1, -(-room // CHUNK) * CHUNK), np.int32)
    tokens[0, : len(prompt)] = prompt
    return tokens


@functools.partial(jax.jit, static_argnames=("graph",))
def read_prompt(
    graph: nnx.GraphDef, params: dict, weights: StackedWeights, tokens: Int[Array, "1 length"], count: Int[Array, ""]
) -> tuple[Float[Array, "1 V"], KeyValueCache]:
    """The logits after the first `count` tokens, and the cache that holds these tokens; compiled once for all prompts.

    `tokens` fill the cache's whole length. Only the chunks that contain the prompt are computed.
    """
    model, length = nnx.merge(graph, params), tokens.shape[1]
    field = model.field
    cache = KeyValueCache.empty(
        len(weights.step_sizes) * model.solver.evaluations,
        1,
        length,
        field.heads,
        field.width // field.heads,
        model.dtype,
    )

    def read_chunk(chunk, carry):
        position = chunk * CHUNK
        here = jax.lax.dynamic_slice_in_dim(tokens, position, CHUNK, axis=1)
        return model.extend(here, weights, carry[1], position)

    states = jnp.zeros((1, CHUNK, field.width), jnp.float32)
    states, cache = jax.lax.fori_loop(0, (count + CHUNK - 1) // CHUNK, read_chunk, (states, cache))
    last = jax.lax.dynamic_slice_in_dim(states, (count - 1) % CHUNK, 1, axis=1)  # of the last chunk
    return model.head(last)[:, 0], cache


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("cache",))
def read_token(
    graph: nnx.GraphDef,
    params: dict,
    weights: StackedWeights,
    cache: KeyValueCache,
    tokens: Int[Array, "B"],
    position: Int[Array, ""],
) -> tuple[Float[Array, "B V"], KeyValueCache]:
    """The logits after one more token in each sample, and the updated cache. The input cache is donated."""
    model = nnx.merge(graph, params)
    states, cache = model.extend(tokens[:, None], weights, cache, position)
    return model.head(states)[:, 0], cache


@functools.partial(jax.jit, static_argnames=("choice", "vocab_size"))
def choose_next(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], position: Int[Array, ""], choice: Choice, vocab_size: int
) -> Int[Array, "B"]:
    """The token chosen at `position` in every sample, among the first `vocab_size` ids."""
    return draw(logits[:, :vocab_size], fold_in(keys, position), choice).astype(jnp.int32)


def write_tokens(
    model: Transformer,
    prompt: list[int],
    *,
    count: int,
    key: Key[Array, ""],
    vocab_size: int,
    choice: Choice = Choice(),
    samples: int = 1,
    num_steps: int | None = None,
    draft_steps: int | None = None,
) -> Iterator[np.ndarray]:
    """Generate text after a prompt: yields `count` times the next token of every sample, [samples] int32.

    The device computes the next token while the caller handles this one. A sample's random choices depend on its number
    and on the position, not on how many samples there are.

    Args:
        prompt: at least one id; with `count` at most `model.max_length` of them.
        count: tokens to write in each sample.
        key: random key of all choices.
        vocab_size: ids from this one on are never written (they pad the vocabulary).
        choice: how each token is chosen.
        samples: number of texts, all after the same prompt.
        num_steps: steps of depth; None: as trained.
        draft_steps: fewer steps, in which tokens are drafted (`diffeqformer.inference.speculation`); None: no drafts.

    Raises:
        UserError: if one of these is out of range.
    """
    choice.check()
    for name, value in (("samples", samples), ("tokens", count)):
        if value < 1:
            raise UserError(f"{name}: must be at least 1, but it is {value}")
    room = model.max_length - len(prompt)
    if not prompt or room < 1:
        raise UserError(
            f"prompt: must have at least 1 token and fewer than the model's {model.max_length} positions, "
            f"but it has {len(prompt)}"
        )
    if count > room:
        raise UserError(f"tokens: after a prompt of {len(prompt)} there is room for {room}, but it is {count}")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(samples))
    if draft_steps is not None:
        from diffeqformer.inference.speculation import continue_by_drafts

        return continue_by_drafts(
            model, num_steps, draft_steps, prompt, count=count, keys=keys, vocab_size=vocab_size, choice=choice
        )
    graph, params, weights = split_reader(model, num_steps)
    return continue_prompt(
        graph, params, weights, model.max_length, prompt, count=count, keys=keys, vocab_size=vocab_size, choice=choice
    )


def continue_prompt(
    graph: nnx.GraphDef,
    params: dict,
    weights: StackedWeights,
    max_length: int,
    prompt: list[int],
    *,
    count: int,
    keys: Key[Array, "B"],
    vocab_size: int,
    choice: Choice,
) -> Iterator[np.ndarray]:
    """`write_tokens` without its checks, for a model that is already split and whose weights are already generated.

    Args:
        graph, params: structure and parameters of a model of `max_length` positions; its `depth` isn't used.
        prompt: ids, at least one; with `count` at most `max_length` of them.
        keys: a random key for each sample.
    """
    tokens = padded_prompt(prompt, max_length)
    logits, cache = read_prompt(graph, params, weights, tokens, len(prompt))
    logits = jnp.repeat(logits, len(keys), axis=0)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(keys), axis=1), cache)
    token = choose_next(logits, keys, len(prompt), choice, vocab_size)
    for position in range(len(prompt), len(prompt) + count - 1):
        logits, cache = read_token(graph, params, weights, cache, token, position)
        following = choose_next(logits, keys, position + 1, choice, vocab_size)
        yield np.asarray(token)
        token = following
    yield np.asarray(token)


class Samples:
    """The samples of one prompt while they are being generated.

    Args:
        prompt: its ids. Some tokenizers decode an id differently at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], count: int):
        self.tokenizer, self.prompt = tokenizer, prompt
        self.before = len(tokenizer.decode(prompt))
        self.ids = [[] for _ in range(count)]
        self.ended = [False] * count

    def add(self, tokens: np.ndarray) -> None:
        """Add the next token of every sample. End-of-text and everything after it are dropped."""
        for sample, token in enumerate(tokens.tolist()):
            self.ended[sample] |= token == self.tokenizer.end_of_text
            if not self.ended[sample]:
                self.ids[sample].append(token)

    def finished(self) -> bool:
        """Whether every sample has reached its end-of-text."""
        return all(self.ended)

    def text(self, sample: int) -> str:
        """The text of a sample so far."""
        return self.tokenizer.decode(self.prompt + self.ids[sample])[self.before :]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt. An empty prompt gives end-of-text, which precedes every text in training.

    Raises:
        UserError: if it can't be encoded.
    """
    try:
        return list(tokenizer.encode(prompt)) or [tokenizer.end_of_text]
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt: it must be valid text, but its character {error.start} is {error.object[error.start]!r}"
        ) from None


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    key: Key[Array, ""],
    choice: Choice = Choice(),
    samples: int = 1,
    num_steps: int | None = None,
    draft_steps: int | None = None,
) -> list[str]:
    """Generate a text for each sample after a prompt, of up to `tokens` tokens or until end-of-text.

    Args:
        model: any model of the family.
        tokenizer: one of `diffeqformer.data.tokenizers`.
        prompt: may be empty.

    See `write_tokens` for the other arguments and the errors.
    """
    ids = encode_prompt(tokenizer, prompt)
    written = Samples(tokenizer, ids, samples)
    for step in write_tokens(
        model, ids, count=tokens, key=key, vocab_size=tokenizer.vocab_size, choice=choice,
        samples=samples, num_steps=num_steps, draft_steps=draft_steps,
    ):  # fmt: skip
        written.add(step)
        if written.finished():
            break
    return [written.text(sample) for sample in range(samples)]
