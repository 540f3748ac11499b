"""Text from a model, the simple way: the whole window is computed anew for each token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from diffeqformer.models import Transformer


def printable(text: str) -> str:
    """The text with every control character but line ends and tabs replaced, safe for a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@functools.partial(jax.jit, static_argnames=("graph", "vocab_size", "temperature"))
def _generate(graph, params, tokens, prompt_length, key, vocab_size, temperature):
    model = nnx.merge(graph, params)
    weights = model.weights()

    def write_token(position, tokens):
        logits = model(tokens, weights)[0, position - 1, :vocab_size]
        if temperature == 0:
            token = jnp.argmax(logits)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
        return tokens.at[0, position].set(token.astype(tokens.dtype))

    return jax.lax.fori_loop(prompt_length, tokens.shape[1], write_token, tokens)


def generate(model: Transformer, tokenizer, prompt: str, length: int, key: Key[Array, ""], temperature: float) -> str:
    """The prompt and what the model writes after it, up to `length` tokens or the end of the text.

    Args:
        model: any model of the family; its trained number of steps is used.
        tokenizer: of `diffeqformer.data.tokenizers`.
        prompt: at least one token, fewer than `length`.
        length: tokens in all, at most the model's number of positions.
        key: random key of the sample.
        temperature: divides the logits; 0 takes the likeliest token.

    Raises:
        ValueError: if the prompt is empty or not shorter than `length`, or `length` exceeds the model's positions.
    """
    prompt_ids = tokenizer.encode(prompt)
    if not 0 < len(prompt_ids) < length <= model.max_length:
        raise ValueError(
            f"prompt: it has {len(prompt_ids)} tokens, but there must be at least 1 and fewer than length ({length}), "
            f"which must not exceed the model's {model.max_length} positions"
        )
    graph, params = nnx.split(model)
    tokens = jnp.zeros((1, length), jnp.int32).at[0, : len(prompt_ids)].set(jnp.array(prompt_ids))
    ids = _generate(graph, params, tokens, len(prompt_ids), key, tokenizer.vocab_size, temperature)[0].tolist()
    written = ids[len(prompt_ids) :]
    if tokenizer.end_of_text in written:
        ids = ids[: len(prompt_ids) + written.index(tokenizer.end_of_text)]
    return tokenizer.decode(ids)
