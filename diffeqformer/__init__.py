"""Neural ODE Transformers: language models whose weights are functions of a continuous depth.

@inproceedings{tong2025neural,
  title={Neural {ODE} Transformers: Analyzing Internal Dynamics and Adaptive Fine-tuning},
  author={Tong, Anh and Nguyen-Tang, Thanh and Lee, Dongeun and Nguyen, Duc and Tran, Toan
          and Hall, David and Kang, Cheongwoong and Choi, Jaesik},
  booktitle={International Conference on Learning Representations},
  year={2025}}
"""

import os
import signal
import sys

__version__ = "0.1.0"

_name = os.path.basename("".join(sys.argv[:1]))  # -m until Python has found the module
if _name == __name__ or (_name == "-m" and any(word.split(".")[0] == __name__ for word in sys.orig_argv)):
    # A command. Ctrl-C ends its imports like other signals, without a traceback, until `heed_interrupts`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

# read gs:// through gcsfs, as for token stores: importing TensorFlow takes seconds
os.environ.setdefault("EPATH_USE_TF", "false")


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
