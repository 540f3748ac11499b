"""Looped depth weights, after LoopFormer (docs/fidelity.md): the time changes norms and gates, and kernels are shared.

@inproceedings{jeddi2026loopformer,
  title={LoopFormer: Elastic-Depth Looped Transformers for Latent Reasoning via Shortcut Modulation},
  author={Jeddi, Ahmadreza and Ciccone, Marco and Taati, Babak},
  booktitle={International Conference on Learning Representations}, year={2026}}
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from diffeqformer.depth.generated import GeneratedWeights, Start, exact
from diffeqformer.fields.layers import Linear, parameter


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
