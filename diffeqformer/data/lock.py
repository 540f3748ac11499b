"""One process at a time for a store that isn't finished."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from diffeqformer.errors import UserError


@contextlib.contextmanager
def only_process(partial: pathlib.Path) -> Iterator[None]:
    """Hold the folder of an unfinished store against other processes of this machine, and make it.

    Raises:
        UserError: if another one holds it, or it can't be made.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = open(partial / "lock", "w")
    except OSError as error:
        raise UserError(f"config.data.dir: {error.filename}: {error.strerror}; choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{partial}: another process is preparing this store; wait until it has finished") from None
        yield
