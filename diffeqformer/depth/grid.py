"""How depth is divided into steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TRAINING_TIMES = ("fixed", "shifted")
"""The times at which weights that are functions of time are trained (`model.training_times`).

fixed: the times of the grid, as published.
shifted: all times are moved back at random by the same part of a step. The first step gets shorter, and another step is
    added at the end.
"""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The steps of a solver through depth, and the times at which it takes weights.

    Grids of a fixed number of steps are NumPy arrays in float64. Random ones are fp32 arrays on the device.

    ends: the time at which each step ends; the first one starts at 0.
    times: the times at which the solver takes weights: its nodes within each step, step by step. A node shared by two
        steps occurs twice, which costs less than removing the duplicate.
    span: the factor of the lengths of steps.
    """

    ends: Float[np.ndarray | Array, "L"]
    times: Float[np.ndarray | Array, "T"]
    span: float = 1.0

    @classmethod
    def of(cls, ends: Float[np.ndarray | Array, "L"], nodes: tuple[float, ...] = (1.0,), span: float = 1.0) -> "Grid":
        """The grid of steps that end at `ends`, for a solver with these nodes (0: the start of a step, 1: its end)."""
        xp = ends.__array_namespace__()
        starts = xp.concatenate([xp.zeros(1, ends.dtype), ends[:-1]])
        times = [ends if node == 1 else starts + node * (ends - starts) for node in nodes]
        return cls(ends, xp.stack(times, axis=1).ravel(), span)

    @property
    def step_sizes(self) -> Float[Array, "L"]:
        """`span` times each step's part of the depth, in fp32, from float64 unless the ends are on the device."""
        sizes = self.ends.__array_namespace__().diff(self.ends, prepend=0.0)
        return jnp.asarray(self.span * sizes, jnp.float32)
