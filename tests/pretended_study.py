"""`experiments/ablations.py` with runs that only pretend to train."""

import pathlib
import sys
import types

import numpy as np

sys.path.insert(0, "experiments")
import ablations  # noqa: E402
import common  # noqa: E402
import published  # noqa: E402

from diffeqformer.console import progress  # noqa: E402
from helpers import save_params  # noqa: E402

now = 0.0
progress.time = types.SimpleNamespace(monotonic=lambda: now, time=lambda: now)


def pretend(command, **_):
    """A run of 1,234 parameters, whose first step takes 1 s and each later one 0.5 s. A rate of 2e-3 is the best."""
    global now
    options = dict(option.split("=", 1) for option in command if "=" in option)
    steps, workdir = int(options["--config.steps"]), options["--workdir"]
    worse = 100 * abs(float(options.get("--config.optimizer.learning_rate", "3e-3")) - 2e-3)
    if (pathlib.Path(workdir) / "checkpoints" / str(steps)).is_dir():  # it has finished
        return types.SimpleNamespace(stdout=[], wait=lambda: 0)
    writer = progress.Progress(workdir, 0, steps, tokens_per_step=1000)
    for step in range(1, steps + 1):
        now += 1.0 if step == 1 else 0.5
        writer.train(step, {"loss": 3.0})
        writer.validation(step, {"loss": 2.0, "perplexity": 9.5 - step + worse, "bits_per_byte": 2.0})
    writer.close()
    config = ablations.config_of(options["--config"].partition(":")[2])
    config.steps = steps
    params = {"token_embedding": np.zeros((100, 12), np.float32), "lm_head": np.zeros(34, np.float32)}
    save_params(workdir, config, {steps: params})
    return types.SimpleNamespace(stdout=[], wait=lambda: 0)


def draw_published(axis, outputs):
    print("published", *outputs)
    published.draw_published(axis, outputs)


common.subprocess.Popen, ablations.draw_published = pretend, draw_published
ablations.app.run(ablations.main)
