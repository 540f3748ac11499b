"""Plans for GPUs: the memory of a train step by its shapes."""

import json

import jax
import pytest

from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.planning.chips import GPUS
from diffeqformer.planning.flash import attention_on, flash
from diffeqformer.training import step
from diffeqformer.training.room import bytes_of_loops, train_step_by_shapes, with_microbatches
from helpers import ONE_DEVICE, change, toy_config
from runs import command


def test_shapes_tell_what_the_loops_over_depth_store():
    """The state and two numbers of each norm; or beside them qkv, attention, a number for its rows, hidden units."""
    config = toy_config(model__num_steps=3, model__dtype="bfloat16", model__vocab_multiple=2, microbatches=2)
    width, mlp, heads = config.model.width, config.model.mlp, config.model.heads
    config.batch_size = 16  # a device has one example at a time
    program = step.Program(config, make_mesh((4, 2, 1)), (flash, ""))
    for remat, of_token in (("step", 4 * width), ("products", 4 * width + 2 * (4 * width + mlp) + 4 * heads)):
        loops = bytes_of_loops(program, 3, remat)
        assert loops.stored == 3 * 16 * (of_token + 16)
        kernels = 4 * width * width + 2 * width * mlp
        vectors = 2 * (3 * width + width + mlp + width) + 4 * 4 * width  # biases, and norms in fp32
        assert loops.gradient == 3 * (2 * kernels // 2 + vectors)  # each of two devices has half of the rows
        assert 0 <= loops.weights - loops.gradient < 100  # and the steps' numbers and sizes


@pytest.mark.parametrize("remat, solver, states", [("binomial", "euler", 3), ("reversible", "reversible_euler", 2)])
def test_shapes_tell_how_many_states_the_way_back_needs(remat, solver, states):
    """Two snapshots and the state before the last step; or one pair. All in fp32."""
    config = toy_config(model__num_steps=12, model__remat=remat, model__snapshots=2, model__solver=solver)
    program = step.Program(config, ONE_DEVICE, (flash, ""))
    found = train_step_by_shapes(program)
    assert found["states"] == states * 4 * config.batch_size * config.sequence_length * config.model.width


@pytest.mark.parametrize(
    "changes, cast",
    [({"model__lora_rank": 2, "model__dtype": "bfloat16"}, 0), ({"model__dtype": "bfloat16"}, 2), ({}, 0)],
)
def test_weights_that_are_read_where_they_lie_count_once(changes, cast):
    """Frozen kernels beside adapters, and weights of layers in float32. Other weights are cast before the loops."""
    config = toy_config("discretized", base="a run", model__vocab_multiple=16, **changes)
    program = step.Program(config, make_mesh((1, 2, 1), jax.devices()[:2]), (flash, ""))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state_shapes["params"]["depth"])) / 2
    assert abs(train_step_by_shapes(program)["weights"] - cast * parameters) < 0.4 * parameters


def on_a_gpu(config) -> tuple[str, dict[str, int]]:
    """The attention of a run on one H100, and the bytes of its train step by cause."""
    program = step.Program(config, ONE_DEVICE, attention_on(GPUS["h100"], config))
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


def test_the_fewest_microbatches_that_fit_are_taken_where_their_number_is_open():
    """They divide a device's examples. If none fit, there is one example at a time; if the memory isn't known, one."""
    open_program, *programs = (
        step.Program(toy_config("gpt", batch_size=16, microbatches=number), make_mesh((8, 1, 1))) for number in range(3)
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
