"""Rotary positions: pairs of a head's entries are rotated by angles that grow with the position.

@article{su2021roformer,
  title={RoFormer: Enhanced Transformer with Rotary Position Embedding},
  author={Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and Liu, Yunfeng},
  journal={arXiv:2104.09864},
  year={2021}}
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffeqformer.fields.layers import rows_from


def read_scaling(text: str) -> list[float] | None:
    """How Llama 3 slows rotations down for longer texts (`model.rope_scaling`), such as "8,1,4,8192"; empty: None.

    The numbers are `factor`, by which slow rotations become slower; `slow` and `fast`: at most, and at least, so many
    turns in a text of the last number, `original`, are slow and fast; and `original`, the tokens of the longest text
    before. Fast rotations stay as they are. Between these, the change is linear in the number of turns. A ValueError
    if it is no such text.
    """
    if not text:
        return None
    numbers = [float(number) for number in text.split(",")]
    if len(numbers) != 4 or not all(0 < number < math.inf for number in numbers) or numbers[1] >= numbers[2]:
        raise ValueError(text)
    return numbers


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotations of a block's queries and keys.

    positions: the longest sequence, for which they are tabulated.
    rotated: R, how many of a head's entries are rotated, from the first on.
    theta: the base of the frequencies (`model.rope_theta`).
    scaling: how they are slowed down (`read_scaling`).
    """

    positions: int
    rotated: int
    theta: float = 10_000.0
    scaling: str = ""

    def rotate(self, x: Float[Array, "B S any K"], position: int | Int[Array, "*each"]) -> Float[Array, "B S any K"]:
        """Rotate each pair (k, k + R / 2) of the first R entries of every head by the angle of its position, in fp32.

        `position` is that of the first token (`Context`).
        """
        cos, sin = (rows_from(part, position, x.shape[1])[..., None, :] for part in table(self))
        half = self.rotated // 2
        first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


@functools.cache
def table(rotary: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of position x theta^(-2 k / R), each [positions, R / 2] fp32, from float64 on the host."""
    frequencies = rotary.theta ** (-2 * np.arange(rotary.rotated // 2) / rotary.rotated)
    if scaling := read_scaling(rotary.scaling):
        factor, slow, fast, original = scaling
        turns = original * frequencies / (2 * np.pi)
        kept = np.clip((turns - slow) / (fast - slow), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = np.outer(np.arange(rotary.positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
