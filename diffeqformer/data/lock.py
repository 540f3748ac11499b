"""One process at a time for a store that isn't finished, or for the work folder of a run."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from etils import epath

from diffeqformer.errors import UserError

ATTEMPTS = 1000  # to make a folder that other processes may rename or remove at the same time


def hold(lock: IO, waiting: str) -> None:
    """Wait until this process alone holds the lock, and say so.

    Raises:
        OSError: if the file system knows no locks.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(waiting, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def only_run(workdir: epath.Path) -> Iterator[None]:
    """Hold a work folder against a second run, which waits, on this machine and others that share the disk.

    Where there are no locks, as on gs:// and some cluster disks, this does nothing.
    """
    if "://" in str(workdir):
        yield
        return
    with open(workdir / ".lock", "w") as lock:
        with contextlib.suppress(OSError):
            hold(lock, f"{workdir}: another run is going on here; waiting for its end")
        yield


@contextlib.contextmanager
def only_process(partial: pathlib.Path) -> Iterator[IO]:
    """Make the folder of an unfinished store and hold it against other processes, waiting until none of them has it.

    It stays held for as long as any process has the file that this gives open.

    Raises:
        UserError: if it can't be made.
    """
    obstacle = partial
    for _ in range(ATTEMPTS):
        try:
            partial.mkdir(parents=True, exist_ok=True)
            lock = open(partial / "lock", "w")
        except (FileNotFoundError, FileExistsError) as error:  # another process has just renamed or removed it
            obstacle = pathlib.Path(error.filename)
            continue
        except OSError as error:
            raise UserError(f"config.data.dir: {error.filename}: {error.strerror}; choose another folder") from None
        with lock:
            try:
                hold(lock, f"{partial}: another process is preparing this store; waiting for it")
            except OSError as error:
                reason = f"{partial} can't be locked ({error.strerror})"
                raise UserError(f"config.data.dir: {reason}; choose a folder of another file system") from None
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
    reason = "is a link to nothing" if obstacle.is_symlink() and not obstacle.exists() else "can't be made a folder"
    raise UserError(f"config.data.dir: {obstacle} {reason}; choose another folder")
