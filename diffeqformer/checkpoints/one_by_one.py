"""Save a model of which one parameter is in memory at a time."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator

import numpy as np
from etils import epath
from flax import traverse_util

from diffeqformer.checkpoints import checksums
from diffeqformer.checkpoints.about import About
from diffeqformer.checkpoints.checkpoint import open_to_write, written
from diffeqformer.checkpoints.folder import begin_save
from diffeqformer.errors import UserError, UserErrorEverywhere, reachable, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Path


def save_one_by_one(
    workdir: epath.PathLike, step: int, arrays: Iterator[tuple[Path, np.ndarray]], about: About
) -> None:
    """Save parameters as the only checkpoint of a folder. Each is made after the one before it is on disk.

    They are written twice: as they are made, to files that are then mapped into memory, and as Orbax stores them.
    """
    made, found = {}, {}
    with open_to_write(workdir, 1) as checkpoints, written(checkpoints):
        beside = None if "://" in str(workdir) else checkpoints.directory
        with tempfile.TemporaryDirectory(prefix="parts-", dir=beside) as parts:
            for path, array in arrays:
                found[checksums.name_of_parameter(path)] = checksums.of_array(array)
                made[path] = mapped(f"{parts}/{'.'.join(path)}", array)
            about = dataclasses.replace(about, checksums=found)
            try:
                begin_save(checkpoints, step, {"params": traverse_util.unflatten_dict(made), "about": about.to_json()})
                checkpoints.wait()
            except BaseException:  # an interrupt, too: nothing may go on writing when the folder is removed
                with contextlib.suppress(Exception):
                    checkpoints.wait()
                raise


def mapped(path: str, array: np.ndarray) -> np.ndarray:
    """An array as a new file that is mapped into memory."""
    try:
        with open(path, "wb") as file:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return np.asarray(np.memmap(path, array.dtype, "r", shape=array.shape))
    except OSError as error:
        folder = path.rpartition("/")[0]
        raise UserError(
            f"{folder}: the arrays can't be kept here until they are saved: {reason_of(error)}; make room, or, if the "
            "output is on gs://, set TMPDIR to another folder"
        ) from error


@contextlib.contextmanager
def new_checkpoints(output: epath.Path, option: str) -> Iterator[None]:
    """The folder of new checkpoints, which the option gave. After an error, process 0 removes what was made."""
    folder = output / "checkpoints"
    made, occupied = None, False
    with hosts.all_succeed(option), reachable(option, output):
        if hosts.is_first():
            made = folder if output.exists() else output
            folder.mkdir(parents=True, exist_ok=True)
            occupied = any(folder.iterdir())
    if hosts.any_process(occupied):
        raise UserErrorEverywhere(
            f"{option}: {output} already holds a checkpoint, or the remains of one; give another folder, or delete it"
        )
    try:
        yield
    except BaseException:
        if made:
            made.rmtree(missing_ok=True)
        raise


def size_on_disk(path: epath.Path) -> int:
    """Size in bytes of a file, or of all files in a folder."""
    return sum(map(size_on_disk, path.iterdir())) if path.is_dir() else path.stat().length
