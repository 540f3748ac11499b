"""Neural ODE Transformers: language models whose weights are functions of a continuous depth.

@inproceedings{tong2025neural,
  title={Neural {ODE} Transformers: Analyzing Internal Dynamics and Adaptive Fine-tuning},
  author={Tong, Anh and Nguyen-Tang, Thanh and Lee, Dongeun and Nguyen, Duc and Tran, Toan
          and Hall, David and Kang, Cheongwoong and Choi, Jaesik},
  booktitle={International Conference on Learning Representations},
  year={2025}}
"""

import importlib.metadata
import os
import re
import sys

from diffeqformer.errors import end_imports_on_interrupt

__version__ = "0.1.0"


def check_versions(jax: str, flax: str) -> None:
    """See that JAX and Flax fit together. pip can't: Flax before 0.12.10 takes any JAX, but fails from 0.11 on.

    Raises:
        ImportError: if they don't.
    """
    newer, fits = (
        tuple(map(int, re.findall(r"\d+", version)[:3])) >= first
        for version, first in ((jax, (0, 11)), (flax, (0, 12, 10)))
    )
    if newer and not fits:
        raise ImportError(
            f"flax {flax} can't be imported with jax {jax}; use `pip install --upgrade flax`, or the versions of "
            "constraints.txt"
        )


def version(package: str) -> str:
    """The version of a package.

    Raises:
        ImportError: if it isn't installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"{package} isn't installed in {sys.prefix}; activate the environment that has it, or install this package "
            "(docs/training.md)"
        ) from None


check_versions(version("jax"), version("flax"))

# read gs:// through gcsfs, as for token stores: importing TensorFlow takes seconds
os.environ.setdefault("EPATH_USE_TF", "false")

# while `python -m` looks for the module of a command, its argument is "-m"
if sys.argv[:1] == ["-m"] and "diffeqformer" in (name.partition(".")[0] for name in sys.orig_argv):
    end_imports_on_interrupt()


def open(workdir, step: int | str | None = None):
    """Open a run of `main`, or a materialized model, to use it in Python: a `diffeqformer.opened.OpenedRun`.

    Args:
        workdir: its folder, on this machine or on gs://.
        step: training step of the checkpoint, or "best"; None: the newest.

    Raises:
        UserError: if there is no such checkpoint, or it can't be read.
    """
    from diffeqformer.checkpoints.checkpoint import load  # JAX and Flax take seconds
    from diffeqformer.opened import OpenedRun

    return OpenedRun(load(workdir, step=step))
