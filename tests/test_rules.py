"""Rules of a config that neither types nor other rules stand in for."""

import pytest

from diffeqformer.config import check_config
from diffeqformer.errors import UserError
from diffeqformer.parallel.fit import check_tiles
from diffeqformer.transformer import vector_field
from helpers import toy_config

TENSOR = {"mesh__tensor": 4, "model__vocab_multiple": 16}


@pytest.mark.parametrize(
    "kind, changes, sentence",
    [
        ("gpt", {"batch_size": 0}, "batch_size: must be at least 1"),
        ("gpt", {"model__heads": 0}, "model.heads: must be at least 1"),
        ("gpt", {"sequence_length": 1}, "sequence_length: must be at least 2"),
        ("gpt", {"model__span": 1.0}, "model.span: must be 0 for model.kind gpt, all of whose steps have the length 1"),
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


def test_on_tpus_rows_are_cut_into_whole_tiles_by_the_axes_that_cut_them():
    def check(width=64, heads=4, **axes):
        field = vector_field(toy_config(model__width=width, model__heads=heads, model__mlp=128).model)
        check_tiles(field, 8, **axes, vocabulary=512, positions=100, tiled=True)

    check(fsdp=1, tensor=4)  # which doesn't cut positions
    with pytest.raises(UserError, match=r"^config.mesh.fsdp: must cut config.model.max_length \(100\) .* as 1 would"):
        check(fsdp=2, tensor=2)
    with pytest.raises(
        UserError, match="^config.mesh.tensor: must cut the heads' width of a device .* as 1, 2, 4 would"
    ):
        check(fsdp=1, tensor=8)
    with pytest.raises(UserError, match=r"fsdp: must cut config.model.width .* tiles \(16 rows\), but it is 2$"):
        check(width=24, heads=2, fsdp=2, tensor=2)
