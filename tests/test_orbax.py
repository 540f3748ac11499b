"""Orbax's v1 interface is found in every version that has it."""

import runpy
import sys
import types

import pytest

from helpers import ROOT


@pytest.mark.parametrize("place", ["orbax.checkpoint", "orbax.checkpoint.v1"])
def test_the_interface_is_found_where_a_version_keeps_it(place, monkeypatch):
    modules = {name: types.ModuleType(name) for name in ("orbax", "orbax.checkpoint", "orbax.checkpoint.v1")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module if place.startswith(name) else None)
        parent, _, last = name.rpartition(".")
        if parent and place.startswith(name):
            setattr(modules[parent], last, module)
    modules[place].save_checkpointables = True
    assert runpy.run_path(ROOT / "diffeqformer" / "orbax.py")["ocp"] is modules[place]
