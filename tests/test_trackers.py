"""Where curves go, with stand-ins for the services; with the services' own packages in `make test-extras`."""

import importlib.util
import json
import shutil
import struct
import threading
from unittest import mock

import numpy as np
import pytest

from diffeqformer.config_fields import TRACKERS
from diffeqformer.errors import Stopped, UserError
from diffeqformer.training import hooks, loop, trackers
from diffeqformer.training.trackers import InThread, check_installed
from helpers import toy_config
from runs import curves

SCORES = {"loss": 1.5, "perplexity": 2.0, "bits_per_byte": 3.25}
OWN = {"train/tokens_per_second"}  # of a process: it isn't that of the step when it was repeated


class Listed:
    """A service that keeps what it is given."""

    runs = {}

    def __init__(self, workdir, run_id):
        self.values, self.run = self.runs.setdefault(run_id, []), mock.Mock()
        self.shown = {"text": str, "picture": np.shape}

    def config(self, fields):
        self.values.append(("config", fields))

    def log(self, step, values):
        self.values += [(step, name, value) for name, value in values.items()]


class Failing(Listed):
    """A service that is no longer there at the second step."""

    def log(self, step, values):
        if step == 2:
            raise OSError("no network")


class Hanging(Listed):
    """A service that doesn't answer, until it says so."""

    ends = threading.Event()

    def log(self, step, values):
        self.ends.wait()
        raise OSError("no answer")


@pytest.fixture
def service(monkeypatch):
    """A function that puts a class in the place of a service."""
    monkeypatch.setattr(Listed, "runs", {})
    return lambda stand_in: monkeypatch.setitem(trackers.SERVICES, "wandb", stand_in)


def test_a_resumed_run_goes_on_and_repeats_nothing_and_another_start_is_another_run(service, tmp_path):
    service(Listed)
    for first, last, resumes in ((0, 3, False), (2, 4, True), (0, 1, False)):
        tracker = InThread("wandb", tmp_path, resumes)
        tracker.config({"first": first})
        if resumes:
            tracker.scalars(first, "validation", {"loss": 0.5})  # left over
        for step in range(first + 1, last + 1):
            tracker.scalars(step, "train", {"loss": step + first / 10})
        tracker.text(3, "words", "*some*")
        tracker.picture(4, "pixels", np.zeros((4, 5, 3), np.uint8))
        tracker.finish()
    ours, other = Listed.runs.values()
    assert [value for value in ours if value[0] != "config"] == [
        *((step, "train/loss", step) for step in (1, 2, 3)), (3, "words", "*some*"), (4, "pixels", (4, 5, 3)),
        (2, "validation/loss", 0.5), (4, "train/loss", 4.2),
    ]  # fmt: skip
    assert other[:2] == [("config", {"first": 0}), (1, "train/loss", 1)]
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"] == list(Listed.runs)[-1]


def test_a_service_that_fails_is_said_once_and_the_run_goes_on(
    service, short_stores, tmp_path, monkeypatch, one_device_loop, capsys
):
    service(Failing)
    monkeypatch.setattr(loop, "check_installed", lambda _: None)
    monkeypatch.setattr(hooks, "validate", lambda *_: dict(SCORES))
    loop.train(toy_config("gpt", steps=4, tracker="wandb,tensorboard", data__dir=str(short_stores)), tmp_path)
    printed = capsys.readouterr()
    assert printed.err == "wandb: no network; the run continues without it\n" and "step 4/4" in printed.out
    assert curves(tmp_path)["train/loss"].keys() == {1, 2, 3, 4}


def test_a_service_that_does_not_answer_delays_nothing(service, tmp_path, monkeypatch, capsys):
    service(Hanging)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    tracker = InThread("wandb", tmp_path, resumes=False)
    tracker.scalars(1, "train", {"loss": 1.0})
    tracker.finish()
    Hanging.ends.set()
    tracker.thread.join()
    assert capsys.readouterr().err == "wandb: it didn't finish within 0.1 s; the run continues without it\n"


def test_a_missing_package_is_said_before_anything_is_done(tmp_path, monkeypatch):
    assert {*trackers.SERVICES, "tensorboard"} == {*TRACKERS}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in trackers.SERVICES:
        sentence = rf"^config\.tracker: {name} isn't installed; pip install 'diffeqformer\[{name}\]' installs it$"
        with pytest.raises(UserError, match=sentence):
            loop.train(toy_config(tracker=f"tensorboard,{name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    (tmp_path / "files_of_it").mkdir()  # as those of wandb, where Python looks for packages
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(trackers.SERVICES, "files_of_it", Listed)
    with pytest.raises(UserError, match="files_of_it isn't installed"):
        check_installed("files_of_it")
    check_installed("tensorboard")


def wandb_rows(folder) -> list[dict]:
    """All that the files of W&B have, as LevelDB's log of its own records, and the ids of their runs."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, part = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # the rest of a block
                at += 32768 - at % 32768
            _, length, kind = struct.unpack_from("<IHB", data, at)
            part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, part = Record.FromString(part), b""
                if record.HasField("run"):
                    config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                    rows.append({"run": record.run.run_id, **config})
                if record.HasField("config"):
                    rows.append({item.key: json.loads(item.value_json) for item in record.config.update})
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def trackio_rows(_) -> list[dict]:
    """All that Trackio has of the only run."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = trackio.Api().runs("diffeqformer")
    return [{"run": run.name, **run.config}, *SQLiteStorage.get_logs("diffeqformer", run.name)]


@pytest.mark.extras
@pytest.mark.parametrize("name, rows_of", [("wandb", wandb_rows), ("trackio", trackio_rows)])
def test_a_service_has_what_tensorboard_has(
    name, rows_of, short_stores, tmp_path, monkeypatch, one_device_loop, capsys
):
    """After three steps, a start from the checkpoint before the last, and one more step; at two depths."""
    for variable, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", tmp_path), ("TRACKIO_DIR", tmp_path)):
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(hooks, "validate", lambda *_: dict(SCORES))
    folder, told = tmp_path / "run", iter([False, False, True])
    options = {"tracker": f"{name},tensorboard", "data__dir": str(short_stores), "model__training_depths": "1,6"}
    config = toy_config(steps=4, eval_every=2, checkpoint_every=2, **options)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved at step 3"):
        patch.setattr(loop.hosts.Notice, "now", lambda *_: next(told))
        loop.train(config, folder)
    shutil.rmtree(folder / "checkpoints" / "3")
    loop.train(config, folder)
    assert "continues without" not in capsys.readouterr().err

    rows, run_id = rows_of(tmp_path), json.loads((folder / "trackers" / f"{name}.json").read_text())["id"]
    assert {row["run"].removeprefix("run-") for row in rows if "run" in row} == {run_id}
    assert any(row.get("model.kind") == "diffeqformer" for row in rows)
    points = [(row["step"], tag, value) for row in rows if "step" in row for tag, value in row.items()]
    for tag, series in curves(folder).items():
        found = [(step, np.float32(value)) for step, other, value in points if other == tag]
        assert tag in OWN or found == [(step, np.float32(value)) for step, value in series.items()], tag
    assert {step for step, tag, _ in points if tag == "parameters"} == {0, 2}
    assert {step for step, tag, _ in points if tag.startswith("bits_per_byte_by_depth")} == {2, 4}
    assert len(list(tmp_path.rglob("*.png"))) == 2
