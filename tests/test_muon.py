"""Muon: its updates are orthogonal, AdamW has the rest, and the devices share the work."""

import math
import re

import jax
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.optimizer import MATRICES, make_optimizer, orthogonal_on
from helpers import normal, toy_config


def updates_of(config, params, gradients):
    """The updates of two steps, as flat trees, and the decays of the parameters."""
    decays = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    optimizer = make_optimizer(config, decays)
    state, made, update = jax.jit(optimizer.init)(params), [], jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        made.append(traverse_util.flatten_dict(updates))
    return made


def test_matrices_of_blocks_move_orthogonally_and_all_else_as_by_adamw():
    random = np.random.RandomState(0)
    shapes = {"kernel": (3, 8, 16), "projection": (24, 5, 8), "constant": (24, 8), "bias": (3, 16), "lin1": (8, 16)}
    params = {
        "depth": {"layers": {"up": {name: normal(random, shape) for name, shape in shapes.items()}}},
        "token_embedding": normal(random, (32, 8)),
    }
    gradients = [jax.tree.map(lambda leaf: normal(random, leaf.shape), params) for _ in range(2)]
    config = toy_config(optimizer__name="muon", steps=100)
    config.optimizer.update(learning_rate=0.01, warmup_fraction=0.0, clip_norm=0.0, weight_decay=0.5)
    ours = updates_of(config, params, gradients)
    config.optimizer.name = "adamw"
    theirs = updates_of(config, params, gradients)

    momentum = jax.tree.map(lambda first, second: 0.95 * (0.95 * first + second) + second, *gradients)
    momentum, before = traverse_util.flatten_dict(momentum), traverse_util.flatten_dict(params)
    rate = 0.01 * (0.1 + 0.9 * (1 + np.cos(np.pi / 100)) / 2)  # of the second step
    for path, update in ours[1].items():
        if path[0] != "depth" or path[-1] not in MATRICES:
            np.testing.assert_array_equal(update, theirs[1][path])
            continue
        own = update + rate * 0.5 * before[path]  # without the decay
        of = momentum[path]
        if path[-1] == "projection":
            own, of = own.swapaxes(0, 1), of.swapaxes(0, 1)
        for one, gradient in zip(own.reshape(-1, *own.shape[-2:]), of.reshape(-1, *of.shape[-2:]), strict=True):
            left, _, right = np.linalg.svd(gradient, full_matrices=False)
            inside = left.T @ one @ right.T / (-rate * 0.2 * max(one.shape) ** 0.5)
            sizes = np.diag(inside)
            assert 0.5 < sizes.min() and sizes.max() < 1.4, path
            assert np.abs(inside - np.diag(sizes)).max() < 1e-4, path
            assert abs(np.sqrt(np.mean(one**2)) / rate - 0.2) < 0.05


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize(
    "name, sizes", [("projection", (64, 20, 192)), ("kernel", (6, 64, 192)), ("constant", (64, 192))]
)
def test_devices_divide_the_matrices(name, sizes, shape):
    """None does the work of all, and none receives more than its own matrices and its copy's part of the result."""
    mesh, update = make_mesh(shape), normal(np.random.RandomState(0), sizes)
    spec = [None] * len(sizes)
    spec[0 if name == "projection" else -2], spec[-1] = ("generator", "fsdp"), "tensor"
    place = NamedSharding(mesh, PartitionSpec(*spec))
    alone = jax.jit(lambda update: orthogonal_on(None, name, update)).lower(update).compile()
    together = jax.jit(lambda update: orthogonal_on(place, name, update), in_shardings=place, out_shardings=place)
    compiled = together.lower(jax.ShapeDtypeStruct(sizes, "float32")).compile()
    np.testing.assert_allclose(compiled(jax.device_put(update, place)), alone(update), atol=1e-5)
    matrices = update.size // (64 * 192)
    each = -(-matrices // 8)
    flops = compiled.cost_analysis()["flops"] / alone.cost_analysis()["flops"]
    assert flops < 1.1 * each / matrices
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    part = each * 8 * 64 * 192 // (shape[1] * shape[2])
    assert all(math.prod(map(int, dims.split(","))) <= part for dims in gathered)
    assert bool(gathered) == (shape[0] > 1)
