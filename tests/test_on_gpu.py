"""What the tests for GPUs name is there: they run nowhere else, so nobody notices when a function moves."""

import ast
import importlib
import types

from helpers import ROOT


def test_what_the_tests_for_gpus_take_from_modules_is_there():
    names = vars(importlib.import_module("test_gpu"))
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    taken = [node for node in taken if isinstance(names.get(node.value.id), types.ModuleType)]
    assert len(taken) > 20
    assert not [ast.unparse(node) for node in taken if not hasattr(names[node.value.id], node.attr)]
