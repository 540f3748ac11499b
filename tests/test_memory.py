"""Whether a run fits into memory: what is compared, what is said, and how much is free."""

import types
from contextlib import nullcontext
from unittest import mock

import jax
import numpy as np
import pytest

from diffeqformer.data.store import Split
from diffeqformer.depth.depths import chunk_lengths
from diffeqformer.errors import UserError
from diffeqformer.parallel import memory as device_memory
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training import loop, room, run, validation
from diffeqformer.training.step import Program
from diffeqformer.transformer import weights_at
from helpers import ONE_DEVICE, first_state, lively_model, tokens_of, toy_config


@pytest.mark.parametrize("size", [{"model__vocab_size": 2 * 10**9}, {"model__width": 2**18, "model__mlp": 2**20}])
def test_a_model_too_large_is_said_before_anything_is_allocated(
    size, tmp_path, short_stores, one_device_loop, monkeypatch
):
    monkeypatch.setattr(device_memory, "free_on_host", lambda: 10**9)
    needs = r"its parameters and the optimizer's state need [\d,.]+ GB on each device, but [\d,.]+ GB are free"
    with pytest.raises(UserError, match=f"^config.model: {needs}; take a smaller model"):
        loop.train(toy_config(data__dir=str(short_stores), **size), tmp_path)


def test_a_train_step_too_large_is_said_before_it_runs(monkeypatch):
    config = toy_config("gpt")
    program = Program(config, ONE_DEVICE)
    state = program.state_shapes
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert needed > 3 * 4 * parameters  # with Adam's two moments
    for free, will_train in ((needed, False), (10**9, True)):
        monkeypatch.setattr(room, "free_bytes", lambda _, free=free: free)
        room.check_memory(program, will_train)
    for free, sentence in ((needed, "config.batch_size: a train step needs"), (needed - 1, "config.model: its para")):
        monkeypatch.setattr(room, "free_bytes", lambda _, free=free: free)
        with pytest.raises(UserError, match=f"^{sentence}.* on each device, but 0.0 GB are free; take"):
            room.check_memory(program, True)

    monkeypatch.setattr(room.hosts, "of_all", lambda free: [free, free - 1])  # another host has less
    monkeypatch.setattr(room, "free_bytes", lambda _: needed)
    with pytest.raises(UserError, match="^config.model: its para"):
        room.check_memory(program, True)
    monkeypatch.undo()
    monkeypatch.setattr(room, "free_bytes", lambda _: needed)
    beside_moments = needed - sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state["optimizer"]))
    too_large = "^config.model.num_steps: a validation in 6 steps needs 0.0 GB for its evaluation on"
    for more, said in ((0, nullcontext()), (1, pytest.raises(UserError, match=too_large))):
        sizes = iter((0, beside_moments, beside_moments + more))  # of a train step, the weights and the evaluation
        monkeypatch.setattr(room, "bytes_of_program", lambda _, sizes=sizes: next(sizes))
        with said:
            room.check_memory(program, True)

    def refuse(compiled):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    monkeypatch.setattr(room, "free_bytes", lambda _: needed)
    monkeypatch.setattr(room, "bytes_of_program", refuse)
    with pytest.raises(UserError, match="^config.batch_size: a train step needs more memory on each device, but"):
        room.check_memory(program, True)


def test_a_run_is_checked_for_what_it_will_do(tmp_path, short_stores, one_device_loop, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "check_memory", lambda program, will_train: asked.append(will_train))
    monkeypatch.setattr(loop, "sample", lambda *_: "")
    for _ in range(2):  # the second has finished
        loop.train(toy_config("gpt", steps=2, data__dir=str(short_stores)), tmp_path / "run")
    assert asked == [True, False]


def test_a_donated_state_counts_once():
    program = Program(toy_config("gpt"), ONE_DEVICE)
    tokens = jax.ShapeDtypeStruct((8, 16), "int32")
    compiled = program.train_step.lower(program.state_shapes, tokens).compile()
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state_shapes))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert state < device_memory.bytes_of_program(compiled) - temporary < 1.1 * state


@pytest.mark.parametrize("changes", [{}, {"model__generate_chunk": 2, "model__remat": "step"}])
def test_what_the_memory_check_compiled_is_not_compiled_again(changes, caplog):
    config = toy_config(model__training_depths="4,8", **changes)
    program = Program(config, make_mesh())
    ids = np.arange(16 * 16, dtype=np.uint16)
    split = Split((ids,), text_bytes=len(ids), sha256="")
    with jax.log_compiles():
        room.check_memory(program, True)
        state = first_state(program)
        for depth in (None, 8):
            validation.validate(program, state["params"], split, depth)
        program.train_step(state, jax.device_put(tokens_of(0, config), program.batch_sharding), 8)
    messages = [record.getMessage() for record in caplog.records]
    compiled = [message.split()[4] for message in messages if "Finished XLA comp" in message]
    found = {name: compiled.count(f"jit({name})") for name in ("_train_step", "_weights", "_evaluate")}
    assert found == {"_train_step": 1, "_weights": 0 if changes else 2, "_evaluate": 2}


def test_depths_that_need_most_memory():
    """In chunks of at most 24 steps, 52 steps have chunks of 13, and 48 of 24."""
    model = toy_config(model__training_depths="48,52,8", model__generate_chunk=24).model
    assert room.largest_depths(model, chunk_lengths(model)) == [52, 48]
    model = toy_config("llama", "llama", model__left_out="1,2,3", model__training_depths="3,4,6").model
    assert room.largest_depths(model, chunk_lengths(model)) == [6, 4]


def test_a_kernel_that_does_not_fit_is_not_taken_for_a_batch_that_does_not():
    lowered = mock.Mock(jax.stages.Lowered)
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack"
    lowered.compile.side_effect = jax.errors.JaxRuntimeError(said)
    remedy = "take config.kernels=xla if it is the hypernetwork's, or other config.model.heads if it is attention's"
    with pytest.raises(UserError, match=f"^A kernel's .* memory space vmem .* {remedy}$"):
        room.check_program("config.batch_size: a train step needs {}", lowered, 1)


def free_with(root, groups: str, files: dict[str, str]) -> int:
    """The free bytes of a host with 900 KiB of memory, for a process in some control groups with some files."""
    meminfo = "MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapFree: 300 kB\n"
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": groups} | {f"sys/fs/cgroup/{n}": t for n, t in files.items()}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return device_memory.free_on_host(root)


def test_free_memory_is_that_of_the_device_or_of_the_host(monkeypatch, tmp_path):
    gpu = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30}, platform="gpu")
    silent = types.SimpleNamespace(memory_stats=lambda: None, platform="metal")
    assert device_memory.free_bytes([gpu, gpu]) == 70 and device_memory.free_bytes([silent]) is None
    assert device_memory.bytes_of_device([gpu, gpu]) == 100 and device_memory.bytes_of_device([silent]) is None
    cpus = jax.local_devices(backend="cpu")
    assert device_memory.free_on_host() > 0
    assert free_with(tmp_path / "none", "", {}) == 900 * 1024
    version_2 = {"memory.max": "max", "a/memory.max": "5000", "a/memory.current": "4000"}
    version_2["a/memory.stat"] = "inactive_file 4\nactive_file 3"
    assert free_with(tmp_path / "v2", "0::/a/b\n", version_2) == 1007
    version_1 = {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "3100"}
    version_1["memory/memory.stat"] = "inactive_file 0\nactive_file 0\ntotal_inactive_file 150\ntotal_active_file 50"
    assert free_with(tmp_path / "v1", "5:cpu:/\n4:memory,x:/docker/c\n", version_1) == 100
    monkeypatch.setattr(device_memory, "free_on_host", lambda: 800)
    assert device_memory.free_bytes(cpus) == 800 // len(cpus)  # they share it


def test_weights_too_large_are_said_before_they_are_made(monkeypatch):
    monkeypatch.setattr(device_memory, "free_on_host", lambda: 1000)
    with pytest.raises(UserError, match="^num_steps: the weights of 6 steps would take"):
        weights_at(lively_model("diffeqformer"))
