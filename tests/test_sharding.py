"""Every mesh trains like one device, and communicates no more than necessary."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import AXES, divide_generator, make_mesh
from diffeqformer.parallel.sharding import generator_parts
from diffeqformer.training import step
from diffeqformer.training.step import Program
from diffeqformer.transformer import new_model, split_model
from helpers import ONE_DEVICE, run_steps, tokens_of, toy_config

AT_TWO_DEPTHS = {"model__solver": "heun", "model__training_depths": "2,3", "microbatches": 2, "seed": 1}
ALL_OF_LLAMA = {"model__key_value_heads": 2, "model__biases": "all", "model__tied_head": True}


def sharded_config(kind="diffeqformer", field="gpt", **changes):
    return toy_config(kind, field, **{"batch_size": 16, "steps": 4, "model__vocab_multiple": 16, **changes})


def run_and_score(config, mesh):
    """The state after three steps, their scalars, and the score of a part of another batch."""
    program, state, scalars = run_steps(config, mesh, 3)
    weights = program.weights(state["params"], None)
    scored = program.evaluate(state["params"], weights, tokens_of(9, config), np.arange(16)[:, None] < 13)
    return state, [*scalars.flatten(), float(scored.total), float(scored.count)]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, changes, meshes",
    [
        ("shared", "gpt", {}, [(2, 2, 2)]),
        ("diffeqformer", "gpt", {"model__dropout": 0.1, "microbatches": 2}, [(4, 2, 1), (2, 2, 2)]),
        pytest.param("diffeqformer", "gpt", {"model__dropout": 0.1}, [(8, 1, 1)], marks=pytest.mark.slow),
        pytest.param("diffeqformer", "llama", {"model__remat": "none"}, [(2, 1, 4)], marks=pytest.mark.slow),
        pytest.param("looped", "gpt", {"microbatches": 2}, [(4, 2, 1), (2, 2, 2)], marks=pytest.mark.slow),
        ("gpt", "gpt", {"model__remat": "products"}, [(1, 8, 1)]),
        ("diffeqformer", "gpt", AT_TWO_DEPTHS, [(1, 8, 1)]),
        ("discretized", "gpt", {"model__lora_rank": 2, "microbatches": 2}, [(2, 2, 2)]),
        ("diffeqformer", "gpt", {"optimizer__name": "muon"}, [(2, 2, 2)]),
        pytest.param("gpt", "gpt", {"optimizer__name": "muon"}, [(8, 1, 1)], marks=pytest.mark.slow),
        ("llama", "llama", ALL_OF_LLAMA, [(2, 2, 2)]),
    ],
)
def test_every_mesh_trains_as_one_device_does(kind, field, changes, meshes, compilations):
    config = sharded_config(kind, field, **changes)
    alone, expected = run_and_score(config, ONE_DEVICE)
    for shape in meshes:
        together, losses = run_and_score(config, make_mesh(shape))
        np.testing.assert_allclose(losses, expected, rtol=3e-6)
        for mine, theirs in zip(jax.tree.leaves(alone["params"]), jax.tree.leaves(together["params"]), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=3e-5)
    depths = 2 if config.model.training_depths else 1
    assert compilations("train_step") == depths * (1 + len(meshes))  # the state comes back as it went in


@pytest.mark.long
def test_every_mesh_starts_as_one_device_does():
    """With the shapes, types and shardings that its program states."""
    config = sharded_config()
    programs = Program(config, ONE_DEVICE), Program(config, make_mesh((2, 2, 2)))
    alone, expected = (program.init() for program in programs)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, alone, expected)
    jax.tree.map(close, split_model(new_model(config))[1], alone["params"])
    for program, state in zip(programs, (alone, expected)):
        assert jax.tree.structure(state) == jax.tree.structure(program.state_shapes)
        for leaf, stated in zip(jax.tree.leaves(state), jax.tree.leaves(program.state_shapes), strict=True):
            assert (leaf.shape, leaf.dtype) == (stated.shape, stated.dtype)
            assert leaf.sharding.is_equivalent_to(stated.sharding, leaf.ndim)


def collectives(config, shape: tuple[int, int, int]) -> dict[str, list[int]]:
    """Bytes that a device receives in the compiled train step's collectives, by kind; loops count once."""
    program = Program(config, make_mesh(shape))
    shapes = program.state_shapes, jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
    found = {"all-gather": [], "all-reduce": [], "reduce-scatter": [], "all-reduce in a loop": []}
    for line in program.train_step.lower(*shapes).compile().as_text().splitlines():
        if line.endswith("{"):  # a computation begins
            once = line.startswith("ENTRY")
        if match := re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)\(", line):
            arrays = re.findall(r"[fsu](\d+)\[([\d,]*)\]", match[1])
            sizes = [int(bits) // 8 * math.prod(map(int, dims.split(","))) if dims else 4 for bits, dims in arrays]
            kind = match[2] if once or match[2] != "all-reduce" else "all-reduce in a loop"
            found[kind].append(sum(sizes))  # no other kind is expected
    return found


@pytest.mark.long
def test_a_step_gathers_its_weights_and_what_data_parallel_devices_sum_is_their_gradient(monkeypatch):
    """In bytes: W(t_n) is gathered and its gradient scattered step by step; dW is summed once for all microbatches.

    A divided generator moves no more bytes: instead of all-reducing dW, it scatters dW and gathers W.
    """
    shape, width, hidden, steps = (2, 4, 1), 64, 256, 6
    sizes = dict(model__width=width, model__mlp=hidden, model__time_embed_dim=40, microbatches=2)
    divided = collectives(sharded_config(**sizes), shape)
    monkeypatch.setattr(step, "divide_copies", lambda _, mesh: mesh)
    ours = collectives(sharded_config(**sizes), shape)
    theirs = collectives(sharded_config("gpt", **sizes), shape)

    kernels = [4 * width * n for n in (3 * width, width, hidden, hidden)]
    embeddings = [4 * width * n for n in (272, 16)]
    made = [steps * n // 4 for n in kernels]
    assert sorted(divided["all-gather"]) == sorted(ours["all-gather"] + made)
    assert sorted(divided["reduce-scatter"]) == sorted(ours["reduce-scatter"] + [n // 2 for n in made])
    assert sum(divided["all-reduce"]) < sum(ours["all-reduce"]) - 0.99 * sum(made)
    assert divided["all-reduce in a loop"] == []
    for found in (ours, theirs):
        assert sorted(found["all-gather"]) == sorted(2 * kernels + embeddings)  # forward, and again backward
        assert sorted(found["reduce-scatter"]) == sorted(n // 4 for n in kernels + embeddings)
    summed = (steps * sum(kernels) + sum(embeddings)) // 4  # of the parts that a device has
    for found in (ours, theirs):
        assert summed <= sum(found["all-reduce"]) < 1.08 * summed
        assert found["all-reduce in a loop"] == []  # of microbatches, say
    assert sum(ours["all-reduce"]) < 1.05 * sum(theirs["all-reduce"])

    chunked = sharded_config(**sizes, model__remat="step", model__generate_chunk=2)
    in_chunks = collectives(chunked, shape)
    assert sorted(in_chunks["all-gather"]) == sorted(2 * kernels + embeddings)
    summed = ((1 + 40) * sum(kernels) + sum(embeddings)) // 4  # B and P, once for all chunks
    assert summed <= sum(in_chunks["all-reduce"]) < 1.1 * summed
    assert in_chunks["all-reduce in a loop"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "shape, width, shares",
    [
        ((2, 2, 2), 32, (1 / 4, 1 / 4)),  # too few rows for whole tiles
        ((2, 2, 2), 64, (1 / 4, 1 / 8)),
        pytest.param((2, 4, 1), 32, (1 / 4, 1 / 4), marks=pytest.mark.slow),
        pytest.param((8, 1, 1), 64, (1, 1 / 8), marks=pytest.mark.slow),
    ],
)
def test_the_state_is_shared_and_stays_in_place(shape, width, shares):
    """A device has one share of the embeddings and another of the generator's matrices. Nothing else is shared."""
    program = Program(sharded_config(model__width=width, model__mlp=4 * width), make_mesh(shape))
    state = program.state_shapes
    places = zip(jax.tree.leaves(state), jax.tree.leaves(program.shardings.state), strict=True)
    size = 4 * sum(math.prod(place.shard_shape(leaf.shape)) for leaf, place in places)
    expected = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path).split("'")[-2]
        of_generator = name in ("projection", "constant")
        expected += 4 * leaf.size * (shares[of_generator] if of_generator or "_embedding" in name else 1)
    assert 0.97 * expected < size <= expected and (size == expected or shape[2] > 1)  # `tensor` shares some biases
    memory = program.train_step.lower(state, jax.ShapeDtypeStruct((16, 16), "int32")).compile().memory_analysis()
    assert size <= memory.argument_size_in_bytes < 1.01 * size + 1000
    assert memory.alias_size_in_bytes > 0.99 * memory.argument_size_in_bytes - 1000


class Device:
    process_index, device_kind = 0, "any"

    def __init__(self, platform, number, slice_index=None):
        self.platform, self.id = platform, number
        self.slice_index = number if slice_index is None else slice_index


def test_copies_in_different_slices_do_not_share_a_generator():
    devices = np.array([Device("tpu", number, number // 4) for number in range(8)])
    mesh = Mesh(devices.reshape(8, 1, 1, 1), AXES)
    assert generator_parts(mesh, [(64, "embed")]) == 4
    divided = divide_generator(mesh, 4)
    assert [{device.slice_index for device in parts.flat} for parts in divided.devices] == [{0}, {1}]
    assert divide_generator(divided, 1) == mesh


def test_only_data_parallel_devices_are_in_several_slices_of_tpus_but_nodes_of_gpus_are_no_slices():
    with pytest.raises(UserError, match="^config.mesh.data: must be a multiple of the 2 slices"):
        make_mesh((1, 2, 1), [Device("tpu", 0), Device("tpu", 1)])
    assert make_mesh((1, 2, 1), [Device("gpu", 0), Device("gpu", 1)]).shape["fsdp"] == 2
