"""Rules of a config that neither types nor other rules stand in for."""

import pytest

from diffeqformer.config import check_config
from diffeqformer.errors import UserError
from helpers import toy_config

TENSOR = {"mesh__tensor": 4, "model__vocab_multiple": 16}


@pytest.mark.parametrize(
    "kind, changes, sentence",
    [
        ("gpt", {"batch_size": 0}, "batch_size: must be at least 1"),
        ("gpt", {"model__heads": 0}, "model.heads: must be at least 1"),
        ("gpt", {"sequence_length": 1}, "sequence_length: must be at least 2"),
        ("gpt", {"sample__length": 1}, "sample.length: must be at least 2"),
        ("gpt", {"model__unit_steps": False}, "model.unit_steps: must be True for model.kind gpt"),
        ("gpt", {"model__solver": "heun"}, "model.solver: must take weights once in each step, as model.kind gpt has"),
        ("gpt", {"model__training_times": "shifted"}, "model.training_times: must be fixed for model.kind gpt"),
        ("gpt", {"model__lora_rank": 2}, "model.lora_rank: must come with config.base"),
        (
            "gpt",
            {**TENSOR, "sequence_length": 14},
            r"mesh.tensor: must divide config.sequence_length \(14\), as 1, 2 do",
        ),
        ("gpt", {**TENSOR, "model__mlp": 66}, r"mesh.tensor: must divide config.model.mlp \(66\), as 1, 2 do"),
    ],
)
def test_a_config_is_refused(kind, changes, sentence):
    with pytest.raises(UserError, match=f"^config.{sentence}"):
        check_config(toy_config(kind, **changes), num_devices=8)
