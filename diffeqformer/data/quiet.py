"""Import TensorFlow without its log messages and without taking an accelerator's memory."""

import contextlib
import importlib.util
import os
import sys

from absl import logging

from diffeqformer.errors import UserError

PACKAGES = ("seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text")


def not_installed() -> list[str]:
    """Those of the packages around SeqIO that aren't installed; nothing is imported."""
    return [name for name in PACKAGES if name not in sys.modules and importlib.util.find_spec(name) is None]


def check_installed(what: str) -> None:
    """Check that SeqIO and what it needs are installed, which the message says that `what` needs."""
    if missing := not_installed():
        raise UserError(
            f"{what} needs {', '.join(missing)}, which the light installation leaves out; install diffeqformer with "
            "all its packages: pip install without --no-deps"
        )


@contextlib.contextmanager
def quiet():
    """Discard what C++ libraries write to standard error in the block. None of their settings silences all of it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def import_tensorflow() -> None:
    """Import TensorFlow and SeqIO without their libraries' messages about devices."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.set_verbosity(logging.ERROR)
    with quiet():
        import seqio  # noqa: F401
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")  # otherwise TensorFlow takes all of its memory
