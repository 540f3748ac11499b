"""benchmarks/on_gpu.sh, with a fake interpreter and driver: what it writes, and how it ends. What its tests name."""

import ast
import importlib
import os
import subprocess
import types

import pytest

from helpers import ROOT

PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then
  echo "${FOUND:-gpu 1} 0.10.2 NVIDIA Fake 80GB"
elif [[ $1 == --version ]]; then
  echo "Python 3.12.3"
else
  echo "on $CUDA_VISIBLE_DEVICES with ${TEST_PLATFORMS-} ran $*"
  [[ "$*" != *"${FULL:-nothing}"* ]] || { echo "diffeqformer: there is not enough memory" >&2; exit 1; }
  [[ "$*" != *"${BROKEN:-nothing}"* ]] || { printf 'W autotuner: RESOURCE_EXHAUSTED\\nwhat went wrong\\n' >&2; exit 2; }
fi
"""


@pytest.fixture
def on_gpu(tmp_path):
    """Runs the script, and returns the finished process and the text of the file that it wrote."""
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/bin/sh\necho 580.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(**settings):
        own = ("CUDA_VISIBLE_DEVICES", "MINUTES", "TEST_PLATFORMS", "FULL", "BROKEN", "FOUND")
        environment = {name: value for name, value in os.environ.items() if name not in own}
        environment |= {"PYTHON": "python", "PATH": f"{tmp_path}:{os.environ['PATH']}", **settings}
        command = [ROOT / "benchmarks" / "on_gpu.sh", "results"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        files = list((tmp_path / "results").glob("gpu-NVIDIA-Fake-80GB-*.md"))
        return done, files[0].read_text() if files else None

    return run


def parts_of(text: str) -> dict[str, str]:
    """The text below each heading."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def test_a_part_that_fails_or_does_not_fit_is_said_and_the_others_run(on_gpu):
    done, text = on_gpu(BROKEN="generation", FULL="large", FOUND="gpu 8")
    parts = parts_of(text)
    assert done.returncode == 1 and len(parts) == 6
    assert text.startswith("# NVIDIA Fake 80GB, driver 580.1, jax 0.10.2, 20") and "has 8 of them" in text
    assert "~~~\non 0 with cuda,cpu ran -m pytest -m gpu -v tests/test_gpu.py\n~~~\n" in parts["Tests"]
    assert (
        "~~~\nW autotuner: RESOURCE_EXHAUSTED\nwhat went wrong\n~~~\n\nFAILED with status 2"
        in parts["Generation, GPT-small"]
    )
    for name in ("Train step, GPT-large", "Train step, GPT-large, 8 GPUs"):
        assert (
            "Skipped: it doesn't fit into the GPU's memory ('diffeqformer: there is not enough memory')" in parts[name]
        )
    assert "\non 0,1,2,3,4,5,6,7 with" in parts["Train step, GPT-large, 8 GPUs"]
    assert done.stdout.count("Done in ") == 3 and done.stdout.count("Skipped") == 2 and "FAILED" in done.stdout


def test_what_the_tests_for_gpus_take_from_modules_is_there():
    """They run nowhere else, so nobody notices when a function moves."""
    names = vars(importlib.import_module("test_gpu"))
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    taken = [node for node in taken if isinstance(names.get(node.value.id), types.ModuleType)]
    assert len(taken) > 20
    assert not [ast.unparse(node) for node in taken if not hasattr(names[node.value.id], node.attr)]
