"""One process at a time for a store that isn't finished."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator
from typing import IO

from diffeqformer.errors import UserError


@contextlib.contextmanager
def only_process(partial: pathlib.Path) -> Iterator[IO]:
    """Make the folder of an unfinished store and hold it against other processes of this machine.

    It stays held for as long as any process has the file that this gives open.

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
        yield lock
