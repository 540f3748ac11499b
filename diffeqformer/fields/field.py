"""The interface of a vector field: the right-hand side of dx/dt = f(x; t), given the weights at time t."""

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffeqformer.fields.layers import Context, Linear, Norm


class VectorField(abc.ABC):
    """Two branches and their sum, equation (3) of the paper. This is all that a solver needs.

    A splitting solver calls the branches one after the other. Each branch includes its own norm.
    """

    @abc.abstractmethod
    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """The attention branch F of equation (4)."""

    @abc.abstractmethod
    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """The feed-forward branch G of equation (5)."""

    def __call__(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """dx/dt at state x, given the weights at that time: the sum of both branches, in fp32."""
        attention = self.attention(weights, x, context)
        return attention.astype(jnp.float32) + self.feed_forward(weights, x, context).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Block(VectorField):
    """The vector field of a language model: a transformer block, and the properties that the model depends on.

    A block is a frozen dataclass of sizes. It lists its layers; the depth weights turn that list into parameters.
    Each of these is a field, a property or, if it is the same for all blocks of a type, a class variable:

    key_value_heads: G, where a key and a value serve H / G heads in a row.
    learned_positions: the model adds a learned position embedding to the tokens.
    rotary: the rotations of queries and keys, if there are any.
    tied_head: logits come from the transposed token embedding.
    embedding_stddev: standard deviation of the token embedding at initialisation.
    generator_decays: if a hypernetwork generates the weights, weight decay acts on all parameters (the authors' runs).
    settings: the fields of a config's `model` part that it reads, beside those of the same name.
    """

    width: int  # D
    heads: int  # H
    head_width: int  # K
    mlp: int  # F

    learned_positions: ClassVar[bool]
    generator_decays: ClassVar[bool]
    settings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config, vanilla: bool) -> "Block":
        """The block for the `model` part of a config; with `vanilla`, the block of the usual GPT or Llama."""

    @abc.abstractmethod
    def layers(self) -> dict[str, Linear | Norm]:
        """Shape and logical axes of every layer of the block, by name."""

    @abc.abstractmethod
    def final_norm(self) -> Norm:
        """The norm between the last state and the head."""

    @abc.abstractmethod
    def normalize(self, weights: dict, x: Float[Array, "B S D"], dtype: DTypeLike) -> Float[Array, "B S D"]:
        """Apply the final norm. The result has type `dtype`."""

    @abc.abstractmethod
    def head_matrices(self, weights: dict) -> tuple[Array, Array, Array, Array]:
        """Query, key and value matrices [..., H, D, K], and the parts [..., H, K, D] of the output matrix, by head.

        Heads that share a key and a value have copies of their matrices. Biases and rotations are ignored.
        """

    @abc.abstractmethod
    def feed_forward_matrices(self, weights: dict) -> dict[str, tuple[Array, Array]]:
        """Pairs of matrices [..., D, F] and [..., F, D], by name, whose products carry a state through the branch."""


def head_width_of(config) -> int:
    """The width of a head, K, from the `model` part of a config."""
    return config.head_width or config.width // config.heads
