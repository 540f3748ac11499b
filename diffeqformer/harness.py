"""The command line of lm-evaluation-harness, with this project's models registered.

    python -m diffeqformer.harness run --model diffeqformer --model_args workdir=runs/tiny,num_steps=8 --tasks piqa

The paper's tables come from `diffeqformer.downstream`.
"""

import sys

from diffeqformer.console.surroundings import PATHS, at_home, heed_interrupts, set_up
from diffeqformer.errors import UserError
from diffeqformer.parallel import hosts


def argument_at_home(argument: str) -> str:
    """An argument of lm-eval's command line; if it has a path, with the home folder in place of ~."""
    name, equals, value = argument.partition("=")
    return f"{name}={at_home(value)}" if equals and PATHS.fullmatch(name.lstrip("-")) else argument


if __name__ == "__main__":
    try:
        from lm_eval.__main__ import cli_evaluate

        from diffeqformer.inference.lm_eval_model import HarnessModel  # noqa: F401 (registers the model)
    except ImportError:
        sys.exit("diffeqformer: harness needs lm-evaluation-harness; pip install 'lm-eval>=0.4.13,<0.5'")
    try:
        set_up()
        heed_interrupts()
        sys.argv = [argument_at_home(argument) for argument in sys.argv]
        hosts.check_one("harness: lm-eval's own command (`diffeqformer.downstream` takes several)")
        cli_evaluate()
    except UserError as error:
        sys.exit(f"diffeqformer: {error}")
