"""Speculative generation: one model drafts tokens in few steps of depth and verifies them in all of its steps.

Drafts are read by the full depth at once, which takes about as long as one token where memory is the limit. A draft is
kept with a probability that makes the text as likely as without drafts: greedily, the same tokens.

@inproceedings{leviathan2023fast,
  title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={International Conference on Machine Learning}, year={2023}}
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from diffeqformer.cross_entropy import of_vocabulary
from diffeqformer.errors import UserError, counted
from diffeqformer.inference.cached import check_room, padded_prompt, positions_for, read_prompt
from diffeqformer.inference.choice import Choice, chances, checked, choose_next, draw, refused
from diffeqformer.inference.reader import Reader, split_reader
from diffeqformer.solvers import KeyValueCache
from diffeqformer.transformer import Transformer, weights_at

DRAFTED = 4  # tokens in a round of drafts


class Depths(NamedTuple):
    """One for the few steps that draft, and one for the many that verify."""

    few: Reader | KeyValueCache
    many: Reader | KeyValueCache


class Writing(NamedTuple):
    """A text that is being written: its last token, which no cache holds yet, and that token's position."""

    token: Int[Array, ""]
    position: Int[Array, ""]
    caches: Depths


def accept(
    drafted: Int[Array, "drafted"],
    few: Float[Array, "drafted V"],
    many: Float[Array, "verified V"],
    key: Key[Array, ""],
) -> tuple[Int[Array, "verified"], Int[Array, ""]]:
    """The tokens that replace a draft, and how many of them count: those kept, and one more.

    Args:
        drafted: each token was drawn from its row of `few`.
        few, many: logits after `chances`. `many` has one row more: what follows the draft.
    """
    count = len(drafted)
    p, q = jax.nn.softmax(many), jax.nn.softmax(few)
    of_draft = drafted[:, None]
    ratios = jnp.take_along_axis(p[:count], of_draft, 1) / jnp.take_along_axis(q, of_draft, 1)
    kept = jnp.cumprod(jax.random.uniform(jax.random.fold_in(key, 0), (count,), jnp.float32) < ratios[:, 0]).sum()
    missing = jnp.maximum(p - jnp.append(q, jnp.zeros_like(q[:1]), axis=0), 0.0)[kept]  # after a whole draft: p
    missing = jnp.where(missing.sum() > 0, missing, p[kept])  # where p and q are equal but for rounding
    following = jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(missing)).astype(jnp.int32)
    return jnp.append(drafted, 0).at[kept].set(following), kept + 1


@functools.partial(jax.jit, static_argnames=("choice",), donate_argnames=("texts",))
def write_round(
    readers: Depths, texts: Writing, keys: Key[Array, "B"], going_on: Bool[Array, "B"], choice: Choice
) -> tuple[Writing, Int[Array, "B verified"], Int[Array, "B"]]:
    """Draft and verify once in every text: the texts, the new tokens, and how many of them count.

    Args:
        texts: each leaf with an axis B in front. They are donated.
        going_on: which texts are written further. Of the others, only caches change, which aren't read again.
    """
    model = readers.many.model()

    def read(tokens, reader, cache, position):
        states, cache = model.extend(tokens[None], reader.weights, cache, position)
        return of_vocabulary(model.head(states)[0], choice.vocab_size, choice.unknown), cache

    def write(text, key, going_on):
        key = jax.random.fold_in(key, text.position + 1)  # the first token took that of its own position

        def draft(carry, number):
            token, cache = carry
            logits, cache = read(token[None], readers.few, cache, text.position + number)
            [following] = draw(logits, jax.random.fold_in(key, 2 + number)[None], choice).astype(jnp.int32)
            return (following, cache), (following, logits[0])

        # The last draft is dropped: its step stores the keys and values of the one before it.
        (_, few), (drafted, of_few) = jax.lax.scan(draft, (text.token, text.caches.few), jnp.arange(DRAFTED + 1))
        drafted, of_few = drafted[:-1], of_few[:-1]
        verified = jnp.append(text.token, drafted)
        of_many, many = read(verified, readers.many, text.caches.many, text.position)
        tokens, count = accept(drafted, chances(of_few, choice), chances(of_many, choice), key)
        count = jnp.where(going_on, count, 0)
        tokens = refused(of_many, tokens)
        token = jnp.where(going_on, tokens[count - 1], text.token)
        return Writing(token, text.position + count, Depths(few, many)), tokens, count

    return jax.vmap(write)(texts, keys, going_on)


def continue_by_drafts(
    model: Transformer,
    num_steps: int | None,
    draft_steps: int,
    prompt: list[int],
    *,
    count: int,
    keys: Key[Array, "B"],
    choice: Choice,
) -> Iterator[np.ndarray]:
    """`sampling.write_tokens` with drafts in `draft_steps` steps, without its checks of the other arguments.

    Texts keep drafts of different lengths. A token is yielded when all of them have it.
    """
    steps = len(model.grid(num_steps).ends)
    if model.depth.fixed_depth:
        raise UserError(
            f"draft_steps: this model has weights for {counted(model.num_steps, 'step')} and for no other number; "
            "leave it out"
        )
    if not 1 <= draft_steps < steps:
        raise UserError(
            f"draft_steps: must be at least 1 and below the {steps} steps of depth, but it is {draft_steps}"
        )
    length = positions_for(len(prompt) + count, model.max_length)
    check_room(model, steps + draft_steps, length, len(keys), "samples")
    many = split_reader(model, num_steps)
    readers = Depths(dataclasses.replace(many, weights=weights_at(model, draft_steps)), many)
    return _continue(readers, length, prompt, count, keys, choice)


def _continue(readers, length, prompt, count, keys, choice):
    tokens = padded_prompt(prompt, length + DRAFTED)  # the last draft can go on behind the last position
    (_, few), (logits, many) = (read_prompt(reader, tokens, len(prompt)) for reader in readers)
    logits, caches = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (len(keys), *leaf.shape)), (logits[0], Depths(few, many))
    )
    first = choose_next(logits, keys, len(prompt), choice)
    texts = Writing(first, jnp.full(len(keys), len(prompt), jnp.int32), caches)
    written, yielded, waiting = [[token] for token in checked(first).tolist()], 0, None
    while True:
        going_on = np.array([len(text) < count for text in written])
        if going_on.any():  # the device computes while the caller handles the tokens of the last round
            waiting = write_round(readers, texts, keys, going_on, choice)
        while yielded < min(count, *map(len, written)):
            yield np.array([text[yielded] for text in written], np.int32)
            yielded += 1
        if yielded == count:
            return
        texts, new, counts = waiting
        for text, tokens, kept in zip(written, np.asarray(new), np.asarray(counts).tolist(), strict=True):
            text += checked(tokens[:kept]).tolist()
