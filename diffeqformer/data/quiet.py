"""Import TensorFlow without its log messages and without taking an accelerator's memory."""

import contextlib
import os
import sys

from absl import logging

from diffeqformer.errors import UserError


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


def import_tensorflow(what: str) -> None:
    """Import TensorFlow and SeqIO, which `what` needs, without their libraries' messages about devices."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.set_verbosity(logging.ERROR)
    with quiet():
        try:
            import seqio  # noqa: F401
            import tensorflow as tf
        except ImportError as error:
            raise UserError(
                f"{what} needs {error.name}, which the light installation leaves out; install diffeqformer with all "
                "its packages: pip install without --no-deps"
            ) from None
        tf.config.set_visible_devices([], "GPU")  # otherwise TensorFlow takes all of its memory
