"""The cycles that the TPU compiler expects are counted for every time that an instruction runs."""

import sys

from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import cycles  # noqa: E402

TEXT = """HloModule jit__train_step

FileNames
1 "/home/me/diffeqformer/training/step.py"
2 "/home/me/diffeqformer/fields/layers.py"
3 "/usr/lib/site-packages/optax/transform.py"

FunctionNames
1 "Program._train_step"
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

%body (a: s32[]) -> s32[] {
  %mask = f32[8] fusion(), metadata={stack_frame_id=2}, backend_config={"estimated_cycles":"10"}
  %fused = f32[8] fusion(%mask), calls=%product, metadata={op_name="a/transpose(jvp())/dot" stack_frame_id=4}, backend_config={"estimated_cycles":"100"}
}

ENTRY %main (a: s32[]) -> s32[] {
  %first = f32[8] fusion(), calls=%product, metadata={op_name="a/jvp()/dot" stack_frame_id=4}, backend_config={"estimated_cycles":"7"}
  %loop = s32[] while(%a), condition=%small, body=%body
  %start = f32[8] copy-start(%a), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"5"}
  %end = f32[8] copy-done(%start), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"5"}
  %rest = f32[8] fusion(), backend_config={"estimated_cycles":"3"}
  %copy = f32[8] copy(%kernel), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={stack_frame_id=4}, backend_config={"estimated_cycles":"40"}
  %kernel = f32[8] custom-call(%a), metadata={stack_frame_id=3}, backend_config={"custom_call_config":{"body":"T","cost_estimate":{"flops":"9","bytes_accessed":"8200000","transcendentals":"0"}}}
}
"""  # noqa: E501


def test_cycles_are_counted_by_cause():
    assert cycles.by_cause(TEXT, "v5e") == {
        "dropout": 360,
        "matrix products, backward": 3600,
        "matrix products, forward": 7,
        "update": 15_005,
        "everything else": 43,
    }
