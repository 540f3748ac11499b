"""The Llama vector field: RMSNorm, rotary positions, SwiGLU feed-forward; biases and grouped queries if asked for.

@article{touvron2023llama,
  title={LLaMA: Open and Efficient Foundation Language Models},
  author={Touvron, Hugo and Lavril, Thibaut and Izacard, Gautier and others},
  journal={arXiv:2302.13971},
  year={2023}}

@inproceedings{ainslie2023gqa,
  title={{GQA}: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints},
  author={Ainslie, Joshua and Lee-Thorp, James and de Jong, Michiel and others},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2023}}
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffeqformer.fields.field import Block, head_width_of
from diffeqformer.fields.layers import Context, Linear, Norm, dropout, linear, rms_norm
from diffeqformer.fields.rotary import Rotary

BIASES = {
    "none": (),
    "qkv": ("query", "key", "value"),
    "attention": ("query", "key", "value", "attention_out"),
    "all": ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_down"),
}
"""The linear layers that have a bias (`model.biases`)."""


@dataclasses.dataclass(frozen=True)
class Llama(Block):
    """dx/dt = attention(n; t) + feed_forward(norm_mlp(n; t); t) with n = norm_attention(x; t).

    Section C.6 of the paper. The second norm reads the first one's output, as in the authors' code. Without
    `norm_of_norm` it reads x, like the first. Whole heads are rotated.

    epsilon, shift: of the block's norms, but not of the final one.
    """

    key_value_heads: int
    rotary: Rotary
    norm_of_norm: bool
    epsilon: float
    final_epsilon: float
    shift: bool
    biases: tuple[str, ...]
    tied_head: bool

    learned_positions: ClassVar[bool] = False
    generator_decays: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling")

    @classmethod
    def from_config(cls, config, vanilla: bool) -> "Llama":
        """The block's norms have a shift, as published, but not in a vanilla Llama.

        Without `config.norm_epsilon`, the epsilon of these norms is 1e-6, as published, or 1e-5 in a vanilla Llama,
        and that of the final norm 1e-5.
        """
        return cls(
            width=config.width,
            heads=config.heads,
            key_value_heads=config.key_value_heads or config.heads,
            head_width=head_width_of(config),
            mlp=config.mlp,
            rotary=Rotary(config.max_length, head_width_of(config), config.rope_theta, config.rope_scaling),
            norm_of_norm=config.norm_of_norm and not vanilla,
            epsilon=config.norm_epsilon or (1e-5 if vanilla else 1e-6),
            final_epsilon=config.norm_epsilon or 1e-5,
            shift=not vanilla,
            biases=BIASES[config.biases],
            tied_head=config.tied_head,
        )

    @property
    def embedding_stddev(self) -> float:
        """As published; that of the usual head if the embedding is the head, too."""
        return 0.02 if self.tied_head else 1.0

    def layers(self) -> dict[str, Linear | Norm]:
        mixed, shared = self.heads * self.head_width, self.key_value_heads * self.head_width
        return {
            "norm_attention": Norm(self.width, self.shift),
            "query": Linear(self.width, mixed, ("embed", "heads"), "query" in self.biases),
            "key": Linear(self.width, shared, ("embed", "heads"), "key" in self.biases),
            "value": Linear(self.width, shared, ("embed", "heads"), "value" in self.biases),
            "attention_out": Linear(mixed, self.width, ("heads", "embed"), "attention_out" in self.biases),
            "norm_mlp": Norm(self.width, self.shift),
            "mlp_gate": Linear(self.width, self.mlp, ("embed", "mlp"), "mlp_gate" in self.biases),
            "mlp_up": Linear(self.width, self.mlp, ("embed", "mlp"), "mlp_up" in self.biases),
            "mlp_down": Linear(self.mlp, self.width, ("mlp", "embed"), "mlp_down" in self.biases),
        }

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        y = rms_norm(weights["norm_attention"], x, self.epsilon)
        [query], [key], [value] = (
            context.make_heads(weights[name], y, self.head_width) for name in ("query", "key", "value")
        )
        query, key = (self.rotary.rotate(part, context.position) for part in (query, key))
        mixed = context.attend(query, key, value)
        out = linear(weights["attention_out"], mixed.reshape(*x.shape[:2], -1), context.total)
        return dropout(out, context, site=0)

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """The feed-forward branch, its norm (or norms) included: down(silu(gate(y)) * up(y))."""
        y = rms_norm(weights["norm_attention"], x, self.epsilon) if self.norm_of_norm else x
        y = rms_norm(weights["norm_mlp"], y, self.epsilon)
        hidden = jax.nn.silu(linear(weights["mlp_gate"], y)) * linear(weights["mlp_up"], y)
        return dropout(linear(weights["mlp_down"], hidden, context.total), context, site=1)

    def head_matrices(self, weights: dict) -> tuple[Array, Array, Array, Array]:
        kernels = (weights[name]["kernel"] for name in ("query", "key", "value"))
        query, key, value = (
            kernel.reshape(*kernel.shape[:-1], -1, self.head_width).swapaxes(-3, -2) for kernel in kernels
        )
        key, value = (jnp.repeat(part, self.heads // self.key_value_heads, axis=-3) for part in (key, value))
        out = weights["attention_out"]["kernel"]
        return query, key, value, out.reshape(*out.shape[:-2], self.heads, -1, self.width)

    def feed_forward_matrices(self, weights: dict) -> dict[str, tuple[Array, Array]]:
        gate, up, down = (weights[name]["kernel"] for name in ("mlp_gate", "mlp_up", "mlp_down"))
        return {"gate·down": (gate, down), "up·down": (up, down)}

    def final_norm(self) -> Norm:
        return Norm(self.width, shift=False)

    def normalize(self, weights: dict, x: Float[Array, "B S D"], dtype: DTypeLike) -> Float[Array, "B S D"]:
        return rms_norm(weights, x, self.final_epsilon).astype(dtype)
