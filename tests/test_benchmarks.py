"""What measures speed and memory runs, here with models so small that the figures mean nothing."""

import os
import re
import subprocess
import sys

import pytest

from flags import FAST_COMPILATION
from helpers import ROOT

pytestmark = pytest.mark.slow
MODEL = "--models=gpt:diffeqformer --width=32 --heads=2 --num_steps=2 --time_embed_dim=4 --sinusoidal_dim=4"
ONCE = "--rounds=1 --calls=1"


@pytest.mark.parametrize(
    "script, options",
    [
        ("train_step", f"{MODEL} {ONCE} --sequence_length=16"),
        ("accumulation", f"{MODEL} {ONCE} --sequence_length=16 --microbatches=1,2"),
        ("generation", f"{MODEL} {ONCE} --prompt_length=8 --tokens=4"),
        ("embedding", f"--width=32 --heads=2 --num_steps=2 {ONCE} --embed_dim=4 --output=sizes"),
        ("loader", "--gigabytes=0.001 --batches=2 --batch_size=8 --folder=."),
        ("sensitivity", "--tokens=2 --steps=1 --nototal"),
    ],
)
def test_a_benchmark_prints_figures(script, options, tmp_path):
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "benchmarks" / f"{script}.py", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d", done.stdout)


def test_forms_of_the_recipes_study_are_timed(script):
    recipe = script("recipe")
    for form in ("llama's block, published", "llama's block, interpolated, muon"):
        assert recipe.Step(form).seconds() > 0 and recipe.Writing(form).seconds() > 0


def test_coordinates_are_drawn(script, tmp_path, monkeypatch):
    coordinates = script("coordinates", "--steps=2", f"--output={tmp_path}/coordinates.png")
    monkeypatch.setattr(coordinates, "SWEEPS", {"width": (32,), "num_steps": (2,)})
    coordinates.main(None)
    assert (tmp_path / "coordinates.png").stat().st_size > 10_000
