"""A pretrained Llama in other numbers of steps, without training: what does each way of getting there cost?

    diffeqformer import --from=smollm2 --workdir=runs/any_depth/pretrained
    python experiments/untrained_depths.py --workdir=runs/any_depth/pretrained --text=wiki.valid.tokens

Layers are left out, averaged with a neighbour, taken from the lines between neighbours at even distances, or taken
twice in steps of half the length (Chen et al., 2026, arXiv:2605.23872). Averages and lines are tried with the layers as
they are, and aligned: heads and hidden units of each layer permuted to match those of the one before, which changes no
output. Where there is a choice of layers, the best one on this text counts.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from common import results_file
from flax import nnx
from scipy.optimize import linear_sum_assignment

from diffeqformer.checkpoints import checkpoint
from diffeqformer.console.results import write_json
from diffeqformer.transformer import Transformer, split_model, weights_at

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the imported Llama.", required=True)
TEXT = flags.DEFINE_string("text", None, "A file whose beginning is scored.", required=True)
WINDOWS = flags.DEFINE_integer("windows", 4, "Windows of 256 tokens that are scored.", lower_bound=1)
flags.DEFINE_string("results", "experiments/untrained_depths.json", "The rows.")


def loss_of(model: Transformer, tokens: jax.Array) -> Callable[..., float]:
    """A function from the layers of a walk, and its step sizes if they aren't 1, to the loss in nats per token."""
    (graph, params), whole = split_model(model), weights_at(model)

    @jax.jit
    def mean(params, layers, sizes):
        weights = dataclasses.replace(whole, layers=layers, step_sizes=sizes)
        logits = nnx.merge(graph, params)(tokens, weights)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2).mean()

    def loss(layers: dict, sizes=None) -> float:
        sizes = jnp.ones(len(jax.tree.leaves(layers)[0])) if sizes is None else jnp.asarray(sizes, jnp.float32)
        return float(mean(params, jax.tree.map(jnp.asarray, layers), sizes))

    return loss


def taken(layers: dict, rows) -> dict:
    """Some layers of a stack, in order."""
    return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], layers)


def on_lines(layers: dict, places: np.ndarray) -> dict:
    """The weights at some places on the lines between neighbours, which are at 0, 1, 2, ..."""
    before = np.minimum(np.floor(places).astype(int), len(jax.tree.leaves(layers)[0]) - 2)
    share = np.float32(places - before)
    parts = taken(layers, before), taken(layers, before + 1)
    return jax.tree.map(lambda a, b: a + np.expand_dims(share, tuple(range(1, a.ndim))) * (b - a), *parts)


def aligned(layers: dict, heads: int, groups: int) -> dict:
    """The same layers, with heads and hidden units in the order in which they are most like those of the layer before.

    Heads that share keys and values stay together. A hidden unit's input and output may both change their sign.
    """
    layers = jax.tree.map(np.array, layers)
    kernels = {name: layer["kernel"] for name, layer in layers.items() if "kernel" in layer}
    for now in range(1, len(kernels["query"])):
        gate, up, down = (products(kernels, layers, name, now) for name in ("mlp_gate", "mlp_up", "mlp_down"))
        _, order = linear_sum_assignment(gate + np.abs(up + down), maximize=True)
        signs = np.sign((up + down)[np.arange(len(order)), order])
        kernels["mlp_gate"][now] = kernels["mlp_gate"][now][:, order]
        kernels["mlp_up"][now] = kernels["mlp_up"][now][:, order] * signs
        kernels["mlp_down"][now] = kernels["mlp_down"][now][order] * signs[:, None]
        own = products(kernels, layers, "query", now, heads) + products(kernels, layers, "attention_out", now, heads)
        shared = products(kernels, layers, "key", now, groups) + products(kernels, layers, "value", now, groups)
        order = best_order(own, shared)
        of_groups = order.reshape(groups, -1)[:, 0] // (heads // groups)
        for name, axis, parts in (("query", 1, order), ("key", 1, of_groups), ("value", 1, of_groups)):
            permute(kernels[name][now], parts, axis)
        permute(kernels["attention_out"][now], order, 0)
    return layers


def products(kernels: dict, layers: dict, name: str, now: int, parts: int | None = None) -> np.ndarray:
    """Inner products of a layer's units, or heads, with those of the layer before it: [before, now]."""
    both = []
    for row in (now - 1, now):
        kernel = kernels[name][row]
        if name in ("attention_out", "mlp_down"):
            kernel = kernel.T
        else:  # with the scale of the norm that it follows
            norm = "norm_mlp" if name.startswith("mlp") else "norm_attention"
            kernel = kernel * layers[norm]["scale"][row][:, None]
        both.append(kernel.reshape(len(kernel), parts or kernel.shape[1], -1))
    return np.einsum("duk,dvk->uv", *both, optimize=True)


def best_order(own: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """The order of heads with the largest sum of products, in which groups of heads stay together."""
    size, found = len(own) // len(shared), []
    for groups in itertools.permutations(range(len(shared))):
        total, order = 0.0, []
        for place, group in enumerate(groups):
            part = own[place * size : (place + 1) * size, group * size : (group + 1) * size]
            rows, columns = linear_sum_assignment(part, maximize=True)
            total += part[rows, columns].sum() + shared[place, group]
            order += list(group * size + columns)
        found.append((total, order))
    return np.array(max(found)[1])


def permute(kernel: np.ndarray, order: np.ndarray, axis: int) -> None:
    """Put the heads of a kernel in another order."""
    heads = np.stack(np.split(kernel, len(order), axis))
    kernel[:] = np.concatenate(list(heads[order]), axis)


def distance(layers: dict) -> float:
    """The mean distance of neighbours' kernels, relative to their size; the square root of 2 if nothing is alike."""
    kernels = [layer["kernel"] for layer in layers.values() if "kernel" in layer]
    return float(
        np.mean([np.linalg.norm(kernel[now] - kernel[now - 1]) / np.linalg.norm(kernel[now])
                 for kernel in kernels for now in range(1, len(kernel))])
    )  # fmt: skip


def rows(layers: dict, other: dict, loss: Callable[..., float]) -> Iterator[tuple[int, str, float]]:
    """The number of steps, the way to get there, and the loss; `other` are the aligned layers."""
    number = len(jax.tree.leaves(layers)[0])
    every = list(range(number))
    yield number, "as trained", loss(layers)
    yield number, "as trained, aligned", loss(other)
    without = [loss(taken(layers, every[:layer] + every[layer + 1 :])) for layer in every]
    yield number - 1, "one left out", min(without)
    for name, each in (("", layers), (", aligned", other)):
        pairs = [
            loss(on_lines(each, np.array([*every[:layer], layer + 0.5, *every[layer + 2 :]]))) for layer in every[:-1]
        ]
        yield number - 1, f"a pair averaged{name}", min(pairs)
    even = np.arange(1, number - 1) * number / (number - 2) - 1
    nearest, longer = taken(layers, np.round(even).astype(int)), np.full(number - 2, number / (number - 2))
    yield number - 2, "even, the nearest layer", loss(nearest)
    yield number - 2, "even, the nearest layer, longer steps", loss(nearest, longer)
    yield number - 2, "even, between layers", loss(on_lines(layers, even))
    yield number - 2, "even, between layers, aligned", loss(on_lines(other, even))
    for length in (1, 4):
        twice = []
        for first in range(number - length + 1):
            window = every[first : first + length]
            walk = every[:first] + sorted(2 * window) + every[first + length :]
            twice.append(loss(taken(layers, walk), [0.5 if layer in window else 1.0 for layer in walk]))
        yield number + length, f"{length} taken twice in halves", min(twice)


def main(_) -> None:
    opened = checkpoint.load(WORKDIR.value)
    model, text = opened.model, open(TEXT.value, encoding="utf-8").read(4096 * WINDOWS.value)
    ids = opened.tokenizer.encode(text)[: 256 * WINDOWS.value]
    if len(ids) < 256 * WINDOWS.value:
        sys.exit(f"--text: must have {256 * WINDOWS.value:,} tokens, but it has {len(ids):,}")
    tokens = jnp.asarray(ids).reshape(-1, 256)
    layers = split_model(model)[1]["depth"]["layers"]
    other = aligned(layers, model.field.heads, model.field.key_value_heads)
    found = {"tokens": tokens.size, "distance of neighbours": distance(layers)}
    found |= {"distance of neighbours, aligned": distance(other), "rows": []}
    for number, way, loss in rows(layers, other, loss_of(model, tokens)):
        print(f"{number} steps, {way}: {loss:.3f} nats per token", flush=True)
        found["rows"].append({"steps": number, "way": way, "loss": loss})
    write_json(results_file(), found)


if __name__ == "__main__":
    app.run(main)
