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

from diffeqformer.fields import attention
from diffeqformer.fields.field import Block, VectorField
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.solvers import Solver
from diffeqformer.transformer import Transformer, split_model

RIDGE = 0.1
"""What is added to the diagonal of the hidden units' products, as a part of its mean. It keeps the kernel near."""

OUTPUT = "mlp_down"
"""The layer that every block's feed-forward ends with."""


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
        return solver.step(block, [weights], x, jnp.ones(()), Context(attend=attention.plain))


@functools.partial(jax.jit, static_argnames=("solver", "block"))
def products(
    solver: Solver, block: Block, weights: dict, x: Float[Array, "B S D"], target: Float[Array, "B S D"]
) -> tuple[Float[Array, "F F"], Float[Array, "F D"]]:
    """The normal equations of what a layer's output lacks of a target: H'H and H'R, over all positions.

    H are its hidden units, with ones beside them if it has a bias. Each position counts by the inverse of the target's
    root mean square, since the next norm divides by that.
    """
    output = weights[OUTPUT]
    field = HiddenUnits(block)
    with multiplying("highest"):
        without = solver.step(field, [weights], x, jnp.ones(()), Context(attend=attention.plain))
        lacks = target - without - field.hidden @ output["kernel"] - output.get("bias", 0)
        hidden = jnp.append(field.hidden, jnp.ones((*x.shape[:2], 1)), -1) if "bias" in output else field.hidden
        share = jax.lax.rsqrt(jnp.mean(target * target, -1, keepdims=True))
        hidden, lacks = hidden * share, lacks * share
        return jnp.einsum("bsf,bsg->fg", hidden, hidden), jnp.einsum("bsf,bsd->fd", hidden, lacks)


def fitted(solver: Solver, block: Block, weights: dict, states: list, targets: list) -> dict:
    """A layer whose feed-forward's output, its bias included, takes the states nearest to the targets."""
    sums = [products(solver, block, weights, x, target) for x, target in zip(states, targets)]
    units, lacks = (np.sum([np.asarray(part, np.float64) for part in parts], axis=0) for parts in zip(*sums))
    units[np.diag_indices_from(units)] += RIDGE * units.diagonal().mean()
    change = np.float32(scipy.linalg.solve(units, lacks, assume_a="pos"))
    output, kernel = weights[OUTPUT], change[: len(weights[OUTPUT]["kernel"])]
    made = {"kernel": output["kernel"] + kernel}
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
        model: one with weights per layer and steps of the length 1.
        batches: ids of the text, of a length that the model can read. It needs more positions than hidden units.
        kept: the numbers of the layers, in order.
        progress: called with the layers that are done, and all of them.
    """
    solver, block = model.solver, model.field
    stored = split_model(model)[1]["depth"]["layers"]
    layers = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), stored)
    pairs = list(zip(kept, [*kept[1:], model.num_steps]))
    last = max((number for number, after in pairs if after > number + 1), default=-1)

    def layer(number: int) -> dict:
        return jax.tree.map(lambda leaf: leaf[number], layers)

    def through(first: int, after: int, states: list) -> list:
        for number in range(first, after):
            states = [after_layer(solver, block, layer(number), x) for x in states]
        return states

    states = [model.embed(jnp.asarray(batch), Context()) for batch in batches]
    targets, made = through(0, kept[0], states) if kept[0] else states, []  # of all layers
    for number, after in pairs:
        weights, gap, alike = layer(number), after > number + 1, states is targets
        if number <= last:
            targets = through(number, after, targets)
            if gap:
                weights = fitted(solver, block, weights, states, targets)
            states = targets if alike and not gap else [after_layer(solver, block, weights, x) for x in states]
        made.append(weights)
        progress(len(made), len(kept))
    return jax.tree.map(lambda leaf, *leaves: np.stack(leaves).astype(leaf.dtype), stored, *made)
