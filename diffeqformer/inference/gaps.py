"""Making up for layers that are left out: the feed-forward before each gap is fitted to the state after it.

Shopkhoev et al. fit a square matrix and multiply the layer's output kernel by it. Here the whole kernel is fitted.

@inproceedings{shopkhoev2025replaceme,
  title={{ReplaceMe}: Network Simplification via Depth Pruning and Transformer Block Linearization},
  author={Shopkhoev, Dmitriy and Ali, Ammar and Zhussip, Magauiya and Malykh, Valentin and Lefkimmiatis, Stamatios
          and Komodakis, Nikos and Zagoruyko, Sergey},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025}}
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.fields.field import Block, VectorField
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.solvers import Solver
from diffeqformer.transformer import Transformer, split_model

RIDGE = 0.1
"""What is added to the diagonal of H'H, as a part of its mean. It keeps the kernel close to what it was."""

FITTING = ("euler", "lie_trotter")
"""The solvers whose step is linear in the output of the feed-forward."""

OUTPUT = "mlp_down"
"""The layer that every block's feed-forward ends with."""

States = list[Float[Array, "_ S D"]]


class HiddenUnits(VectorField):
    """A block that keeps the hidden units of its feed-forward, and adds nothing of them to the state."""

    def __init__(self, block: Block):
        self.block, self.hidden = block, None

    def attention(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        return self.block.attention(weights, x, context)

    def feed_forward(self, weights: dict, x: Float[Array, "B S D"], context: Context) -> Float[Array, "B S D"]:
        units, width = self.block.mlp, self.block.width
        parts = jnp.eye(units, -(-units // width) * width).reshape(units, -1, width)  # in place of the output kernel
        outputs = [{OUTPUT: {"kernel": parts[:, part]}} for part in range(parts.shape[1])]
        hidden = [self.block.feed_forward(weights | output, x, context) for output in outputs]
        self.hidden = jnp.concatenate(hidden, -1)[..., :units]
        return jnp.zeros_like(x)


@functools.partial(jax.jit, static_argnames=("solver", "block"))
def after_layer(solver: Solver, block: Block, weights: dict, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The state after a layer."""
    with multiplying("highest"):
        return solver.step(block, [weights], x, jnp.ones(()), Context())


@functools.partial(jax.jit, static_argnames=("solver", "block"))
def normal_equations(
    solver: Solver, block: Block, weights: dict, x: Float[Array, "B S D"], target: Float[Array, "B S D"]
) -> tuple[Float[Array, "F F"], Float[Array, "F D"]]:
    """H'H and H'R, over all positions: what a layer's output R lacks of a target, by its hidden units H.

    If the layer has a bias, the last of the units is 1. Each position counts by the inverse of the target's root mean
    square, since the next norm divides by that.
    """
    output, field = weights[OUTPUT], HiddenUnits(block)
    with multiplying("highest"):
        without = solver.step(field, [weights], x, jnp.ones(()), Context())
        lacks = target - without - field.hidden @ output["kernel"] - output.get("bias", 0)
        hidden = jnp.append(field.hidden, jnp.ones((*x.shape[:2], 1)), -1) if "bias" in output else field.hidden
        share = jax.lax.rsqrt(jnp.mean(target * target, -1, keepdims=True))
        hidden, lacks = hidden * share, lacks * share
        return jnp.einsum("bsf,bsg->fg", hidden, hidden), jnp.einsum("bsf,bsd->fd", hidden, lacks)


def fitted(solver: Solver, block: Block, weights: dict, states: States, targets: States) -> dict:
    """A layer with the output kernel and bias of the feed-forward that bring its states nearest to the targets."""
    units = lacks = 0.0
    for x, target in zip(states, targets):
        parts = normal_equations(solver, block, weights, x, target)
        units, lacks = (whole + np.asarray(part, np.float64) for whole, part in zip((units, lacks), parts))
    if not np.isfinite(lacks).all():
        raise NotFinite
    units[np.diag_indices_from(units)] += RIDGE * units.diagonal().mean()
    change = np.float32(scipy.linalg.solve(units, lacks, assume_a="pos"))
    output = weights[OUTPUT]
    made = {"kernel": output["kernel"] + change[: block.mlp]}
    if "bias" in output:
        made["bias"] = output["bias"] + change[-1]
    return weights | {OUTPUT: made}


def fitted_layers(
    model: Transformer,
    batches: list[Int[np.ndarray, "_ S"]],
    kept: list[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """The weights of the layers that are kept, stacked, in their type; those before a gap are fitted to the text.

    Args:
        model: one with weights per layer, steps of the length 1, and a solver of `FITTING`.
        batches: ids of the text; there should be many more of them than hidden units.
        kept: the numbers of the layers, in order. For a gap before all of them, nothing makes up.
        progress: called with the layers that are done, and all of them.
    """
    solver, block, stored = model.solver, model.field, split_model(model)[1]["depth"]["layers"]
    pairs = list(zip(kept, [*kept[1:], model.num_steps]))
    last = max((number for number, after in pairs if after > number + 1), default=-1)

    def layer(number: int) -> dict:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[number], jnp.float32), stored)

    def through(weights: dict, states: States) -> States:
        return [after_layer(solver, block, weights, x) for x in states]

    def skipped(first: int, after: int, states: States) -> States:
        for number in range(first, after):
            states = through(layer(number), states)
        return states

    states = [model.embed(jnp.asarray(batch), Context()) for batch in batches]
    targets, made = skipped(0, kept[0], states), []
    for number, after in pairs:
        weights, gap, alike = layer(number), after > number + 1, states is targets
        if number <= last:
            targets = skipped(number, after, targets)
            if gap:
                weights = fitted(solver, block, weights, states, targets)
                weights = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype).astype(jnp.float32), weights, stored)
            states = targets if alike and not gap else through(weights, states)
        made.append(jax.device_get(weights))
        progress(len(made), len(kept))
    return jax.tree.map(lambda leaf, *leaves: np.stack(leaves).astype(leaf.dtype), stored, *made)
