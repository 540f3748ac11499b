"""The Llama vector field: RMSNorm, rotary positions, SwiGLU feed-forward, no biases.

@article{touvron2023llama,
  title={LLaMA: Open and Efficient Foundation Language Models},
  author={Touvron, Hugo and Lavril, Thibaut and Izacard, Gautier and others},
  journal={arXiv:2302.13971},
  year={2023}}
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from diffeqformer.fields.field import Block
from diffeqformer.fields.layers import Context, Linear, Norm, dropout, linear, rms_norm, rows_from


@functools.cache
def rotary_table(positions: int, head_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of position x 10000^(-2 k / K), each [positions, K / 2] fp32, from float64 on the host.

    @article{su2021roformer,
      title={RoFormer: Enhanced Transformer with Rotary Position Embedding},
      author={Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and Liu, Yunfeng},
      journal={arXiv:2104.09864},
      year={2021}}
    """
    angles = np.outer(np.arange(positions), 10_000.0 ** (-2 * np.arange(head_width // 2) / head_width))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Llama(Block):
    """dx/dt = attention(n; t) + feed_forward(norm_mlp(n; t); t) with n = norm_attention(x; t).

    Section C.6 of the paper. The second norm reads the first one's output, as in the authors' code. Without
    `norm_of_norm` it reads x, like the first.

    Args:
        width, heads, mlp: D, H, F; the head width D / H must be even.
        positions: the longest sequence, for which rotations are tabulated.
        norm_of_norm: the second norm reads the first one's output.
        epsilon: epsilon of the block's norms; the final norm has 1e-5.
        shift: whether the block's norms have a shift.
    """

    width: int
    heads: int
    mlp: int
    positions: int
    norm_of_norm: bool
    epsilon: float
    shift: bool

    learned_positions: ClassVar[bool] = False
    rotary: ClassVar[bool] = True
    tied_head: ClassVar[bool] = False
    embedding_stddev: ClassVar[float] = 1.0
    generator_decays: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config, vanilla: bool) -> "Llama":
        """Norms have epsilon 1e-6 and a shift, as published, or 1e-5 and no shift in a vanilla Llama."""
        sizes = config.width, config.heads, config.mlp, config.max_length
        if vanilla:
            return cls(*sizes, norm_of_norm=False, epsilon=1e-5, shift=False)
        return cls(*sizes, config.norm_of_norm, epsilon=1e-6, shift=True)

    def layers(self) -> dict[str, Linear | Norm]:
        """Name, shape and logical axes of every weight of the block."""
        by_head = Linear(self.width, self.width, ("embed", "heads"), bias=False)
        return {
            "norm_attention": Norm(self.width, self.shift),
            "query": by_head,
            "key": by_head,
            "value": by_head,
            "attention_out": Linear(self.width, self.width, ("heads", "embed"), bias=False),
            "norm_mlp": Norm(self.width, self.shift),
            "mlp_gate": Linear(self.width, self.mlp, ("embed", "mlp"), bias=False),
            "mlp_up": Linear(self.width, self.mlp, ("embed", "mlp"), bias=False),
            "mlp_down": Linear(self.mlp, self.width, ("mlp", "embed"), bias=False),
        }

    def rotate(self, x: Float[Array, "B S H K"], position: int | Int[Array, "*each"]) -> Float[Array, "B S H K"]:
        """Rotate each pair (k, k + K / 2) of every head by the angle of its position, in fp32.

        Args:
            position: position of the first token (`Context`).
        """
        cos, sin = (
            rows_from(table, position, x.shape[1])[..., None, :] for table in rotary_table(self.positions, x.shape[-1])
        )
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """The attention branch, its norm included."""
        y = rms_norm(weights["norm_attention"], x, self.epsilon)
        head_width = self.width // self.heads
        [query], [key], [value] = (
            context.make_heads(weights[name], y, head_width) for name in ("query", "key", "value")
        )
        query, key = self.rotate(query, context.position), self.rotate(key, context.position)
        mixed = context.attend(query, key, value)
        return dropout(
            linear(weights["attention_out"], mixed.reshape(*x.shape[:2], -1), context.total), context, site=0
        )

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        """The feed-forward branch, its norm (or norms) included: down(silu(gate(y)) * up(y))."""
        y = rms_norm(weights["norm_attention"], x, self.epsilon) if self.norm_of_norm else x
        y = rms_norm(weights["norm_mlp"], y, self.epsilon)
        hidden = jax.nn.silu(linear(weights["mlp_gate"], y)) * linear(weights["mlp_up"], y)
        return dropout(linear(weights["mlp_down"], hidden, context.total), context, site=1)

    def head_matrices(self, weights: dict) -> tuple[Array, Array, Array, Array]:
        """See `Block`."""
        kernels = (weights[name]["kernel"] for name in ("query", "key", "value"))
        of_heads = [kernel.reshape(*kernel.shape[:-1], self.heads, -1).swapaxes(-3, -2) for kernel in kernels]
        out = weights["attention_out"]["kernel"]
        return *of_heads, out.reshape(*out.shape[:-2], self.heads, -1, self.width)

    def feed_forward_matrices(self, weights: dict) -> dict[str, tuple[Array, Array]]:
        """See `Block`."""
        gate, up, down = (weights[name]["kernel"] for name in ("mlp_gate", "mlp_up", "mlp_down"))
        return {"gate·down": (gate, down), "up·down": (up, down)}

    def final_norm(self) -> Norm:
        """See `Block`."""
        return Norm(self.width, shift=False)

    def normalize(self, weights: dict, x: Float[Array, "B S D"], dtype: DTypeLike) -> Float[Array, "B S D"]:
        """See `Block`."""
        return rms_norm(weights, x, 1e-5).astype(dtype)
