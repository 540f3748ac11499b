"""The building blocks of a vector field: the shapes, logical axes and initial values of its weights.

A vector field lists its layers once, as `Linear` and `Norm` entries. Each kind of depth weights (`diffeqformer.depth`)
turns this list into its own parameters.
A layer's weights at one time are a plain dictionary:

    Linear: kernel [inputs, outputs], bias [outputs] (if it has one); while an adapter trains, also its factors
            a [inputs, rank] and b [rank, outputs]
    Norm:   scale [D], shift [D] (if it has one)

Kernels are two-dimensional, with all heads flattened into one axis: a TPU's 8 x 128 tiles would pad a trailing axis of
a head's width to twice its size.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, UInt32

from diffeqformer.fields import attention
from diffeqformer.parallel.sharding import identity

PRECISIONS = ("default", "highest")
"""The precision of products of fp32 matrices, by JAX's names.

default: what surrounding code sets, or else the backend's: TPUs round operands to bf16, GPUs to TF32.
highest: fp32.
"""


def precision_in(dtype: DTypeLike) -> str:
    """The precision of products that are computed in a type: computing in fp32 means fp32 on every backend."""
    return "highest" if jnp.dtype(dtype) == jnp.float32 else "default"


def multiplying(precision: str) -> contextlib.AbstractContextManager:
    """A context for tracing products at one of `PRECISIONS`.

    Automatic derivatives keep the precision of what they differentiate. Derivatives that are written by hand have that
    of the context in which they are pulled back.
    """
    return contextlib.nullcontext() if precision == "default" else jax.default_matmul_precision(precision)


def at_its_precision(method: Callable) -> Callable:
    """A method that multiplies at its object's `precision`."""

    @functools.wraps(method)
    def multiply(self, *arguments, **options):
        with multiplying(self.precision):
            return method(self, *arguments, **options)

    return multiply


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer: `y = x @ kernel + bias`, kernel [inputs, outputs]."""

    inputs: int
    outputs: int
    axes: tuple[str, str]  # logical axes of the kernel
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalisation over the model width D, with a scale and optionally a shift."""

    width: int
    shift: bool = True


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    stddev: float = 0.0,
    mean: float = 0.0,
    decays: bool = False,
    always_trains: bool = False,
) -> nnx.Param:
    """An fp32 parameter drawn from N(mean, stddev^2), with the other arguments as metadata.

    Args:
        axes: the logical axis of each dimension (`diffeqformer.parallel.sharding`).
        decays: whether weight decay acts on it.
        always_trains: whether it is trained even in a model with adapters, where most parameters are frozen.
    """
    value = jnp.full(shape, mean, jnp.float32)
    if stddev:
        value = value + stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes, decays=decays, always_trains=always_trains)


def linear(weights: dict, x: Float[Array, "*B inputs"], total: Callable = identity) -> Float[Array, "*B outputs"]:
    """Apply a linear layer in the type of its kernel, with its adapter if it has one.

    `total` sums the products of devices that split the inputs.
    """
    x = x.astype(weights["kernel"].dtype)
    y = x @ weights["kernel"]
    y = total(y + x @ weights["a"] @ weights["b"] if "a" in weights else y)
    return y + weights["bias"] if "bias" in weights else y


Heads = tuple[Float[Array, "B S any K"], ...]


def heads(weights: dict, x: Float[Array, "B S inputs"], head_width: int, parts: int = 1) -> Heads:
    """Apply a linear layer whose outputs are ordered [head, part, head width], and take its parts apart."""
    y = linear(weights, x).reshape(*x.shape[:2], -1, parts, head_width)
    return tuple(y[..., part, :] for part in range(parts))


def heads_by_position(weights: dict, x: Float[Array, "B S inputs"], head_width: int, parts: int = 1) -> Heads:
    """`heads` for attention that takes positions, and not a head's entries, along a TPU's lanes (`attention.splash`).

    The product and its gradient have that order. Reverse mode alone is supported.
    """
    x = x.astype(weights["kernel"].dtype)
    y = jnp.einsum("bsi,io->bos", x, weights["kernel"])
    if "a" in weights:
        y = y + jnp.einsum("bsr,ro->bos", x @ weights["a"], weights["b"])
    return _take_apart(y, weights.get("bias"), parts, head_width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _take_apart(
    y: Float[Array, "B outputs S"], bias: Float[Array, "outputs"] | None, parts: int, head_width: int
) -> Heads:
    y = y if bias is None else y + bias[:, None]
    by_head = y.reshape(len(y), -1, parts, head_width, y.shape[-1])
    return tuple(by_head[:, :, part].transpose(0, 3, 1, 2) for part in range(parts))


def _take_apart_forward(y, bias, parts, head_width):
    return _take_apart(y, bias, parts, head_width), None if bias is None else ()


def _put_together(parts, head_width, has_bias, gradients):
    """Transpose the gradients and write them side by side at once, which XLA wouldn't do by itself.

    The gradient of the bias is a product with ones, since a sum along lanes is slow. XLA would turn a product with one
    row of ones into a sum, so there are 8, a tile.
    """
    by_head = jnp.stack([gradient.transpose(0, 2, 3, 1) for gradient in gradients], axis=2)
    by_head = with_layout_constraint(by_head, Layout(tuple(range(by_head.ndim))))
    d_y = by_head.reshape(len(by_head), -1, by_head.shape[-1])
    if has_bias is None:
        return d_y, None
    ones = jnp.ones((8, len(d_y), d_y.shape[-1]), d_y.dtype)
    return d_y, jnp.einsum("rbs,bos->ro", ones, d_y, precision="highest")[0]


_take_apart.defvjp(_take_apart_forward, _put_together)


def layer_norm(
    weights: dict, x: Float[Array, "*B D"], epsilon: float, used_as: DTypeLike = jnp.float32
) -> Float[Array, "*B D"]:
    """LayerNorm over the last axis, in fp32.

    Args:
        used_as: the type that the result is converted to. If that is a shorter one, a single pass over x gives both
            mean and variance, as in Flax. Its relative error grows with the square of mean / standard deviation, and
            is about 1e-3 if that is 100.
    """
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    if used_as == jnp.float32:
        variance = jnp.mean(centred * centred, -1, keepdims=True)
    else:
        variance = jnp.maximum(jnp.mean(x * x, -1, keepdims=True) - mean * mean, 0.0)
    # Statistics by this name aren't computed again in the backward pass (`diffeqformer.solvers.solver.REMAT`).
    mean, inverse = (checkpoint_name(value, "norm") for value in (mean, jax.lax.rsqrt(variance + epsilon)))
    return (x - mean) * inverse * weights["scale"] + weights["shift"]


def rms_norm(weights: dict, x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """RMSNorm over the last axis, in fp32; with a shift if the weights have one."""
    x = x.astype(jnp.float32)
    inverse = checkpoint_name(jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon), "norm")
    y = x * inverse * weights["scale"]
    return y + weights["shift"] if "shift" in weights else y


class Context(NamedTuple):
    """What a vector field needs besides weights and state.

    keys: one random key per example for the dropout masks of this depth step; None: no dropout.
    dropout: the share of each branch's outputs that is dropped.
    position: position of the first token, of each example or of all; above 0 only when text is generated.
    attend: (query, key, value) -> mixed values; faster implementations and a key-value cache replace the default.
    make_heads: makes queries, keys and values from a normed state: `heads`, or what suits `attend` better.
    total: sums a branch's outputs over the devices that split its heads or hidden units.
    """

    keys: Key[Array, "B"] | None = None
    dropout: float = 0.0
    position: int | Int[Array, "*each"] = 0
    attend: Callable = attention.plain
    make_heads: Callable = heads
    total: Callable = identity

    @classmethod
    def attending(cls, attend: Callable, **others) -> "Context":
        """With that attention, and `make_heads` to suit it."""
        return cls(attend=attend, make_heads=heads_by_position if attend is attention.splash else heads, **others)

    def at_step(self, index) -> "Context":
        """The context of depth step `index`; 0 is the embedding, blocks count from 1."""
        return self if self.keys is None else self._replace(keys=fold_in(self.keys, index))


def rows_from(table, start: int | Int[Array, "*B"], count: int) -> Float[Array, "*B count width"]:
    """`count` rows of a table from each row `start` on. Past its end, the last row is repeated."""
    if isinstance(start, int):
        return jnp.asarray(table[start : start + count])
    return jnp.take(jnp.asarray(table), start[..., None] + jnp.arange(count), axis=0, mode="clip")


def fold_in(keys: Key[Array, "B"], number) -> Key[Array, "B"]:
    """Fold one number into every example's key."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def random_words(keys: Key[Array, "B"], shape: tuple[int, ...]) -> UInt32[Array, "B S D"]:
    """Random words from a hash of an example's key and the index of the entry, which depends on nothing else.

    Each index goes through a multiplicative mixer, between whose rounds the second word of the key is added. JAX's own
    generator takes some six times as many operations, and XLA for TPUs writes constants of it as arrays of x's size.
    """
    first, second = (word[:, None, None] for word in jnp.unstack(jax.random.key_data(keys), axis=-1))
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, (1, *shape), axis) for axis in (1, 2))
    word = (row * jnp.uint32(shape[1]) + column) ^ first
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) + second
    word = word * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def dropout(x: Float[Array, "B S D"], context: Context, site: int) -> Float[Array, "B S D"]:
    """Inverted dropout. Each example's mask comes from its own key, so it does not depend on the batch."""
    if context.keys is None or context.dropout == 0.0:
        return x
    keep = 1.0 - context.dropout
    mask = random_words(fold_in(context.keys, site), x.shape[1:]) < jnp.uint32(keep * 2**32)
    return jnp.where(mask, x / keep, 0.0)
