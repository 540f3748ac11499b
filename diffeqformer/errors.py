"""What is said to the user: exceptions whose message is meant for them, and a way to end with a sentence."""

import os
import sys


class UserError(ValueError):
    """Something the user can put right; the message is one sentence that names the field or file at fault.

    A ValueError, so that those who call the library without knowing of this class can treat it as one.
    """


class UserErrorEverywhere(UserError):
    """One that every process of a run raises at the same place."""


class Stopped(Exception):
    """A run was told to stop (SIGTERM), and has saved itself."""


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had not enough memory, as JAX says it."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def leave(status: int, sentence: str) -> None:
    """End the process at once: a normal exit can crash, or wait for ever, in threads of XLA or TensorFlow still at work."""
    sys.stdout.flush()
    sys.stderr.write(f"diffeqformer: {sentence}\n")  # at once: other threads may be writing, too
    sys.stderr.flush()
    os._exit(status)
