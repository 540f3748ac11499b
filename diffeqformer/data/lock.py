"""One process at a time for a store that isn't finished."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from diffeqformer.errors import UserError


def hold(lock: IO, partial: pathlib.Path) -> None:
    """Wait until this process alone holds the lock.

    Raises:
        UserError: if the file system knows no locks.
    """
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{partial}: another process is preparing this store; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"config.data.dir: {partial} can't be locked ({error.strerror}); choose a folder of another file system"
        ) from None


@contextlib.contextmanager
def only_process(partial: pathlib.Path) -> Iterator[IO]:
    """Make the folder of an unfinished store and hold it against other processes, waiting until none of them has it.

    It stays held for as long as any process has the file that this gives open.

    Raises:
        UserError: if it can't be made.
    """
    while True:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            lock = open(partial / "lock", "w")
        except FileNotFoundError:  # it has just got its final name
            continue
        except FileExistsError as error:
            if not partial.exists() or partial.is_dir():  # it has just been removed
                continue
            raise UserError(f"config.data.dir: {partial}: {error.strerror}; choose another folder") from None
        except OSError as error:
            raise UserError(f"config.data.dir: {error.filename}: {error.strerror}; choose another folder") from None
        with lock:
            hold(lock, partial)
            try:
                still_there = os.path.samestat(os.fstat(lock.fileno()), os.stat(partial / "lock"))
            except FileNotFoundError:
                still_there = False
            if still_there:
                try:
                    yield lock
                finally:
                    with contextlib.suppress(OSError):  # another process may have begun in it
                        if os.listdir(partial) == ["lock"]:  # nothing to go on from
                            (partial / "lock").unlink()
                            partial.rmdir()
                return
