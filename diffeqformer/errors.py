"""What is said to the user: exceptions whose message is meant for them, and a way to end with a sentence."""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Something the user can put right. The message is one sentence that names the field or file at fault.

    A ValueError, so that callers of the library can catch it as one.
    """


class UserErrorEverywhere(UserError):
    """One that every process of a run raises at the same place."""


class Stopped(Exception):
    """A run was told to stop (SIGTERM), and has saved itself."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence on an unknown name: the known name that is most like it, if any is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had not enough memory, as JAX says it."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def leave(status: int, sentence: str) -> None:
    """End the process at once: a normal exit can crash, or wait for ever, in threads of XLA or TensorFlow."""
    sys.stdout.flush()
    sys.stderr.write(f"diffeqformer: {sentence}\n")  # at once: other threads may be writing, too
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def reachable(option: str, folder: os.PathLike | str) -> Iterator[None]:
    """Turns what went wrong with a file system, a cloud's or this machine's, into a UserError that names the option."""
    try:
        yield
    except ImportError:
        raise UserError(f"{option}: {folder} needs a package: pip install -e '.[gcs]' -c constraints.txt") from None
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"{option}: {reason}; choose a folder that can be written") from None
    except Exception as error:  # a cloud's client has many of its own
        if "://" not in str(folder):
            raise
        raise UserError(f"{option}: {folder} can't be reached: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The end of an error's first line without the array's description, before which TensorStore gives the reason."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(" [tensorstore_spec")[0]
    return line if len(line) <= 200 else f"... {line[-200:]}"
