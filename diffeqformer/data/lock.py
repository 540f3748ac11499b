"""Locks that admit one process at a time to an unfinished store or to the work folder of a run."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from etils import epath

from diffeqformer.console.results import check_links
from diffeqformer.errors import UserError, reachable

ATTEMPTS = 1000  # at creating a folder that other processes may rename or remove at the same time


def acquire(lock: IO, waiting: str) -> None:
    """Wait until this process holds the lock exclusively; an OSError if the file system doesn't support locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(waiting, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def open_lock(path: os.PathLike) -> IO:
    """Create or open the file of a lock, for writing. A link is an OSError, and a pipe isn't waited for."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "w")


@contextlib.contextmanager
def only_run(workdir: epath.Path) -> Iterator[None]:
    """Lock a work folder. A second run waits, on this machine or another one that shares the disk.

    On file systems without locks, such as gs:// and some cluster disks, this does nothing.
    """
    if "://" in str(workdir):
        yield
        return
    with reachable("--workdir", workdir):
        lock = open_lock(workdir / ".lock")
    with lock:
        with contextlib.suppress(OSError):
            acquire(lock, f"{workdir}: another run is using this folder; waiting for it to end")
        yield


@contextlib.contextmanager
def only_process(partial: pathlib.Path) -> Iterator[IO]:
    """Create the folder of an unfinished store and lock it, after waiting for other processes to release it.

    It stays locked for as long as any process keeps the returned file open.
    """
    obstacle = partial
    for _ in range(ATTEMPTS):
        try:
            partial.mkdir(parents=True, exist_ok=True)
            lock = open_lock(partial / "lock")
        except (FileNotFoundError, FileExistsError) as error:  # another process has just renamed or removed it
            obstacle = pathlib.Path(error.filename)
            continue
        except OSError as error:
            raise UserError(f"config.data.dir: {error.filename}: {error.strerror}; choose another folder") from None
        with lock:
            try:
                acquire(lock, f"{partial}: another process is preparing this store; waiting for it")
            except OSError as error:
                reason = f"{partial} can't be locked ({error.strerror})"
                raise UserError(f"config.data.dir: {reason}; choose a folder of another file system") from None
            try:
                still_there = os.path.samestat(os.fstat(lock.fileno()), os.stat(partial / "lock"))
            except FileNotFoundError:
                still_there = False
            if still_there:
                check_links(partial, "config.data.dir")
                try:
                    yield lock
                finally:
                    with contextlib.suppress(OSError):  # another process may have started using it
                        if os.listdir(partial) == ["lock"]:  # nothing to resume
                            (partial / "lock").unlink()
                            partial.rmdir()
                return
    reason = "is a link to nothing" if obstacle.is_symlink() and not obstacle.exists() else "can't be made a folder"
    raise UserError(f"config.data.dir: {obstacle} {reason}; choose another folder")
