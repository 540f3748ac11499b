"""Locks that admit one process at a time to an unfinished store or to the work folder of a run."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from etils import epath

from diffeqformer.console.results import check_links
from diffeqformer.errors import reachable


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
    """Lock the folder of an unfinished store, after waiting for other processes to release it, and create it.

    It stays locked for as long as any process keeps the returned file open. The file lies beside the folder and stays.
    """
    with reachable("config.data.dir", partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(partial.with_name(f".{partial.name}.lock"))
    with lock:
        with reachable("config.data.dir", partial):
            acquire(lock, f"{partial}: another process is preparing this store; waiting for it")
            partial.mkdir(exist_ok=True)
        check_links(partial, "config.data.dir")
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError):
                partial.rmdir()  # if it is empty, so that there is nothing to resume
