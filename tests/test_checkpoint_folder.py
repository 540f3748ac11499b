"""Which checkpoints of a run are kept, and which one a command opens."""

import shutil
from unittest import mock

import jax.numpy as jnp
import pytest

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints import folder as checkpoint_folder
from diffeqformer.errors import UserError
from helpers import drawn, save_params, toy_config

pytestmark = pytest.mark.fast


def save(folder, losses: dict[int, float | None], kept: int) -> None:
    """Save a checkpoint at each of the steps, some with a validation."""
    about = checkpoint.About(toy_config("gpt").to_dict(), "bytes")
    with checkpoint.open_to_write(folder, kept) as checkpoints:
        for step, loss in losses.items():
            validation = None if loss is None else {"loss": loss}
            checkpoint.save(checkpoints, step, {"params": {"w": jnp.full(2, step)}}, about, validation)


def names(folder) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def opened(folder, step) -> int:
    return checkpoint.open_to_read(folder, step=step).step


def test_the_best_validation_is_kept_beside_the_newest_also_after_a_restart(tmp_path):
    save(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: None}, kept=1)
    assert names(tmp_path) == {"2", "4"}
    save(tmp_path, {5: 1.5, 6: None}, kept=2)
    assert names(tmp_path) == {"2", "5", "6"}
    assert [opened(tmp_path, step) for step in ("best", None, 5)] == [2, 6, 5]
    save(tmp_path, {7: 1.0}, kept=1)  # of equal ones, the newest
    assert names(tmp_path) == {"7"} and opened(tmp_path, "best") == 7


def test_a_reader_beside_a_training_tries_the_newest_checkpoint_once_more(tmp_path, monkeypatch):
    config, read = toy_config("gpt"), []
    params = drawn(config.model)[1]
    save_params(tmp_path, config, {1: params})
    load = checkpoint.ocp.load

    def load_or_lose(path, *given, **named):
        read.append(path.name)
        if path.name == "1":
            shutil.rmtree(path)
            save_params(tmp_path, config, {2: params})
        return load(path, *given, **named)

    monkeypatch.setattr(checkpoint.ocp, "load", load_or_lose)
    assert checkpoint.load(tmp_path).step == 2 and read == ["1", "2"]
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "params")
    with pytest.raises(checkpoint_folder.Damaged, match="/2: this checkpoint can't be read: "):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"perplexity": 1.0}', '{"loss": 1.0, "sha256": "0"}'])
def test_a_damaged_validation_is_named_and_set_aside(tmp_path, content, capsys):
    save(tmp_path, {1: 1.0, 2: 2.0, 3: None}, kept=3)
    folder = checkpoint_folder.folder_of(tmp_path)
    file = folder / "1" / "metrics" / "metrics"
    file.write_text(content)
    said = "1/metrics/metrics: this validation is damaged: .*; restore it, or"
    with pytest.raises(checkpoint_folder.Damaged, match=said):
        opened(tmp_path, "best")
    assert opened(tmp_path, None) == 3  # which doesn't need it
    checkpoint_folder.set_validations_aside(folder)
    assert f"it is now {tmp_path}/damaged/1-metrics, and its checkpoint counts as not" in capsys.readouterr().out
    assert opened(tmp_path, "best") == 2 and opened(tmp_path, 1) == 1
    save(tmp_path, {4: None}, kept=1)
    assert names(tmp_path) == {"2", "4"}


def test_a_validation_that_cannot_be_reached_is_not_set_aside(tmp_path, monkeypatch):
    """Cloud clients raise many kinds of errors, some of which a damaged file would cause, too."""
    save(tmp_path, {1: 1.0}, kept=1)
    fails = mock.Mock(side_effect=ValueError("Bad Request"))
    monkeypatch.setattr(type(checkpoint_folder.folder_of(tmp_path)), "read_bytes", fails)
    with pytest.raises(UserError, match="1/metrics/metrics: this file can't be read: .*; check that it can be reached"):
        checkpoint_folder.set_validations_aside(checkpoint_folder.folder_of(tmp_path))
    assert not (tmp_path / "damaged").exists()
