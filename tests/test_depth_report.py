"""The report of a model in many numbers of steps, beside other runs."""

import json
import math
import types

import jax
import pytest
from huggingface import write_run

from diffeqformer.checkpoints import checkpoint
from diffeqformer.depth_report import megabytes, report_depths
from diffeqformer.errors import UserError
from diffeqformer.materialize import materialize
from diffeqformer.transformer import split_model
from helpers import build_model

SCORED = {"shots": 0, "contexts": 9, "contexts_cut": 0, "unknown_tokens": 0, "altered_texts": 0}


@pytest.mark.parametrize("kind, field", [("diffeqformer", "llama"), ("shared", "gpt"), ("interpolated", "gpt")])
def test_weights_of_a_depth_are_those_of_a_model_with_weights_per_layer(kind, field):
    model = build_model(kind, field, vocab_size=257)
    for steps in (3, 8):
        alone = jax.tree.leaves(split_model(build_model("discretized", field, num_steps=steps, vocab_size=257))[1])
        assert megabytes(model, steps) == pytest.approx(4e-6 * sum(leaf.size for leaf in alone))


@pytest.mark.long
def test_the_report_has_a_row_for_each_depth_and_for_what_is_beside(tmp_path):
    write_run(tmp_path / "many", "llama", "llama", model__left_out="3,1", model__training_depths="4,6")
    materialize(tmp_path / "many", 4, "float32", tmp_path / "four")
    (tmp_path / "text.txt").write_text("a text of more than one window, scored in each number of steps. " * 9)
    found = {"workdir": str(tmp_path / "many"), "label": "many", "num_steps": 4, "shots": 0}
    found["checkpoint_step"] = checkpoint.open_to_read(tmp_path / "many").step
    found["tasks"] = {"piqa": {"acc,none": 0.625, "acc_stderr,none": 0.01, **SCORED}}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [found]}))
    paths = {"workdir": "many", "files": "text.txt", "downstream": "", "output": "report"}
    given = dict.fromkeys(("step", "task", "text_field", "separator", "remote", "module", "window"))
    given |= {name: str(tmp_path / path) for name, path in paths.items()} | {"beside": [str(tmp_path / "four")]}
    options = types.SimpleNamespace(split="validation", batch_size=4, num_steps=[], **given)
    rows = report_depths(options)
    assert json.loads((tmp_path / "report" / "results.json").read_text())["rows"] == rows
    assert [row["num_steps"] for row in rows] == [4, 6, 4]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[2]["bits_per_byte"], rel=1e-6)
    assert rows[0]["bits_per_byte"] != pytest.approx(rows[1]["bits_per_byte"], rel=1e-4)
    assert rows[0]["megabytes"] == rows[2]["megabytes"] < rows[1]["megabytes"]
    assert all(0 < row["milliseconds_per_token"] < math.inf for row in rows)
    assert [row["scores"] for row in rows] == [{"piqa, 0 shots": "62.50 (1.00)"}, {}, {}]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "62.50 (1.00)" in page and "data:image/png" in page
    assert (tmp_path / "report" / "depth.png").stat().st_size > 5000
    refused = (
        ({"downstream": str(tmp_path / "none")}, "--downstream: .*none has no results"),
        ({"num_steps": ["6"]}, "--downstream: .* has no results of these checkpoints in these numbers of steps$"),
        ({"num_steps": ["4", "7"]}, "num_steps: this model has weights for 4 to 6 steps, but it is 7"),
        ({"beside": ["none"]}, "none: there is no checkpoint here"),
    )
    for changes, sentence in refused:  # before anything is loaded
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=f"^{sentence}"):
            patch.setattr(checkpoint, "load", None)
            report_depths(types.SimpleNamespace(**{**vars(options), **changes, "output": str(tmp_path / "other")}))
    assert not (tmp_path / "other").exists()
