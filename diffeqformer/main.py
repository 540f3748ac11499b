"""Train a model: `python -m diffeqformer.main --config=configs/tiny.py [--workdir=runs/mine]`."""

import time

START = time.monotonic()  # before the heavy imports, so that the time to the first step is the user's

from absl import flags  # noqa: E402

from diffeqformer import cli  # noqa: E402
from diffeqformer.train import train  # noqa: E402

if __name__ == "__main__":
    config = cli.define_config()
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/<config name>.")
    cli.run(
        lambda: train(config.value, workdir.value or f"runs/{config.value.name}", started=START),
        cli.parse_config,
        interrupted="interrupted; the same command goes on from the newest checkpoint, if any",
    )
