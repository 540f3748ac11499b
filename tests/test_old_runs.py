"""Runs that an earlier version of the code left half-trained are opened and resumed (tests/data/make_runs.py)."""

import json
import pathlib
import re
import sys
import tarfile

import jax
import pytest

from diffeqformer.console.progress import read_curves
from diffeqformer.training import loop
from helpers import TEXTS, make_store

sys.path.insert(0, str(pathlib.Path(__file__).parent / "data"))
from make_runs import HERE, KINDS, SAVED, STEPS, config_of, digest  # noqa: E402


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """The folder in which the runs were made, without the copies that were trained to the end."""
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(HERE / "runs.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    make_store(folder / "stores" / "python_stdlib-bytes", {"train": [TEXTS], "validation": [TEXTS[:9]]})
    return folder


def check_curves(name, expected) -> dict[str, dict[int, float]]:
    """A run's old log must be unchanged; new steps may be rounded differently on another machine."""
    curves = read_curves(name)
    for tag, group in (("train/loss", "train"), ("validation/loss", "validation")):
        for step, value in curves.get(tag, {}).items():
            assert value == pytest.approx(expected[group][str(step)], rel=1e-5 if step > SAVED else 1e-12)
    return curves


@pytest.mark.parametrize("name", KINDS)
def test_an_old_run_is_read_to_the_last_bit_and_goes_on_as_it_would_have_then(
    name, runs, monkeypatch, one_device_loop, capsys
):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # as on the machine on which they were made
    monkeypatch.setattr(loop, "sample", lambda *_: "")
    expected = json.loads(pathlib.Path("expected.json").read_text())[name]
    assert digest(name) == expected["saved"]
    assert max(check_curves(name, expected)["train/loss"]) == SAVED
    loop.train(config_of(name), name)
    assert re.search(rf"goodput: train steps took [\d.]+% of the [\d:]+ since step {SAVED}; ", capsys.readouterr().out)
    curves = check_curves(name, expected)
    assert {str(step) for step in curves["train/loss"]} == set(expected["train"])
    assert {str(step) for step in curves["validation/loss"]} == set(expected["validation"])
    assert max(curves["train/loss"]) == STEPS
