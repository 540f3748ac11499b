"""benchmarks/on_gpu.sh, with a fake interpreter and driver: what it writes, and how it ends. What its tests name."""

import ast
import importlib
import os
import subprocess
import types

from helpers import ROOT

PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then
  echo "gpu 8 0.10.2 NVIDIA Fake 80GB"
elif [[ $1 == --version ]]; then
  echo "Python 3.12.3"
else
  echo "on $CUDA_VISIBLE_DEVICES with ${TEST_PLATFORMS-} ran $*"
  [[ "$*" != *large* ]] || { echo "diffeqformer: there is not enough memory" >&2; exit 1; }
  [[ "$*" != *generation* ]] || { printf 'W autotuner: RESOURCE_EXHAUSTED\\nwhat went wrong\\n' >&2; exit 2; }
fi
"""


def test_a_part_that_fails_or_does_not_fit_is_said_and_the_others_run(tmp_path):
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/bin/sh\necho 580.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = ("CUDA_VISIBLE_DEVICES", "MINUTES", "TEST_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PYTHON": "python", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [ROOT / "benchmarks" / "on_gpu.sh", "results"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    [file] = (tmp_path / "results").glob("gpu-NVIDIA-Fake-80GB-*.md")
    begin, *parts = file.read_text().split("\n## ")
    parts = dict(part.split("\n", 1) for part in parts)  # the text below each heading
    assert done.returncode == 1 and len(parts) == 6
    assert begin.startswith("# NVIDIA Fake 80GB, driver 580.1, jax 0.10.2, 20") and "has 8 of them" in begin
    assert "~~~\non 0 with cuda,cpu ran -m pytest -m gpu -v tests/test_gpu.py\n~~~\n" in parts["Tests"]
    failed = "~~~\nW autotuner: RESOURCE_EXHAUSTED\nwhat went wrong\n~~~\n\nFAILED with status 2"
    assert failed in parts["Generation, GPT-small"]
    assert "\non 0,1,2,3,4,5,6,7 with" in parts["Train step, GPT-large, 8 GPUs"]
    for name in ("Train step, GPT-large", "Train step, GPT-large, 8 GPUs"):
        assert "Skipped: it doesn't fit into the GPU's memory ('diffeqformer: there is not" in parts[name]
    assert done.stdout.count("Done in ") == 3 and done.stdout.count("Skipped") == 2 and "FAILED" in done.stdout


def test_what_the_tests_for_gpus_take_from_modules_is_there():
    """They run nowhere else, so nobody notices when a function moves."""
    names = vars(importlib.import_module("test_gpu"))
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    taken = [node for node in taken if isinstance(names.get(node.value.id), types.ModuleType)]
    assert len(taken) > 20
    assert not [ast.unparse(node) for node in taken if not hasattr(names[node.value.id], node.attr)]
