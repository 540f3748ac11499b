"""configs/tiny.py with twelve steps of depth and larger batches of the text that recipe.py writes, for recipe.py."""

import pathlib
import runpy

TWELVE_STEPS = runpy.run_path(str(pathlib.Path(__file__).with_name("twelve_steps.py")))["get_config"]


def get_config(model: str = "recipe"):
    config = TWELVE_STEPS(model)
    config.name = f"larger-{model}"
    config.batch_size = 16
    config.data.task = "python_packages"
    return config
