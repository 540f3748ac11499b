"""Runs that other versions of the code or of JAX left half-trained are opened and go on (tests/data/make_runs.py)."""

import json
import pathlib
import re
import sys
import tarfile

import jax
import pytest

from diffeqformer.console.progress import read_curves
from diffeqformer.fields import layers
from diffeqformer.training import loop
from helpers import TEXTS, make_store

sys.path.insert(0, str(pathlib.Path(__file__).parent / "data"))
from make_runs import HERE, KINDS, SAVED, STEPS, config_of, digest  # noqa: E402

RUNS = [("runs", name) for name in KINDS]
RUNS += [(archive, name) for archive in ("runs-jax-0.10", "runs-jax-0.12") for name in ("diffeqformer", "lora")]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> pathlib.Path:
    """A folder with the contents of every archive, and the token store of its runs."""
    folder = tmp_path_factory.mktemp("unpacked")
    for archive in {archive for archive, _ in RUNS}:
        with tarfile.open(HERE / f"{archive}.tar.xz") as tar:
            tar.extractall(folder / archive, filter="data")
        store = folder / archive / "stores" / "python_stdlib-bytes"
        make_store(store, {"train": [TEXTS], "validation": [TEXTS[:9]]})
    return folder


def check_curves(name, expected) -> dict[str, dict[int, float]]:
    """A run's old log must be unchanged; new steps may be rounded differently on another machine."""
    curves = read_curves(name)
    for tag, group in (("train/loss", "train"), ("validation/loss", "validation")):
        for step, value in curves.get(tag, {}).items():
            assert value == pytest.approx(expected[group][str(step)], rel=1e-5 if step > SAVED else 1e-12)
    return curves


def jaxs_own_words(keys, shape) -> jax.Array:
    """What these versions drew masks from."""
    return jax.vmap(lambda key: jax.random.bits(key, shape))(keys)


@pytest.mark.parametrize("archive, name", RUNS)
def test_an_old_run_is_read_to_the_last_bit_and_goes_on_as_it_would_have_then(
    archive, name, unpacked, monkeypatch, one_device_loop, capsys
):
    monkeypatch.chdir(unpacked / archive)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # as on the machine on which they were made
    monkeypatch.setattr(layers, "random_words", jaxs_own_words)
    expected = json.loads(pathlib.Path("expected.json").read_text())[name]
    assert digest(name) == expected["saved"]
    assert max(check_curves(name, expected)["train/loss"]) == SAVED
    loop.train(config_of(name), name)
    since = f"step {SAVED}" if archive == "runs" else "the run began"  # the older version recorded no time
    assert re.search(rf"goodput: train steps took [\d.]+% of the [\d:]+ since {since}; ", capsys.readouterr().out)
    curves = check_curves(name, expected)
    assert {str(step) for step in curves["train/loss"]} == set(expected["train"])
    assert {str(step) for step in curves["validation/loss"]} == set(expected["validation"])
    assert max(curves["train/loss"]) == STEPS
