"""Updates: AdamW with the published masks and rates, Muon, and gradients of P as factors, with and without kernels."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from diffeqformer.config import check_config
from diffeqformer.depth.depths import drawn_depth
from diffeqformer.depth.projection import sum_of_squares
from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.optimizer import MATRICES, decay_mask, learning_rate_schedule, make_optimizer, orthogonal_on
from diffeqformer.training.projections import Projections
from diffeqformer.training.step import Program, dropout_keys, training_grid
from diffeqformer.transformer import abstract_model, merge_trees
from helpers import ONE_DEVICE, change, first_state, normal, run_steps, tokens_of, toy_config

SIZES = {
    "batch_size": 16, "optimizer__warmup_fraction": 0.0, "optimizer__epsilon": 1e-6, "model__vocab_multiple": 16,
    "model__time_embed_dim": 8, "model__width": 128, "model__mlp": 256, "optimizer__weight_decay": 10.0,
}  # fmt: skip


def decaying(kind: str, field: str = "gpt", decay: str = "as_published") -> tuple[set[str], set[str]]:
    """The names of a model's parameters that decay, and of those that don't."""
    mask = decay_mask(abstract_model(toy_config(kind, field)), decay)
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decays for path, decays in leaves}
    return {name for name in names if names[name]}, {name for name in names if not names[name]}


def test_decay_follows_the_published_masks_or_takes_everything_or_matrices():
    embeddings = {"token_embedding", "position_embedding"}
    gpt = embeddings | {f"depth/layers/{name}/kernel" for name in ("qkv", "attention_out", "mlp_up", "mlp_down")}
    names = ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_down")
    llama = {"token_embedding", *(f"depth/layers/{name}/kernel" for name in names)}
    for kinds, field, expected in (
        (("diffeqformer", "alternative"), "gpt", embeddings),
        (("gpt", "shared", "discretized", "looped"), "gpt", gpt),
        (("llama", "shared", "discretized"), "llama", llama),
    ):
        assert [decaying(kind, field)[0] for kind in kinds] == [expected] * len(kinds)
    every_llama = [decaying(kind, "llama") for kind in ("diffeqformer", "alternative", "looped")]
    every = [decaying(kind, decay="everything") for kind in ("diffeqformer", "discretized")]
    assert not any(spared for _, spared in every_llama + every)
    assert decaying("gpt", decay="matrices")[0] == decaying("shared", decay="matrices")[0] == gpt
    spared = decaying("discretized", decay="matrices")[1]
    assert len(spared) == 10 and spared == {n for n in every[1][0] if n.endswith(("bias", "scale", "shift"))}
    spared = {name.rpartition("/")[2] for name in decaying("diffeqformer", decay="matrices")[1]}
    assert spared == {"lin1_bias", "lin2_bias", "scale", "shift"}


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    rate = learning_rate_schedule(toy_config(steps=1000))
    assert rate(0) == 0 and rate(5) == pytest.approx(3e-4) and rate(10) == pytest.approx(6e-4)
    assert rate(505) == pytest.approx(6e-4 * 0.55) and rate(1000) == pytest.approx(6e-5)
    for fraction, steps, step in ((0.0, 1, 0), (1.0, 10, 9)):  # with no warm-up, and with nothing else
        config = toy_config(steps=steps, optimizer__warmup_fraction=fraction)
        assert learning_rate_schedule(config)(step) == pytest.approx(6e-4)


def test_an_update_is_clipped_adamw_with_decay_of_some():
    config = toy_config("gpt", steps=10, optimizer__warmup_fraction=0.0, optimizer__clip_norm=0.5)
    params = {"kernel": jnp.array([1.0, -2.0]), "scale": jnp.array([3.0])}
    gradients = {"kernel": jnp.array([3.0, 0.0]), "scale": jnp.array([4.0])}  # of norm 5
    adamw = make_optimizer(config, {"kernel": True, "scale": False})
    updates, state = jax.jit(adamw.update)(gradients, adamw.init(params), params)
    np.testing.assert_allclose(updates["scale"], -6e-4, rtol=1e-5)  # the first step of Adam has the gradient's sign
    np.testing.assert_allclose(updates["kernel"], [-6e-4 * (1 + 0.1), 6e-4 * 0.1 * 2], rtol=1e-5)
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(moments["scale"], 0.1 * 4.0 * 0.5 / 5, rtol=1e-5)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "nu")["scale"], 0.001 * 0.4**2, rtol=1e-4)


def test_the_rate_before_the_decay_does_not_depend_on_the_steps():
    config = toy_config(steps=100)
    config.optimizer.update(schedule="wsd", warmup_steps=2, decay_fraction=0.5, learning_rate=1.0, final_fraction=0.2)
    rates = [float(learning_rate_schedule(config)(step)) for step in range(100)]
    assert rates[:4] == [0.0, 0.5, 1.0, 1.0] and set(rates[2:51]) == {1.0}
    np.testing.assert_allclose(rates[50:], np.linspace(1, 0.2, 51)[:-1], rtol=1e-5)
    longer = learning_rate_schedule(change(config, steps=300))
    assert [float(longer(step)) for step in range(150)] == rates[:50] + [1.0] * 100
    assert float(learning_rate_schedule(change(config, optimizer__warmup_steps=0))(0)) == 1.0
    with pytest.raises(UserError, match="^config.optimizer.warmup_steps: must not be above the steps before the decay"):
        check_config(change(config, optimizer__warmup_steps=151), 1)


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


def steps_of_optax(config, mesh, steps: int) -> tuple[dict, list[float]]:
    """The state after some steps, with dP itself and optax alone, and the norms of the gradients."""
    program = Program(config, mesh)
    loss = ShardedLoss(program.graph, program.state_shapes["params"], program.mesh)
    decays = decay_mask(abstract_model(config), config.optimizer.decay)
    optimizer = make_optimizer(config, program.loss.trained_and_frozen(decays)[0])

    @functools.partial(jax.jit, static_argnames="depth")
    def train_step(params, moments, tokens, step, depth):
        keys = dropout_keys(config.seed, step, len(tokens)) if config.model.dropout else None
        grid = training_grid(nnx.merge(program.graph, params), config.model.training_times, config.seed, step, depth)
        _, gradient = loss.value_and_grad(params, tokens, keys, config.microbatches, grid)
        updates, moments = optimizer.update(gradient, moments, program.loss.trained_and_frozen(params)[0])
        params = merge_trees(params, optax.apply_updates(program.loss.trained_and_frozen(params)[0], updates))
        return params, moments, optax.tree.norm(gradient)

    state = first_state(program)
    params, moments, norms = state["params"], state["optimizer"], []
    for step in range(steps):
        depth = drawn_depth(program.depths, config.seed, step)
        params, moments, norm = train_step(params, moments, tokens_of(step % 2, config), step, depth)
        norms.append(float(norm))
    return {"params": params, "optimizer": moments}, norms


SHIFTED = {"microbatches": 2, "model__training_times": "shifted", "optimizer__clip_norm": 1e-2}
AT_TWO_DEPTHS = {"model__width": 256, "model__training_depths": "2,3", "seed": 1, "optimizer__clip_norm": 0.0}
IN_BFLOAT16 = {"microbatches": 2, "model__dtype": "bfloat16"}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, shape, changes",
    [
        ("alternative", "gpt", (2, 2, 1), SHIFTED),
        pytest.param("diffeqformer", "llama", (2, 2, 2), AT_TWO_DEPTHS, marks=pytest.mark.slow),
        pytest.param("discretized", "gpt", (2, 2, 1), {"model__lora_rank": 2}, marks=pytest.mark.slow),
        pytest.param("diffeqformer", "gpt", (2, 2, 1), IN_BFLOAT16, marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_those_of_optax(kind, field, shape, changes, monkeypatch):
    """By XLA, by XLA as on accelerators (where the norm comes from Gram matrices), and by the kernels.

    A gpt's P doesn't decay, and a llama's does, by a decay that would show.

    Only one step where weights are bfloat16: the next one's may be rounded up instead of down.
    """
    config = toy_config(kind, field, **{**SIZES, **changes})
    mesh = make_mesh(shape, jax.devices()[: np.prod(shape)])
    steps = 1 if config.model.dtype == "bfloat16" else 3
    expected, norms = steps_of_optax(config, mesh, steps)
    for kernels, on_cpu in (("xla", True), ("xla", False), ("pallas", False)):
        config.kernels = kernels
        fixed = property(lambda _, value=on_cpu: value, lambda *_: None)
        monkeypatch.setattr(Projections, "on_cpu", fixed, raising=False)
        program, state, scalars = run_steps(config, mesh, steps)
        np.testing.assert_allclose(scalars[:, 1], norms, rtol=3e-6)
        if projections := program.loss.projections:  # none in a model with weights per layer
            assert projections.fused == (list(projections.shapes) if kernels == "pallas" else [])
        for mine, theirs in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(expected["params"]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
        moments = zip(jax.tree.leaves(state["optimizer"]), jax.tree.leaves(expected["optimizer"]), strict=True)
        for mine, theirs in moments:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * abs(np.asarray(theirs)).max())


def test_squares_are_summed_without_their_terms():
    """Also if h hardly varies and the gradients of different times cancel, where a plain Gram form is wrong."""
    generator = np.random.default_rng(0)
    d_kernel = generator.normal(size=(12, 16, 24))
    for h in (generator.normal(size=(12, 8)), 1 + 1e-3 * generator.normal(size=(12, 8))):
        for terms in (d_kernel, d_kernel - (1 - 1e-4) * d_kernel.mean(0)):
            expected = np.sum(np.einsum("te,tio->ieo", h, terms) ** 2)
            found = sum_of_squares(jnp.asarray(h, jnp.float32), jnp.asarray(terms, jnp.float32))
            assert float(found) == pytest.approx(expected, rel=1e-4)


def test_kernels_that_do_not_fit_are_not_taken():
    refused = r"^config.kernels: must be auto or xla .*\(.*qkv: E = 12 .*\), but it is 'pallas'"
    with pytest.raises(UserError, match=refused):
        Program(toy_config(kernels="pallas"), ONE_DEVICE)
    with pytest.raises(UserError, match="outputs = 64 isn't a multiple of 128"):  # of a device's part of 256
        Program(toy_config(kernels="pallas", **SIZES), make_mesh((1, 1, 4), jax.devices()[:4]))
