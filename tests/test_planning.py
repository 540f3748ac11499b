"""Plans are read from what the TPU compiler dumps, counting every time that an instruction runs."""

import jax
import pytest

from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.planning.chips import TPUS, chip_of
from diffeqformer.planning.estimate import Planned, plan_of, speed_of, summary
from diffeqformer.planning.hlo import Module
from diffeqformer.planning.programs import computed_again, needed_bytes, size_of_temporaries, tpu_devices
from diffeqformer.planning.times import seconds_by_cause
from diffeqformer.solvers.checkpointing import fewest_advances
from diffeqformer.training import step
from helpers import ONE_DEVICE, change, toy_config

TEXT = """HloModule jit_train_step

FileNames
1 "/home/me/diffeqformer/training/step.py"
2 "/home/me/diffeqformer/fields/layers.py"
3 "/usr/lib/site-packages/optax/transform.py"

FunctionNames
1 "make_train_step.<locals>.train_step"
2 "dropout.<locals>.<lambda>"
3 "update"
4 "linear"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=4}
2 {file_name_id=2 function_name_id=2 line=8 end_line=8 column=4 end_column=4}
3 {file_name_id=3 function_name_id=3 line=7 end_line=7 column=4 end_column=4}
4 {file_name_id=2 function_name_id=4 line=6 end_line=6 column=4 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=4 parent_frame_id=2}

%product (a: f32[8]) -> f32[8] {
  %inner = f32[8] convolution(%a, %a), metadata={stack_frame_id=4}, backend_config={"estimated_cycles":"999"}
}

%small (a: s32[]) -> pred[] {
  %limit = s32[] constant(36)
}

%computed (a: s32[]) -> pred[] {
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%again (a: s32[]) -> s32[] {
  %add = s32[] add(%a, %a), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"100"}
}

%body (a: s32[]) -> s32[] {
  %mask = f32[8] fusion(), metadata={stack_frame_id=2}, backend_config={"estimated_cycles":"10"}
  %fused = f32[8] fusion(%mask, %a), calls=%product, metadata={op_name="a/transpose(jvp())/dot" stack_frame_id=4}, \
backend_config={"estimated_cycles":"100"}
}

ENTRY %main (a: s32[]) -> s32[] {
  %first = f32[8] fusion(), calls=%product, metadata={op_name="a/jvp()/dot" stack_frame_id=4}, \
backend_config={"estimated_cycles":"7"}
  %loop = s32[] while(%a), condition=%small, body=%body
  %varying = s32[] while(%a), condition=%computed, body=%again
  %start = f32[8] copy-start(%a), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"5"}
  %end = f32[8] copy-done(%start), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"5"}
  %rest = f32[8] fusion(), backend_config={"estimated_cycles":"3"}
  %copy = f32[8] copy(%kernel), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={stack_frame_id=4}, backend_config={"estimated_cycles":"40"}
  %kernel = f32[8] custom-call(%a), metadata={stack_frame_id=3}, \
backend_config={"custom_call_config":{"body":"T",\
"cost_estimate":{"flops":"9","bytes_accessed":"8200000","transcendentals":"0"}}}
}
"""

CYCLE = 1 / 1.5e9  # seconds on v5e


def test_cycles_are_counted_by_cause():
    """Loops whose conditions hold no number, as binomial checkpointing has them, run 2.5 times on average."""
    found = seconds_by_cause(Module(TEXT, 2.5), TPUS["v5e"], slice_size=1)
    assert found == pytest.approx(
        {
            "dropout": 360 * CYCLE,
            "depth backward, products": 3600 * CYCLE,
            "depth forward, products": 7 * CYCLE,
            "update": 255 * CYCLE + 8_200_000 / 820e9,
            "depth forward, rest": 43 * CYCLE,
        }
    )


COLLECTIVES = """HloModule jit_train_step

%gathering (a: bf16[2,128]) -> bf16[8,128] {
  %inner = bf16[8,128] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %begin = bf16[8,128] custom-call(%inner), custom_call_target="AsyncCollectiveStart"
}

%gathered (a: bf16[2,128]) -> bf16[8,128] {
  %inner.2 = bf16[8,128] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %end = bf16[8,128] custom-call(%inner.2), custom_call_target="AsyncCollectiveDone"
}

%async_collective_fusion.1 (a: bf16[2,128]) -> bf16[8,128] {
  %inner.3 = bf16[8,128] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%all-reduce-scatter.1 (a: bf16[8,128]) -> bf16[2,128] {
  %inner.4 = bf16[8,128] all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}
}

ENTRY %main (a: bf16[2,128]) -> bf16[8,128] {
  %async-collective-start.7 = (bf16[2,128], bf16[8,128]) fusion(%a), calls=%gathering
  %work = bf16[8,128] fusion(%b), calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"30"}
  %async-collective-done.7 = bf16[8,128] fusion(%b), calls=%gathered
HERE
}
"""
LINE = 3 / 4 * 8 * 128 * 2 / 50e9  # seconds for 8 x 128 bf16 entries, of which each of four chips has a part


@pytest.mark.parametrize(
    "instruction, seconds",
    [
        ("%whole = bf16[8,128] all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}", LINE),
        ("%sums = bf16[2,128] reduce-scatter(%a), replica_groups=[2,4]<=[8]", LINE),
        ("%sums = bf16[2,128] reduce-scatter(%a), replica_groups=mesh['x'=2,'y'=4,'z'=1] {'y'}, dimensions={0}", LINE),
        ("%sums = bf16[2,128] reduce-scatter(%a), replica_groups=mesh['x'=4,'y'=4] {'x':(1)2,'y':(2)2}", LINE),
        ("%sums = bf16[2,128] fusion(%a), calls=%all-reduce-scatter.1", LINE),
        ("%sums = (bf16[4,128], bf16[4,128]) all-reduce(%a, %b), replica_groups={{0,1,2,3},{4,5,6,7}}", 2 * LINE),
    ],
)
def test_collectives_take_their_bytes_at_the_rate_of_a_link_unless_they_are_hidden(instruction, seconds):
    text = COLLECTIVES.replace("HERE", f"  {instruction}")
    found = seconds_by_cause(Module(text), TPUS["v5e"], slice_size=4)
    assert found == pytest.approx({"depth forward, rest": 30 * CYCLE, "collectives": LINE - 30 * CYCLE + seconds})


def test_slices_exchange_their_parts_one_after_another_while_they_work():
    """The instructions are the compiler's for two slices, shortened."""
    attributes = 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"'
    lines = ["ENTRY %main (a: f32[2]) -> f32[2] {"]
    for number, size in ((1, 128), (2, 512)):
        of = f'{attributes},_xla_host_transfer_rendezvous="psum.{number}_0",_xla_megascale_target="{{1,2}}x{{0:7}}"'
        results = f"(f32[{size},8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[])"
        lines += [f"  %send.{number} = {results} send(%bitcast.{number}, %after-all.{number}), {of}}}"]
        lines += [f"  %recv.{number} = {results} recv(%after-all.{number}), {of}}}"]
    lines += ['  %work = f32[8] fusion(%b), calls=%fused, backend_config={"estimated_cycles":"150000"}']
    for number in (1, 2):
        lines += [f"  %send-done.{number} = token[] send-done(%send.{number}), {attributes}}}"]
        lines += [f"  %recv-done.{number} = (f32[8]{{0}}, token[]) recv-done(%recv.{number}), {attributes}}}"]
    found = seconds_by_cause(Module("\n".join([*lines, "}"])), TPUS["v5e"], slice_size=8)
    work = 150_000 * CYCLE
    assert found == pytest.approx({"depth forward, rest": work, "collectives": 640 * 8 * 128 * 4 / 3.125e9 - work})


@pytest.mark.parametrize("query, copies", [("bf16[8,12,64,1024]", 8 * 12), ("f32[12,64,1024]", 12 * 4)])
def test_splash_attention_takes_the_products_of_causal_pairs(query, copies):
    kernel = (
        "ENTRY %main (a: s8[1]) -> bf16[8] {\n"
        '  %splash_mha_dkv_no_residuals.7 = (bf16[8]) custom-call(%a), custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={s8[1,2,2]{2,1,0}, " + query + "{2,1,0}}\n}\n"
    )
    flops = 4 * 2 * copies * (1024**2 / 2) * 128  # four products; heads of 64 take as long as those of 128
    assert seconds_by_cause(Module(kernel), TPUS["v5e"], 1) == pytest.approx({"attention": flops / (0.45 * 197e12)})


def test_the_compiler_says_what_a_program_needs_that_does_not_fit():
    full = "RESOURCE_EXHAUSTED: "
    temporaries = f"{full}the total memory required for HLO temporaries (19.60T) exceeds"
    assert needed_bytes(temporaries) == round(19.6 * 2**40)
    assert needed_bytes(f"{full}Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm") == 17.25 * 2**30
    assert needed_bytes(f"{full}Ran out of memory in memory space vmem") is None


@pytest.mark.parametrize("page", ["", ", page 0"])  # which libtpu states since 0.0.50
def test_temporaries_are_those_of_the_main_memory(page):
    buffers = f"""BufferAssignment:
allocation 7: size 900000, parameter 0, shape |f32[9]| at ShapeIndex {{}}:
 value: <1 start @0> (size=900000,offset=0): f32[9]
allocation 9: size 500000{page}, preallocated-temp:
 value: <2 mask @0> (size=100000,offset=0): f32[8]
allocation 10: size 700000{page}, color 1, preallocated-temp:
 value: <7 rest @0> (size=700000,offset=0): f32[8]
"""
    assert size_of_temporaries(buffers) == 500_000
    with pytest.raises(ValueError, match="the compiler's allocations can't be read"):
        size_of_temporaries(buffers.replace(" size", " bytes"))


def test_a_program_that_the_compiler_refuses_fits_nowhere():
    """Its message rounds the bytes, which can make them those that there are."""
    config, chip = toy_config(), TPUS["v5e"]
    program = step.Program(config, ONE_DEVICE)
    for more, parts, fits in ((0, {}, False), (0, {"arrays": chip.memory}, True), (1, {"arrays": chip.memory}, False)):
        plan = plan_of(program, [Planned("train step", chip.memory + more, parts)], chip)
        assert plan["fits"] == fits
        assert summary(config, plan).startswith(f"It {'fits' if fits else 'does not fit'}: train step needs 15.75 of")


def test_plans_know_how_much_a_schedule_computes_again():
    """36 steps with 8 snapshots: 62 steps in all, of which 35 are the forward pass's. In chunks, chunks are counted."""
    config = toy_config(model__num_steps=36, model__remat="binomial")
    assert computed_again(config, 36) == pytest.approx((62 - 35) / 36)
    config.model.generate_chunk = 2
    assert computed_again(config, 36) == pytest.approx((fewest_advances(18, 8) - 17) / 18)
    assert computed_again(change(config, model__remat="step"), 36) == 0


def test_a_price_is_that_of_all_devices():
    config = toy_config(steps=3600)
    program = step.Program(config, make_mesh((2, 1, 1), jax.devices()[:2]))
    assert speed_of(config, program, {6: 2000.0}, price=1.5)["cost"] == 2 * 2 * 1.5


def test_chips_that_are_not_known_are_refused():
    with pytest.raises(UserError, match="^--topology: a slice of v5e has at most 256 chips, but v5e:16x32 has 512"):
        tpu_devices("v5e:16x32", slices=1)  # libtpu would end its process
    with pytest.raises(UserError, match="^--topology: must be a slice of v5e, .* but it is 'h100:0'"):
        chip_of("h100:0")
