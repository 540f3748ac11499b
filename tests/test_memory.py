"""Whether a run fits into memory: what is compared, what is said, how much is free, and what shapes tell."""

import json
import types
from unittest import mock

import jax
import numpy as np
import pytest

from diffeqformer.data.store import Split
from diffeqformer.depth.depths import chunk_lengths
from diffeqformer.errors import UserError
from diffeqformer.parallel import memory as device_memory
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.planning.chips import GPUS
from diffeqformer.planning.flash import attention_on, flash
from diffeqformer.training import loop, room, validation
from diffeqformer.training import run as training_run
from diffeqformer.training.room import bytes_of_loops, train_step_by_shapes, with_microbatches
from diffeqformer.training.step import Program
from diffeqformer.transformer import weights_at
from helpers import ONE_DEVICE, change, first_state, lively_model, tokens_of, toy_config
from runs import command


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
    sizes = iter((0, 0, needed + 1))  # of a train step, the weights and the evaluation
    monkeypatch.setattr(room, "bytes_of_program", lambda _: next(sizes))
    with pytest.raises(UserError, match="^config.model.num_steps: a validation in 6 steps needs 0.0 GB for its eval"):
        room.check_memory(program, True)

    def refuse(compiled):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    monkeypatch.setattr(room, "free_bytes", lambda _: needed)
    monkeypatch.setattr(room, "bytes_of_program", refuse)
    with pytest.raises(UserError, match="^config.batch_size: a train step needs more memory on each device, but"):
        room.check_memory(program, True)


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
        program.train_step(state, jax.device_put(tokens_of(0, config), program.shardings.batch), 8)
    messages = [record.getMessage() for record in caplog.records]
    compiled = [message.split()[4] for message in messages if "Finished XLA comp" in message]
    found = {name: compiled.count(f"jit({name})") for name in ("train_step", "weights", "evaluate")}
    assert found == {"train_step": 1, "weights": 0 if changes else 2, "evaluate": 2}


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


def test_shapes_tell_what_the_loops_over_depth_store():
    """The state and two numbers of each norm; or beside them qkv, attention, a number for its rows, hidden units."""
    config = toy_config(model__num_steps=3, model__dtype="bfloat16", model__vocab_multiple=2, microbatches=2)
    width, mlp, heads = config.model.width, config.model.mlp, config.model.heads
    config.batch_size = 16  # a device has one example at a time
    program = Program(config, make_mesh((4, 2, 1)), (flash, ""))
    for remat, of_token in (("step", 4 * width), ("products", 4 * width + 2 * (4 * width + mlp) + 4 * heads)):
        weights, stored, gradient = bytes_of_loops(program, 3, remat)
        assert stored == 3 * 16 * (of_token + 16)
        kernels = 4 * width * width + 2 * width * mlp
        vectors = 2 * (3 * width + width + mlp + width) + 4 * 4 * width  # biases, and norms in fp32
        assert gradient == 3 * (2 * kernels // 2 + vectors)  # each of two devices has half of the rows
        assert 0 <= weights - gradient < 100  # and the steps' numbers and sizes


@pytest.mark.parametrize("remat, solver, states", [("binomial", "euler", 3), ("reversible", "reversible_euler", 2)])
def test_shapes_tell_how_many_states_the_way_back_needs(remat, solver, states):
    """Two snapshots and the state before the last step; or one pair. All in fp32."""
    config = toy_config(model__num_steps=12, model__remat=remat, model__snapshots=2, model__solver=solver)
    program = Program(config, ONE_DEVICE, (flash, ""))
    found = train_step_by_shapes(program)
    assert found["states"] == states * 4 * config.batch_size * config.sequence_length * config.model.width


@pytest.mark.parametrize(
    "changes, cast",
    [({"model__lora_rank": 2, "model__dtype": "bfloat16"}, 0), ({"model__dtype": "bfloat16"}, 2), ({}, 0)],
)
def test_weights_that_are_read_where_they_lie_count_once(changes, cast):
    """Frozen kernels beside adapters, and weights of layers in float32. Other weights are cast before the loops."""
    config = toy_config("discretized", base="a run", model__vocab_multiple=16, **changes)
    program = Program(config, make_mesh((1, 2, 1), jax.devices()[:2]), (flash, ""))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state_shapes["params"]["depth"])) / 2
    assert abs(train_step_by_shapes(program)["weights"] - cast * parameters) < 0.4 * parameters


def on_a_gpu(config) -> tuple[str, dict[str, int]]:
    """The attention of a run on one H100, and the bytes of its train step by cause."""
    program = Program(config, ONE_DEVICE, attention_on(GPUS["h100"], config))
    return program.attention, train_step_by_shapes(program)


def test_a_plan_for_gpus_counts_the_scores_of_plain_attention():
    """cuDNN takes heads of multiples of 8 entries."""
    config = toy_config("gpt", sequence_length=64, model__max_length=64, model__dtype="bfloat16")
    fast, plain = (on_a_gpu(change(config, model__heads=heads)) for heads in (4, 8))
    assert fast[0] == "cuDNN" and plain[0].startswith("plain")
    assert sum(plain[1].values()) - sum(fast[1].values()) > 4 * config.batch_size * 8 * 64 * 64


def test_a_plan_for_gpus_goes_by_loops_over_all_steps():
    chunked, thin = toy_config(model__generate_chunk=2), toy_config("gpt", model__left_out="1,2")
    for config, field, value in ((chunked, "generate_chunk", "2"), (thin, "left_out", "1,2")):
        sentence = f"^config.model.{field}: must be left out in a plan for GPUs, .* but it is {value}$"
        with pytest.raises(UserError, match=sentence):
            on_a_gpu(config)


def test_a_plan_for_gpus_knows_that_shifted_grids_have_one_more_step():
    fixed, shifted = (on_a_gpu(toy_config(model__training_times=times))[1] for times in ("fixed", "shifted"))
    for what in ("weights", "states"):
        assert shifted[what] * 6 == fixed[what] * 7


def test_the_fewest_microbatches_that_fit_are_taken_where_their_number_is_open(tmp_path, monkeypatch):
    """They divide a device's examples. If none fit, there is one example at a time; if the memory isn't known, one."""
    open_program, *programs = (
        Program(toy_config("gpt", batch_size=16, microbatches=number), make_mesh((8, 1, 1))) for number in range(3)
    )
    enough = {}
    for number, program in enumerate(programs, 1):
        assert with_microbatches(program, 0) is program
        enough[number] = int(sum(train_step_by_shapes(program).values()) / 0.9) + 1
    assert enough[1] > enough[2] + 2
    for memory, number in ((None, 1), (enough[1], 1), (enough[1] - 2, 2), (enough[2], 2), (0, 2)):
        chosen = with_microbatches(open_program, memory)
        assert (chosen.config.microbatches, open_program.config.microbatches) == (number, 0)
        assert chosen.mesh == open_program.mesh and chosen.attention == open_program.attention
    monkeypatch.setattr(training_run, "make_mesh", lambda *_: open_program.mesh)
    monkeypatch.setattr(training_run, "bytes_of_device", lambda _: enough[2])
    assert training_run.make_program(open_program.config, tmp_path).config.microbatches == 2


def test_fine_tuning_on_gpus_is_planned(run, tmp_path):
    """By the command, which opens the base before it traces the run on as many devices."""
    options = [
        "--config=configs/finetune_openwebtext_to_wikitext103.py:lora", f"--config.base={run}", "--topology=h100:2",
        "--config.data.tokenizer=bytes", "--config.mesh.fsdp=1", "--config.sequence_length=64",
        "--config.model.lora_rank=4", "--config.microbatches=0",
    ]  # fmt: skip
    done = command("plan", *options, f"--json={tmp_path}/plan.json")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["devices"], plan["kind"], plan["fits"]) == (2, "NVIDIA H100", True) and "training" not in plan
    assert plan["microbatches"] == 1 and "times aren't modelled" in done.stdout


def test_a_run_is_checked_for_what_it_will_do(tmp_path, short_stores, one_device_loop, monkeypatch):
    asked = []
    monkeypatch.setattr(training_run, "check_memory", lambda program, will_train: asked.append(will_train))
    for _ in range(2):  # the second has finished
        loop.train(toy_config("gpt", steps=2, data__dir=str(short_stores)), tmp_path / "run")
    assert asked == [True, False]
