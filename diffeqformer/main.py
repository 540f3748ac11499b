"""Train a model: `python -m diffeqformer.main --config=tiny [--workdir=runs/mine]`."""

import sys
import time

START = time.monotonic()  # before the heavy imports, so that the time to the first step includes them

from absl import flags, logging  # noqa: E402

from diffeqformer.config import check_overrides, check_used, explain, given_fields  # noqa: E402
from diffeqformer.console import command_line  # noqa: E402
from diffeqformer.parallel import hosts  # noqa: E402
from diffeqformer.training.loop import train  # noqa: E402

if __name__ == "__main__":
    config = command_line.define_config()
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/<config name>.")
    help_text = "Check the hashes and ids of the token store, in the background of the first steps."
    verify = flags.DEFINE_bool("verify", True, help_text)
    hosts.define_flags()

    def command() -> None:
        check_used(sys.argv, config.value)
        folder, given = workdir.value or f"runs/{config.value.name}", given_fields(sys.argv)
        with hosts.joined(flags.FLAGS):
            train(config.value, folder, START, verify.value, given)

    command_line.run(
        command,
        check_overrides,
        explain,
        verbosity=logging.FATAL,  # an error in a background save is raised, so it need not be logged as well
        interrupted="interrupted; the same command resumes from the newest checkpoint, if any",
    )
