"""The second phase of a model, without the first: reading tokens, with a key-value cache or without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from diffeqformer.depth.weights import StackedWeights
from diffeqformer.errors import UserError, counted
from diffeqformer.parallel.memory import check_free
from diffeqformer.parallel.sharding import on_every_device
from diffeqformer.solvers import SOLVERS, KeyValueCache
from diffeqformer.transformer import MODELS, Transformer, split_model, weights_at

CHUNK = 64  # positions of the prompt that are processed at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A model's structure and parameters, of which depth isn't used, and its weights on one grid."""

    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    params: dict
    weights: StackedWeights

    def model(self) -> Transformer:
        return nnx.merge(self.graph, self.params)


def without_depth(model: Transformer) -> Transformer:
    """A copy without depth weights, which reads tokens with weights that are given. It shares the other parameters."""
    reader = nnx.merge(*split_model(model))
    del reader.depth
    return reader


def with_solver(model: Transformer, name: str, config) -> Transformer:
    """A copy with another solver. It shares the parameters."""
    possible = MODELS[config.kind].solvers(model.unit_steps)
    if model.depth.fixed_depth:  # it has weights for the nodes of its own solver only
        possible = [other for other in possible if SOLVERS[other].nodes == SOLVERS[config.solver].nodes]
    if name not in possible:
        raise UserError(
            f"--solver: must be one of {', '.join(possible)} for this model of the kind {config.kind}, "
            f"but it is {name!r}"
        )
    return model.replace(solver=SOLVERS[name])


def split_reader(model: Transformer, num_steps: int | None = None, mesh: Mesh | None = None) -> Reader:
    """What is needed of a model on one grid, without the many arrays of a hypernetwork.

    Each device of a mesh gets a copy of all. Without one, everything stays where it is: weights are made where the
    hypernetwork is, and divided like it.
    """
    reader = Reader(*split_model(without_depth(model)), weights_at(model, num_steps))
    return on_every_device(reader, mesh) if mesh else reader


def positions_for(needed: int, max_length: int, least: int = 256) -> int:
    """How many positions so many are padded to: `least` or another power of two, so that few programs are compiled."""
    return min(max_length, max(least, 1 << (needed - 1).bit_length()))


def padded_prompt(prompt: list[int], room: int) -> Int[np.ndarray, "1 length"]:
    """A prompt in an array of at least `room` positions, in whole chunks, for `read_prompt`."""
    tokens = np.zeros((1, -(-room // CHUNK) * CHUNK), np.int32)
    tokens[0, : len(prompt)] = prompt
    return tokens


@jax.jit
def read_prompt(
    reader: Reader, tokens: Int[Array, "1 length"], count: Int[Array, ""]
) -> tuple[Float[Array, "1 V"], KeyValueCache]:
    """The logits after the first `count` tokens, and the cache that holds these tokens; compiled once for all prompts.

    `tokens` fill the cache's whole length. Only the chunks that contain the prompt are computed.
    """
    model, weights, length = reader.model(), reader.weights, tokens.shape[1]
    field = model.field
    evaluations = len(weights.step_sizes) * model.solver.evaluations
    zeros = jnp.zeros((evaluations, 1, length, field.key_value_heads, field.head_width), model.dtype)

    def read_chunk(chunk, carry):
        position = chunk * CHUNK
        here = jax.lax.dynamic_slice_in_dim(tokens, position, CHUNK, axis=1)
        return model.extend(here, weights, carry[1], position)

    states = jnp.zeros((1, CHUNK, field.width), jnp.float32)
    start = states, KeyValueCache(zeros, zeros)
    states, cache = jax.lax.fori_loop(0, (count + CHUNK - 1) // CHUNK, read_chunk, start)
    last = jax.lax.dynamic_slice_in_dim(states, (count - 1) % CHUNK, 1, axis=1)  # of the last chunk
    return model.head(last)[:, 0], cache


@functools.partial(jax.jit, donate_argnames=("cache",))
def read_token(
    reader: Reader, cache: KeyValueCache, tokens: Int[Array, "B"], position: Int[Array, "*each"]
) -> tuple[Float[Array, "B V"], KeyValueCache]:
    """The logits after one more token at `position`, of each text or of all, and the cache, which is donated."""
    model = reader.model()
    states, cache = model.extend(tokens[:, None], reader.weights, cache, position)
    return model.head(states)[:, 0], cache


@functools.partial(jax.jit, donate_argnames=("cache",))
def replace_text(
    logits: Float[Array, "B V"],
    cache: KeyValueCache,
    text: int | Int[Array, ""],
    new_logits: Float[Array, "1 V"],
    new_cache: KeyValueCache,
) -> tuple[Float[Array, "B V"], KeyValueCache]:
    """The logits and the cache with those of one text, from `read_prompt`, in the place of text number `text`."""
    cache = jax.tree.map(lambda old, new: old.at[:, text].set(new[:, 0]), cache, new_cache)
    return logits.at[text].set(new_logits[0]), cache


def check_room(model: Transformer, steps: int, length: int, texts: int, option: str, divided: bool = True) -> None:
    """Check that the keys and values of some texts of so many positions, and of one that is read, fit into memory.

    divided: over all devices, as a hypernetwork's weights are at most.
    """
    shape = steps * model.solver.evaluations, 1, length, model.field.key_value_heads * model.field.head_width
    one = jax.ShapeDtypeStruct(shape, model.dtype)
    parts = jax.device_count() if divided and model.depth.continuous else 1
    check_free(f"{option}: the keys and values of {counted(texts, 'text')}", one, 2 * (texts + 1) / parts)
