"""Damaged checkpoints are noticed, named and, in training, set aside."""

import json
import os
import pathlib
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from diffeqformer.checkpoints import checkpoint, checksums
from diffeqformer.checkpoints import folder as checkpoint_folder
from diffeqformer.console.progress import read_curves
from diffeqformer.data.store import sha256
from diffeqformer.errors import UserError
from diffeqformer.inspect import inspect_run
from diffeqformer.materialize import materialize
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training import loop
from diffeqformer.training.goodput import Stopwatch
from diffeqformer.training.hooks import Dispatched, Hooks
from diffeqformer.training.run import set_aside_if_damaged
from helpers import drawn, flip, save_params, toy_config

CHUNK = 13  # elements, so that small arrays are taken in many parts


def test_a_checksum_depends_on_all_bits_and_places_and_on_nothing_else(monkeypatch):
    random = np.random.RandomState(0)
    array = random.randn(8, 6, 16).astype(np.float32)
    expected = checksums.of_array(array)
    mesh = make_mesh((2, 2, 2))
    for spec in (PartitionSpec(), PartitionSpec("data", None, "fsdp"), PartitionSpec(("data", "fsdp"), "tensor")):
        monkeypatch.setattr(checksums, "SMALL", 0)  # by XLA
        sharded = jax.device_put(array, NamedSharding(mesh, spec))
        assert checksums.of_tree({"params": {"w": sharded}}) == {"params/w": expected}
    monkeypatch.setattr(checksums, "SMALL", CHUNK)
    assert checksums.of_array(array) == checksums.of_array(np.asfortranarray(array)) == expected

    seen = {expected}
    for number in range(64):
        changed, bit = array.copy(), number % 32
        changed.view(np.uint32)[tuple(random.randint(array.shape))] ^= np.uint32(1 << bit)
        seen.add(checksums.of_array(changed))
    swapped = array.copy()
    swapped[0, 0, :2] = array[0, 0, 1::-1]
    seen |= {checksums.of_array(other) for other in (swapped, array.reshape(8, 16, 6)[:, :, ::-1], -array, 0 * array)}
    assert len(seen) == 1 + 64 + 4


def test_a_checksum_has_one_value_for_each_type_wherever_it_is_computed(monkeypatch):
    arrays = {kind: jnp.arange(24, dtype=kind).reshape(4, 6) for kind in ("float32", "bfloat16", "int32", "uint8")}
    arrays |= {f"{kind} scalar": array[1, 1] for kind, array in arrays.items()}
    by_numpy = checksums.of_tree(arrays)
    monkeypatch.setattr(checksums, "SMALL", 0)
    assert checksums.of_tree(arrays) == by_numpy


@pytest.mark.long
def test_no_flipped_bit_and_no_cut_file_of_a_checkpoint_changes_anything_unnoticed(tmp_path):
    config = toy_config()
    state = {"params": drawn(config.model)[1], "step": jnp.int32(7)}
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256="hash")
    with checkpoint.open_to_write(tmp_path / "run", kept=1) as checkpoints:
        checkpoint.save(checkpoints, 7, state, about, {"loss": 1.25})
    shapes = jax.eval_shape(lambda: state)
    shapes = jax.tree.map(lambda x: x.update(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])), shapes)
    folder = checkpoint.folder_of(tmp_path / "run")
    files = [path for path in pathlib.Path(folder / "7").rglob("*") if path.is_file()]  # some have random names
    files.sort(key=lambda path: (str(path.parent), path.stat().st_size, path.name))
    sizes = np.array([path.stat().st_size for path in files], float)
    random, noticed = np.random.RandomState(0), 0
    chosen = [*range(len(files)), *random.choice(len(files), 24, p=sizes / sizes.sum())]
    for number, file in enumerate(files[index] for index in chosen if sizes[index]):
        whole = file.read_bytes()
        if number % 8 == 7:
            file.write_bytes(whole[: random.randint(len(whole))])
        else:
            flip(file, random.randint(len(whole)), random.randint(8))
        try:
            found = checkpoint.restore_state(folder, 7, shapes)
            said = checkpoint.read_about(folder, 7)
            best = checkpoint.chosen_step(folder, "best", tmp_path)
        except UserError as error:
            assert "7" in str(error) and ("can't be read" in str(error) or "damaged" in str(error)), error
            noticed += 1
        else:
            jax.tree.map(lambda *both: np.testing.assert_array_equal(*both, str(file)), found, state)
            assert (said.config, said.data_sha256, best) == (about.config, "hash", 7)
        file.write_bytes(whole)
    assert noticed > 24


def hurt_arrays(checkpoint_folder: pathlib.Path) -> None:
    """Flip a bit in the middle of the largest file of each item with arrays."""
    for item in ("params", "optimizer"):
        files = [path for path in (checkpoint_folder / item).rglob("*") if path.is_file()]
        if files:
            largest = max(files, key=lambda path: path.stat().st_size)
            flip(largest, largest.stat().st_size // 2, 3)


@pytest.mark.long
def test_training_sets_damaged_checkpoints_aside_and_goes_on_from_the_one_before(
    tmp_path, short_stores, one_device_loop, capsys
):
    changes = {"checkpoint_every": 2, "checkpoints_kept": 3, "eval_every": 3, "data__dir": str(short_stores)}
    alone, hurt = tmp_path / "alone", tmp_path / "hurt"
    expected = loop.train(toy_config("gpt", **changes), alone)
    shutil.copytree(alone, hurt)
    hurt_arrays(hurt / "checkpoints" / "6")  # an array
    [record] = (hurt / "checkpoints" / "4" / "about").glob("data.json")
    record.write_text(record.read_text().replace('"steps": 6', '"steps": 7'))
    said = "hurt/checkpoints/6: this checkpoint can't be read: .*; restore its files"
    with pytest.raises(UserError, match=f"{said}, or choose another checkpoint$"):
        checkpoint.load(hurt)
    with pytest.raises(UserError, match=f"{said} or, if a running training has replaced it, start again$"):
        inspect_run(hurt)
    assert not (hurt / "damaged").exists()
    assert checkpoint.load(hurt, step=2).step == checkpoint.load_on_all(hurt, step=2).step == 2

    (hurt / "checkpoints" / "6" / "metrics" / "metrics").write_text("{")
    capsys.readouterr()
    model = loop.train(toy_config("gpt", **changes), hurt)
    printed = capsys.readouterr().out
    assert "6/metrics/metrics: this validation is damaged: " in printed
    assert f"; it is now {hurt}/damaged/6-metrics, and its checkpoint counts as not validated\n" in printed
    for step, before in ((6, "can't be read: "), (4, "its content isn't what was saved, by its SHA-256")):
        assert f"hurt/checkpoints/{step}: this checkpoint can't be read: " in printed and before in printed
        assert f"it is now {hurt}/damaged/{step}, and the one before it is taken\n" in printed
        assert (hurt / "damaged" / str(step) / "params").is_dir()
    assert f"Resuming {hurt} from its checkpoint at step 2\n" in printed
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(expected))
    assert checkpoint.load(hurt).step == 6
    ours, theirs = read_curves(hurt), read_curves(alone)
    assert {tag for tag in theirs if ours[tag] != theirs[tag]} <= {"train/tokens_per_second"}

    for step in (2, 4, 6):
        hurt_arrays(hurt / "checkpoints" / str(step))
    with pytest.raises(UserError, match="hurt/checkpoints/2: .*; restore its files, or choose another checkpoint$"):
        loop.train(toy_config("gpt", **changes), hurt)
    assert {path.name for path in (hurt / "damaged").iterdir()} == {"6-metrics", "4", "6", "4-2", "6-2"}


@pytest.fixture
def checkpoints(tmp_path) -> epath.Path:
    """The folder of the checkpoints 1 and 2 of a small state."""
    state = {"params": {"w": jnp.arange(5000.0)}, "optimizer": (jnp.ones(5000), {"m": jnp.ones(3)})}
    with checkpoint.open_to_write(tmp_path, kept=2) as checkpoints:
        for step in (1, 2):
            about = checkpoint.About(toy_config("gpt").to_dict(), "bytes", data_sha256=str(step))
            checkpoint.save(checkpoints, step, {**state, "step": jnp.int32(step)}, about)
    return checkpoints.directory


@pytest.mark.parametrize("item", ["params", "optimizer"])
def test_only_damaged_bytes_with_a_checkpoint_before_them_are_set_aside(item, checkpoints, monkeypatch):
    """Not what may pass, nor what another structure or the end of another process made fail."""
    with pytest.raises(checkpoint_folder.Damaged):
        checkpoint.restore_state(checkpoints, 2, {"params": {"other": None}, "step": None})
    assert set_aside_if_damaged(checkpoints, 2) is None
    for error in (OSError(24, "Too many open files"), ValueError("DEADLINE_EXCEEDED: the bucket didn't answer")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "open_arrays", mock.Mock(side_effect=error))
            assert set_aside_if_damaged(checkpoints, 2) is None
    for step, aside in ((1, False), (2, True)):
        for path in pathlib.Path(checkpoints / str(step) / item / "d").iterdir():
            os.truncate(path, path.stat().st_size // 2)
        said, folder = set_aside_if_damaged(checkpoints, step), checkpoints.parent / "damaged" / str(step)
        assert folder.is_dir() == aside and (said is None or said.endswith(f"; it is now {folder}"))


@pytest.mark.parametrize(
    "error, damaged",
    [
        (KeyboardInterrupt(), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (OSError(5, "Input/output error"), True),
        (ValueError("RESOURCE_EXHAUSTED: opening \"0\": Too many open files [os_error_code='24']"), True),
    ],
)
def test_what_orbax_hides_is_no_damage_if_memory_or_the_user_ended_it(error, damaged, checkpoints, monkeypatch):
    monkeypatch.setattr(checkpoint.ocp.handlers.PyTreeHandler, "_background_load", mock.Mock(side_effect=error))
    with pytest.raises(checkpoint_folder.Damaged if damaged else type(error)) as found:
        checkpoint.restore_state(checkpoints, 1, {"params": {"w": None}, "optimizer": None, "step": None})
    assert not damaged or checkpoint_folder.may_pass(found.value.__cause__)
    assert not damaged or str(found.value).endswith("; see that it can be read, and start again")


def test_a_damaged_record_is_passed_over(checkpoints, monkeypatch):
    records = [checkpoints / str(step) / "about" / "data.json" for step in (1, 2)]
    records[1].write_text("{")
    assert checkpoint.newest_readable(checkpoints.parent)[0].data_sha256 == "1"
    with monkeypatch.context() as patch, pytest.raises(checkpoint_folder.Damaged, match="checkpoints/2: "):
        patch.setattr(checkpoint, "read_json", mock.Mock(side_effect=OSError(5, "Input/output error")))
        checkpoint.newest_readable(checkpoints.parent)
    records[0].write_text("{")
    with pytest.raises(checkpoint_folder.Damaged, match="checkpoints/1: "):
        checkpoint.newest_readable(checkpoints.parent)


def test_a_materialized_model_has_checksums_and_is_not_made_from_a_damaged_run(tmp_path):
    config = toy_config()
    save_params(tmp_path / "run", config, {1: drawn(config.model)[1]})
    made = pathlib.Path(materialize(tmp_path / "run", dtype="bfloat16"))
    recorded = checkpoint.load(made).about.checksums
    assert len(recorded) == len(inspect_run(made)["parameters"])
    for folder in (made, tmp_path / "run"):
        hurt_arrays(folder / "checkpoints" / "1")
        with pytest.raises(UserError, match="checkpoints/1: this checkpoint can't be read: "):
            checkpoint.load(folder)
    with pytest.raises(UserError, match="checkpoints/1: this checkpoint can't be read: "):
        materialize(tmp_path / "run", output=tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_a_run_checks_its_token_store_before_it_saves_anything(tmp_path, short_stores, one_device_loop, capsys):
    stores, name = tmp_path / "stores", "python_stdlib-bytes"
    shutil.copytree(short_stores, stores)
    config = toy_config("gpt", data__dir=str(stores), checkpoint_every=1)
    [shard] = (stores / name).glob("train-*.bin")
    flip(shard, 5000, 0)  # another letter
    with pytest.raises(UserError, match=f"{shard}: its content isn't what was written, by its SHA-256; delete the"):
        loop.train(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    loop.train(config, tmp_path / "unchecked", verify=False)
    assert "sha256 6bd487d4ac90 by its record, not checked\n" in capsys.readouterr().out

    record = json.loads((stores / name / "store.json").read_text())  # of a foreign store, whose hashes are right
    ids = np.fromfile(shard, "<u2")
    ids[2500] = 300
    ids.tofile(shard)
    record["splits"]["train"]["sha256"] = record["splits"]["train"]["shards"][0]["sha256"] = sha256(shard)
    (stores / name / "store.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"{shard}: it holds the id 300, but the tokenizer's ids are below 257; delete"):
        loop.train(config, tmp_path / "run")


def test_a_save_follows_the_check_of_the_store_and_the_curves_unless_the_run_is_to_stop(monkeypatch):
    done, hooks = [], mock.Mock(clock=Stopwatch(0.0))
    hooks.run.about = checkpoint.About({}, "bytes")
    hooks.run.check_store.side_effect = lambda wait: done.append("check") if wait else None
    hooks.run.config.eval_every, hooks.run.program.loss.trained_and_frozen.return_value = 1, ({}, {})
    hooks.progress.flush.side_effect = lambda: done.append("curves")
    monkeypatch.setattr(checkpoint, "save", lambda *_: done.append("state"))
    for stops, expected in ((True, ["curves", "state"]), (False, ["check", "curves", "state"])):
        Hooks.save(hooks, Dispatched(1, {"params": {}}, {}, 4, validates=False, saves=True, stops=stops))
        assert done == expected
        done.clear()
