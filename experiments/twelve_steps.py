"""configs/tiny.py with twelve steps of depth, for recipe.py."""

import pathlib
import runpy

from diffeqformer.config import as_recipe

TINY = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "configs" / "tiny.py"))["get_config"]


def get_config(model: str = "recipe"):
    config = TINY("interpolated" if model == "recipe" else model)
    config.name = f"twelve_steps-{model}"
    config.model.num_steps = 12
    return as_recipe(config) if model == "recipe" else config
