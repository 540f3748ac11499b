"""Train a model: `python -m diffeqformer.main --config=configs/tiny.py [--workdir=runs/mine]`."""

import os
import pathlib
import sys
import time

START = time.monotonic()  # before the heavy imports, so that the time to the first step is the user's

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from diffeqformer.config import check_overrides  # noqa: E402
from diffeqformer.errors import UserError  # noqa: E402
from diffeqformer.train import train  # noqa: E402

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file of configs/, with the model after a colon: configs/tiny.py:gpt"
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/<config name>.")


def parse_flags(arguments: list[str]) -> list[str]:
    """Parse the command line; what is wrong with it stops the program with one sentence."""
    try:
        check_overrides(arguments)
        rest = flags.FLAGS(arguments)
        if len(rest) > 1:
            raise UserError(f"{rest[1]}: this argument has no meaning here; options begin with --")
        if CONFIG.value is None:
            raise UserError("--config: a config file is needed, for example --config=configs/tiny.py")
        path = flags.FLAGS["config"].config_filename.partition(":")[0]
        if not pathlib.Path(path).is_file():
            raise UserError(f"--config: there is no file {path}; see the folder configs/")
        CONFIG.value.to_dict()  # a file that fails to load says so here
        return rest
    except (UserError, flags.Error) as error:
        sys.exit(f"diffeqformer: {error}")
    except Exception as error:  # whatever a config file of the user's raises
        reason = str(error).strip().splitlines() or [""]
        sys.exit(f"diffeqformer: --config: the file can't be loaded, {type(error).__name__}: {reason[-1].strip()}")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    config = CONFIG.value
    try:
        train(config, WORKDIR.value or f"runs/{config.name}", started=START)
    except UserError as error:
        sys.exit(f"diffeqformer: {error}")
    except KeyboardInterrupt:
        print("diffeqformer: interrupted; the same command goes on from the newest checkpoint, if any", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)  # a normal exit would crash in compiler threads that are still at work


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
