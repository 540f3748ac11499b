"""Generated depth weights: the hypernetwork over continuous depth, and its two variants.

Equation (6) and appendix A of the paper. For each layer of the vector field,

    e(t) = [t, sin(c t w), cos(c t w)],   w_k = 10000^(-k / n),  k = 0 ... n - 1
    h(t) = s lin2(silu(lin1(e(t)))),   s = 1 as published (`GENERATOR_STARTS`)
    kernel(t) = h(t) P + B,   bias(t) = h(t) P_b,   scale(t) = 1 + h(t) P_s,   shift(t) = h(t) P_h

With `model.base_width` = D0, kernels and the head's matrix are multiplied by D0 / D, and P and B start sqrt(D / D0)
times as large. So Adam's rate need not change with the width D. These are the rules of CompleteP; its residual steps of
1 / L are ours in any case.

@article{dey2025completep,
  title={Don't be lazy: {CompleteP} enables compute-efficient deep transformers},
  author={Dey, Nolan and Zhang, Bin Claire and Noci, Lorenzo and others},
  journal={arXiv:2505.01618},
  year={2025}}

`diffeqformer.depth.projection` computes kernel(t). e(t) and h(t) are always fp32, regardless of the compute type.

All layers share e(t). Each layer has its own MLP h; in the paper's alternative design (section D.2, Fig. 17) all
layers, norms included, share one h(t). So they do in looped models, after LoopFormer (docs/fidelity.md), where the time
changes norms and gates, and kernels are shared.

@inproceedings{jeddi2026loopformer,
  title={LoopFormer: Elastic-Depth Looped Transformers for Latent Reasoning via Shortcut Modulation},
  author={Jeddi, Ahmadreza and Ciccone, Marco and Taati, Babak},
  booktitle={International Conference on Learning Representations}, year={2026}}
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from diffeqformer.depth.grid import Grid
from diffeqformer.depth.projection import project
from diffeqformer.depth.weights import DepthWeights
from diffeqformer.fields.layers import Linear, Norm, at_its_precision, parameter, precision_in


def time_features(
    times: Float[np.ndarray | Array, "T"], sinusoidal_dim: int, time_frequency: float
) -> Float[np.ndarray | Array, "T features"]:
    """e(t) for every time: [T, 2 n + 1] fp32 with n = `sinusoidal_dim`.

    For times on the host, it is computed there in float64, because the angle reaches `time_frequency` radians. In bf16
    the angle would be off by whole radians, in fp32 by 6e-5. Random times are drawn on the device and stay in fp32.
    """
    traced = isinstance(times, Array)
    of, times = (jnp, times[:, None]) if traced else (np, np.asarray(times, np.float64)[:, None])
    frequencies = 10000.0 ** (-np.arange(sinusoidal_dim) / sinusoidal_dim)
    angles = times * (time_frequency * frequencies).astype(times.dtype)
    return of.concatenate([times, of.sin(angles), of.cos(angles)], axis=1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Start:
    """Standard deviations at initialisation: of lin1 and lin2 (None: 1 / sqrt(fan-in)), P (given E) and B.

    scale: s, the factor of h (given E).
    gain: the factor of kernels, see above.
    """

    mlp: float | None
    projection: Callable[[int], float]
    constant: float
    scale: Callable[[int], float] = lambda width: 1.0
    gain: float = 1.0


GENERATOR_STARTS = {
    "published": Start(mlp=0.02, projection=lambda width: 0.02, constant=0.0),
    "constant": Start(mlp=0.02, projection=lambda width: 0.02, constant=0.02),
    "varying": Start(mlp=None, projection=lambda width: 0.015 / math.sqrt(width), constant=0.02),
    "unit": Start(
        mlp=None,
        projection=lambda width: 0.04 * math.sqrt(width),
        constant=0.02,
        scale=lambda width: 0.25 / width,
    ),
}
"""The initialisation of the hypernetwork (`model.generator_start`).

published: as in the authors' code. Kernels start at an rms of 1e-3 to 6e-3, so blocks are almost the identity.
constant: as published, but B has a vanilla transformer's 0.02.
varying: B has 0.02, and the hypernetwork's output varies with t from the first step (P has 0.003 for E = 24).
unit: the same, but h is scaled so that Adam, which moves h(t) P by the rate times the sum of |h|, moves it less than B,
and by a part of it that doesn't depend on E.
"""


def gain_of(config) -> float:
    """The factor of kernels and the head's matrix, from the `model` part of a config: D0 / D; 1 without base width."""
    return config.base_width / config.width if config.base_width else 1.0


def exact(x: Float[Array, "T inputs"], matrix: nnx.Param) -> Float[Array, "T outputs"]:
    """A small matrix product in fp32 on every backend. By default, TPUs and GPUs would round its operands."""
    return jnp.matmul(x, matrix[...], precision="highest")


class TimeMLP(nnx.Module):
    """h(t) = s lin2(silu(lin1(e(t)))), of width E. Each layer of the vector field has one."""

    def __init__(self, features: int, width: int, start: Start, rngs: nnx.Rngs):
        stddev, self.scale = start.mlp, start.scale(width)
        self.lin1 = parameter(rngs, (features, width), (None, "time_embed"), stddev=stddev or features**-0.5)
        self.lin1_bias = parameter(rngs, (width,), ("time_embed",))
        self.lin2 = parameter(rngs, (width, width), (None, "time_embed"), stddev=stddev or width**-0.5)
        self.lin2_bias = parameter(rngs, (width,), ("time_embed",))

    def __call__(self, features: Float[Array, "T features"]) -> Float[Array, "T E"]:
        h = exact(jax.nn.silu(exact(features, self.lin1) + self.lin1_bias), self.lin2) + self.lin2_bias
        return h if self.scale == 1 else self.scale * h


class GeneratedLinear(nnx.Module):
    """kernel(t) = h(t) P + B and bias(t) = h(t) P_b."""

    def __init__(self, layer: Linear, width: int, start: Start, rngs: nnx.Rngs):
        (inputs, outputs), self.gain = layer.axes, start.gain
        shape, stddev = (layer.inputs, width, layer.outputs), start.projection(width) / math.sqrt(self.gain)
        self.projection = parameter(rngs, shape, (inputs, "time_embed", outputs), stddev=stddev)
        stddev = start.constant / math.sqrt(self.gain)
        self.constant = parameter(rngs, (layer.inputs, layer.outputs), layer.axes, stddev=stddev)
        if layer.bias:
            self.bias_projection = parameter(rngs, (width, layer.outputs), ("time_embed", outputs), stddev=1e-4)

    def __call__(self, h: Float[Array, "T E"], project: Callable = project) -> dict:
        constant = self.constant[...]
        of_kernel = (h, constant) if self.gain == 1 else (self.gain * h, self.gain * constant)
        weights = {"kernel": project(of_kernel[0], self.projection[...], of_kernel[1])}
        if hasattr(self, "bias_projection"):
            weights["bias"] = exact(h, self.bias_projection)
        return weights


class GeneratedNorm(nnx.Module):
    """scale(t) = 1 + h(t) P_s and shift(t) = h(t) P_h."""

    def __init__(self, layer: Norm, width: int, start: Start, rngs: nnx.Rngs):
        self.scale_projection = parameter(rngs, (width, layer.width), ("time_embed", "embed"))
        if layer.shift:
            self.shift_projection = parameter(rngs, (width, layer.width), ("time_embed", "embed"))

    def __call__(self, h: Float[Array, "T E"]) -> dict:
        weights = {"scale": 1.0 + exact(h, self.scale_projection)}
        if hasattr(self, "shift_projection"):
            weights["shift"] = exact(h, self.shift_projection)
        return weights


class GeneratedWeights(DepthWeights):
    """The hypernetwork: weights for any times from parameters whose number does not depend on depth.

    Of a config, they take `time_embed_dim` (E), `sinusoidal_dim` (n), `time_frequency` (c), `generator_start` (of
    `GENERATOR_STARTS`), `base_width` and `dtype`.
    """

    continuous = generates_kernels = sinusoidal = True
    shared_mlp: ClassVar[bool] = False
    linear: ClassVar[type[nnx.Module]] = GeneratedLinear

    def __init__(self, config, layers: dict[str, Linear | Norm], rngs: nnx.Rngs):
        self.sinusoidal_dim, self.time_frequency = config.sinusoidal_dim, config.time_frequency
        width = config.time_embed_dim
        # `generator_start` is of generated kernels; without them a command line may not set it (`rules`)
        start = GENERATOR_STARTS[config.generator_start if self.generates_kernels else "published"]
        start = dataclasses.replace(start, gain=gain_of(config))
        self.precision = precision_in(config.dtype)
        number = 2 * config.sinusoidal_dim + 1
        if self.shared_mlp:
            self.mlp = TimeMLP(number, width, start, rngs)
        kinds, self.layers = {Linear: self.linear, Norm: GeneratedNorm}, nnx.Dict()
        for name, layer in layers.items():
            mlp = None if self.shared_mlp else TimeMLP(number, width, start, rngs)
            self.layers[name] = kinds[type(layer)](layer, width, start, rngs)
            if mlp is not None:
                self.layers[name].mlp = mlp

    def __call__(self, grid: Grid, projects: dict[str, Callable] | None = None) -> dict:
        """The weights at `grid.times`, in fp32.

        Args:
            projects: functions that take the place of `project` in the linear layers with these names.
        """
        return self.from_features(self.features(grid.times), projects)

    def features(self, times: Float[np.ndarray | Array, "T"]) -> Float[np.ndarray | Array, "T features"]:
        """e at some times, for `from_features`: [T, 2 n + 1] fp32. Computed on the host if the times are there."""
        return time_features(times, self.sinusoidal_dim, self.time_frequency)

    @at_its_precision
    def from_features(
        self, features: Float[Array | np.ndarray, "T features"], projects: dict[str, Callable] | None = None
    ) -> dict:
        """The weights of every layer in fp32, given e. `projects` as above."""
        features, weights = jnp.asarray(features), {}
        shared = self.mlp(features) if self.shared_mlp else None
        for name, layer in self.layers.items():
            h = layer.mlp(features) if shared is None else shared
            weights[name] = layer(h, projects[name]) if projects and name in projects else layer(h)
        return weights


class AlternativeWeights(GeneratedWeights):
    """The paper's alternative design (section D.2, Fig. 17): all layers share one MLP of time."""

    shared_mlp = True


class GatedLinear(nnx.Module):
    """A shared kernel and bias; those that write to the state have their outputs scaled by 1 + h(t) P_g."""

    def __init__(self, layer: Linear, width: int, start: Start, rngs: nnx.Rngs):
        outputs = layer.axes[1]
        self.kernel = parameter(rngs, (layer.inputs, layer.outputs), layer.axes, stddev=0.02, decays=True)
        if layer.bias:
            self.bias = parameter(rngs, (layer.outputs,), (outputs,))
        if outputs == "embed":
            self.gate_projection = parameter(rngs, (width, layer.outputs), ("time_embed", outputs))

    def __call__(self, h: Float[Array, "T E"]) -> dict:
        gate = jnp.ones((len(h), self.kernel.shape[1]), jnp.float32)
        if hasattr(self, "gate_projection"):
            gate += exact(h, self.gate_projection)
        weights = {"kernel": self.kernel[...] * gate[:, None]}
        if hasattr(self, "bias"):
            weights["bias"] = self.bias[...] * gate
        return weights


class LoopedWeights(GeneratedWeights):
    """Shared kernels, with norms and gates that depend on the time.

    Kernels are copied to every time, so that this saves parameters, but no memory of a train step.
    """

    shared_mlp, generates_kernels = True, False
    linear = GatedLinear
