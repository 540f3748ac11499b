"""The command line of lm-evaluation-harness, with this project's models registered.

    python -m diffeqformer.harness run --model diffeqformer --model_args workdir=runs/tiny,num_steps=8 --tasks piqa

The paper's tables come from `diffeqformer.downstream`.
"""

import sys

from lm_eval.__main__ import cli_evaluate

from diffeqformer.errors import UserError
from diffeqformer.inference.harness import HarnessModel
from diffeqformer.parallel import hosts

__all__ = ["HarnessModel"]

if __name__ == "__main__":
    try:
        hosts.check_one("harness: lm-eval's own command (`diffeqformer.downstream` takes several)")
        cli_evaluate()
    except UserError as error:
        sys.exit(f"diffeqformer: {error}")
