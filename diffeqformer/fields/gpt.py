"""The GPT vector field: LayerNorm, causal attention, tanh-GELU feed-forward, biases."""

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffeqformer.fields.field import Block, head_width_of
from diffeqformer.fields.layers import Context, Linear, Norm, dropout, layer_norm, linear
from diffeqformer.fields.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class GPT(Block):
    """dx/dt = attention(norm_attention(x; t); t) + feed_forward(norm_mlp(x; t); t).

    Equations (3) to (5) of the paper. Both branches read the same state; dropout acts on each
    branch's output, as in the authors' code (which never applies its attention dropout).

    tanh_gelu: GELU in its approximate form, with tanh.
    """

    epsilon: float

    learned_positions: ClassVar[bool] = True
    tied_head: ClassVar[bool] = True
    embedding_stddev: ClassVar[float] = 0.02
    generator_decays: ClassVar[bool] = False
    tanh_gelu: ClassVar[bool] = True
    rotary: ClassVar[Rotary | None] = None

    @classmethod
    def from_config(cls, config, vanilla: bool) -> "GPT":
        """The same block for a GPT and for a DiffEqFormer."""
        return cls(config.width, config.heads, head_width_of(config), config.mlp, config.norm_epsilon or 1e-5)

    @property
    def key_value_heads(self) -> int:
        """Every head has its own key and value."""
        return self.heads

    def layers(self) -> dict[str, Linear | Norm]:
        """The outputs of `qkv` are ordered [head, (query, key, value), head width], so that a contiguous part of them
        holds whole heads.
        """
        inner = self.heads * self.head_width
        return {
            "norm_attention": Norm(self.width),
            "qkv": Linear(self.width, 3 * inner, ("embed", "heads")),
            "attention_out": Linear(inner, self.width, ("heads", "embed")),
            "norm_mlp": Norm(self.width),
            "mlp_up": Linear(self.width, self.mlp, ("embed", "mlp")),
            "mlp_down": Linear(self.mlp, self.width, ("mlp", "embed")),
        }

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        y = layer_norm(weights["norm_attention"], x, self.epsilon, weights["qkv"]["kernel"].dtype)
        query, key, value = context.make_heads(weights["qkv"], y, self.head_width, parts=3)
        if self.rotary:
            query, key = (self.rotary.rotate(part, context.position) for part in (query, key))
        mixed = context.attend(query, key, value)
        out = linear(weights["attention_out"], mixed.reshape(*x.shape[:2], -1), context.total)
        return dropout(out, context, site=0)

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        y = layer_norm(weights["norm_mlp"], x, self.epsilon, weights["mlp_up"]["kernel"].dtype)
        hidden = jax.nn.gelu(linear(weights["mlp_up"], y), approximate=self.tanh_gelu)
        return dropout(linear(weights["mlp_down"], hidden, context.total), context, site=1)

    def head_matrices(self, weights: dict) -> tuple[Array, Array, Array, Array]:
        kernel, out = weights["qkv"]["kernel"], weights["attention_out"]["kernel"]
        kernel = kernel.reshape(*kernel.shape[:-1], self.heads, 3, -1).swapaxes(-4, -3)
        query, key, value = (kernel[..., i, :] for i in range(3))
        return query, key, value, out.reshape(*out.shape[:-2], self.heads, -1, self.width)

    def feed_forward_matrices(self, weights: dict) -> dict[str, tuple[Array, Array]]:
        return {"up·down": (weights["mlp_up"]["kernel"], weights["mlp_down"]["kernel"])}

    def final_norm(self) -> Norm:
        return Norm(self.width)

    def normalize(self, weights: dict, x: Float[Array, "B S D"], dtype: DTypeLike) -> Float[Array, "B S D"]:
        return layer_norm(weights, x, self.epsilon, used_as=dtype).astype(dtype)
