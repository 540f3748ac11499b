"""Train a model: `python -m diffeqformer.main --config=configs/tiny.py [--workdir=runs/mine]`."""

import pathlib
import time

START = time.monotonic()  # before the heavy imports, so that the time to the first step is the user's

from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from diffeqformer import cli  # noqa: E402
from diffeqformer.config import check_overrides  # noqa: E402
from diffeqformer.errors import UserError  # noqa: E402
from diffeqformer.train import train  # noqa: E402

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file of configs/, with the model after a colon: configs/tiny.py:gpt"
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/<config name>.")


def parse_flags(arguments: list[str]) -> list[str]:
    """Parse the command line and load the config file.

    Raises:
        UserError, flags.Error: for what is wrong with either.
    """
    check_overrides(arguments)
    try:
        rest = cli.parse_flags(arguments)
        if CONFIG.value is None:
            raise UserError("--config: a config file is needed, for example --config=configs/tiny.py")
        path = flags.FLAGS["config"].config_filename.partition(":")[0]
        if not pathlib.Path(path).is_file():
            raise UserError(f"--config: there is no file {path}; see the folder configs/")
        CONFIG.value.to_dict()  # a file that fails to load says so here
        return rest
    except (UserError, flags.Error):
        raise
    except Exception as error:  # whatever a config file of the user's raises
        reason = str(error).strip().splitlines() or [""]
        raise UserError(f"--config: the file can't be loaded, {type(error).__name__}: {reason[-1].strip()}") from error


if __name__ == "__main__":
    cli.run(
        lambda: train(CONFIG.value, WORKDIR.value or f"runs/{CONFIG.value.name}", started=START),
        parse_flags,
        interrupted="interrupted; the same command goes on from the newest checkpoint, if any",
    )
