"""benchmarks/on_gpu.sh, with a fake interpreter: what it writes, and how it ends. What its tests name."""

import ast
import importlib
import os
import subprocess
import types

from helpers import ROOT

PYTHON = """#!/usr/bin/env bash
[[ $1 != -c ]] || { echo "gpu 1 0.10.2 Fake"; exit; }
echo "ran $*"
[[ "$*" != *large* ]] || { echo "diffeqformer: there is not enough memory" >&2; exit 1; }
[[ "$*" != *generation* ]] || { echo "W autotuner: RESOURCE_EXHAUSTED" >&2; exit 2; }
"""


def test_a_part_that_fails_or_does_not_fit_is_said_and_the_others_run(tmp_path):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "CUDA_VISIBLE_DEVICES": "", "MINUTES": "10"}
    command = [ROOT / "benchmarks" / "on_gpu.sh", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    [file] = tmp_path.glob("gpu-Fake-*.md")
    parts = dict(part.split("\n", 1) for part in file.read_text().split("\n## ")[1:])  # the text below each heading
    assert done.returncode == 1 and len(parts) == 5 and done.stdout.count("Done in ") == 3
    assert "\nran -m pytest -m gpu -v tests/test_gpu.py\n" in parts["Tests"]
    assert "FAILED with status 2" in parts["Generation, GPT-small"]
    assert "Skipped: it doesn't fit into the GPU's memory" in parts["Train step, GPT-large"]


def test_what_the_tests_for_gpus_take_from_modules_is_there():
    """They run nowhere else, so nobody notices when a function moves."""
    names = vars(importlib.import_module("test_gpu"))
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    taken = [node for node in taken if isinstance(names.get(node.value.id), types.ModuleType)]
    assert len(taken) > 20
    assert not [ast.unparse(node) for node in taken if not hasattr(names[node.value.id], node.attr)]
