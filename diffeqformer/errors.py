"""Exceptions whose message is written for the user, and a way to end the process with such a message."""

import contextlib
import difflib
import errno
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Something the user can fix. The message is one sentence that names the field or file at fault.

    A ValueError, so that callers of the library can catch it as one.
    """


class UserErrorEverywhere(UserError):
    """A UserError that every process of a run raises at the same point."""


class Stopped(Exception):
    """A run was told to stop and has saved a checkpoint. Its status is 128 and the signal's number: 143 for SIGTERM."""

    def __init__(self, message: str, status: int = 143):
        super().__init__(message)
        self.status = status


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known name, if there is one.

    Of names with sections, such as `model.width`, the last part is compared.
    """
    parts = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(name.rpartition(".")[2], parts, 1)
    return f"; did you mean {parts[close[0]]}?" if close else ""


def counted(number: int, what: str) -> str:
    """A number of things: 1 device, 2 devices."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """The text with every control character but line ends and tabs replaced, safe for a terminal.

    Spaces of all kinds stay, and so do soft hyphens and the joiners of emoji and scripts; signs that turn the direction
    of writing don't.
    """
    kept = "\n\t\u00ad\u200c\u200d"
    return "".join(c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else "\ufffd" for c in text)


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that a device or the host ran out of memory.

    Only XLA's are RuntimeErrors. TensorStore says RESOURCE_EXHAUSTED of full disks, quotas and too many open files.
    """
    of_xla = isinstance(error, RuntimeError) and any(s in str(error) for s in ("RESOURCE_EXHAUSTED", "Out of memory"))
    return isinstance(error, MemoryError) or of_xla or "Cannot allocate memory" in str(error)


def unforeseen(error: Exception) -> str:
    """The sentence for an error that nothing else turns into one. `DIFFEQFORMER_TRACEBACK` shows where it was."""
    if os.environ.get("DIFFEQFORMER_TRACEBACK"):
        traceback.print_exception(error)
    if out_of_memory(error):
        return "there is not enough memory; take fewer steps, samples or examples at once, or smaller parts"
    of_output = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in of_output and not error.filename:
        return said_of_output(error)
    return f"{type(error).__name__}: {reason_of(error)}; DIFFEQFORMER_TRACEBACK=1 shows where this happened"


def said_of_output(error: OSError) -> str:
    """What is said of standard output, or of a file without a name, that can't be written."""
    if isinstance(error, BrokenPipeError):
        return "the output was closed before its end"
    return f"the output can't be written: {error.strerror}"


def leave(status: int, sentence: str) -> None:
    """End the process immediately. A normal exit can crash or hang in threads of XLA or TensorFlow."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the output is full, or closed
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"diffeqformer: {printable(sentence)}\n")  # one write: other threads may be writing, too
        sys.stderr.flush()
    os._exit(status)


def say_and_end(text: str) -> None:
    """Print all that a command has to say, and end the process."""
    try:
        print(text, flush=True)
    except OSError as error:
        leave(1, said_of_output(error))
    sys.exit(0)


@contextlib.contextmanager
def reachable(option: str, folder: os.PathLike | str) -> Iterator[None]:
    """Turn errors of a local or cloud file system into a UserError that names the option."""
    try:
        yield
    except ImportError:
        raise UserError(f"{option}: {folder} needs a package, which for gs:// is pip install gcsfs") from None
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"{option}: {reason}; choose a folder that can be written") from None
    except Exception as error:  # cloud clients have many exceptions of their own
        if "://" not in str(folder):
            raise
        raise UserError(f"{option}: {folder} can't be reached: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """An error's first line, without its middle if it is long; of TensorStore's, what the operating system said."""
    while "See full TensorStore" in str(error) and error.__cause__:
        error = error.__cause__  # which has the reason
    if code := re.search(r"\[os_error_code='(\d+)'\]", str(error)):
        return os.strerror(int(code[1]))
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.partition(" [tensorstore_spec")[0].partition(". See full TensorStore")[0]
    return line if len(line) <= 200 else f"{line[:100]} ... {line[-100:]}"
