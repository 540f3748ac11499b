"""Making up for layers that are left out: those near a gap learn to bring the states to where the whole model has them.

The feed-forward before each gap is fitted to the state after it, by least squares. Shopkhoev et al. fit a square matrix
and multiply the layer's output kernel by it; here the whole kernel is fitted. Then the layers within two of a gap learn
together, as blocks do in Bercovich et al. (2024, arXiv:2411.19146). No text goes through the other layers backwards.

@inproceedings{shopkhoev2025replaceme,
  title={{ReplaceMe}: Network Simplification via Depth Pruning and Transformer Block Linearization},
  author={Shopkhoev, Dmitriy and Ali, Ammar and Zhussip, Magauiya and Malykh, Valentin and Lefkimmiatis, Stamatios
          and Komodakis, Nikos and Zagoruyko, Sergey},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025}}
"""

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jaxtyping import Array, Float, Int

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.console.terminal import show_progress
from diffeqformer.fields.field import Block, VectorField
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.solvers import Solver
from diffeqformer.transformer import Transformer, split_model

RIDGE = 0.1  # is added to the diagonal of H'H, as a part of its mean, and keeps the kernel close to what it was
FITTING = ("euler", "lie_trotter")  # the solvers whose step is linear in the output of the feed-forward
RATE = 5e-4  # of learning, at its highest
BATCH = 2  # windows of a step of learning
OUTPUT = "mlp_down"  # the layer that every block's feed-forward ends with
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


def learned(
    solver: Solver, block: Block, layers: list[dict], states: States, targets: States, epochs: int, what: str
) -> list[dict]:
    """Layers in a row after they learned to take some states to the targets, batch by batch, by Adam."""
    steps = epochs * len(states)
    rate = optax.warmup_cosine_decay_schedule(0, RATE, min(20, steps // 2), steps, RATE / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))

    def distance(layers: list[dict], x, target):
        for weights in layers:
            x = after_layer(solver, block, weights, x)
        return jnp.mean((target - x) ** 2 / jnp.mean(target**2, -1, keepdims=True))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(layers, state, x, target):
        changes, state = optimizer.update(jax.grad(distance)(layers, x, target), state)
        return optax.apply_updates(layers, changes), state

    layers = jax.tree.map(jnp.array, layers)  # a copy, which is donated
    state, order, show = optimizer.init(layers), np.random.RandomState(0), show_progress(what, "batches")
    for epoch in range(epochs):
        for done, batch in enumerate(order.permutation(len(states))):
            layers, state = update(layers, state, states[batch], targets[batch])
            show(epoch * len(states) + done + 1, steps)
    if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(layers)):
        raise NotFinite
    return layers


def groups_of(kept: list[int], layers: int) -> list[list[int]]:
    """The layers that are kept in groups: those within two of a gap learn together, others are alone."""
    afters = [*kept[1:], layers]
    gaps = [row for row, (number, after) in enumerate(zip(kept, afters)) if after > number + 1]
    near = {row + away for row in gaps for away in (-1, 0, 1, 2)}
    groups = itertools.groupby(range(len(kept)), key=lambda row: row in near or f"alone {row}")
    return [[kept[row] for row in group] for _, group in groups]


def fitted_layers(model: Transformer, batches: list[Int[np.ndarray, "_ S"]], kept: list[int], epochs: int = 0) -> dict:
    """The weights of the layers that are kept, stacked, in their type; those near a gap make up for it.

    Args:
        model: one with weights per layer, steps of the length 1, and a solver of `FITTING`.
        batches: ids of the text; there should be many more of them than hidden units.
        kept: the numbers of the layers, in order. For a gap before all of them, nothing makes up.
        epochs: times that the layers within two of a gap learn from the text, after those before it were fitted.
    """
    solver, block, stored = model.solver, model.field, split_model(model)[1]["depth"]["layers"]
    after = dict(zip(kept, [*kept[1:], model.num_steps]))
    last = max((number for number in kept if after[number] > number + 1), default=-1)

    def layer(number: int) -> dict:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[number], jnp.float32), stored)

    def through(layers: Iterable[dict], states: States) -> States:
        for weights in layers:
            states = [after_layer(solver, block, weights, x) for x in states]
        return states

    def rounded(weights: dict) -> dict:
        return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype).astype(jnp.float32), weights, stored)

    states = [model.embed(jnp.asarray(batch), Context()) for batch in batches]
    targets, made, show_all = through(map(layer, range(kept[0])), states), [], show_progress("fit", "layers")
    for group in groups_of(kept, model.num_steps):
        layers = [layer(number) for number in group]
        if group[0] <= last:
            start, alike = states, states is targets
            for row, number in enumerate(group):
                targets = through(map(layer, range(number, after[number])), targets)
                if after[number] > number + 1:
                    layers[row] = rounded(fitted(solver, block, layers[row], states, targets))
                    alike = False
                states = targets if alike else through(layers[row : row + 1], states)
            if epochs and any(after[number] > number + 1 for number in group):
                what = f"layers {group[0]} to {group[-1]}"
                layers = list(map(rounded, learned(solver, block, layers, start, targets, epochs, what)))
                states = through(layers, start)
        made += [jax.device_get(weights) for weights in layers]
        show_all(len(made), len(kept))
    return jax.tree.map(lambda leaf, *leaves: np.stack(leaves).astype(leaf.dtype), stored, *made)
