"""Damage: what is wrong with checkpoints, and which is the newest without any."""

import collections
import functools

from etils import epath
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checksums, stored_arrays
from diffeqformer.checkpoints.about import About
from diffeqformer.checkpoints.checkpoint import open_arrays, read_about, read_json, saved_tree
from diffeqformer.checkpoints.folder import Damaged, folder_of, may_pass, readable, steps_of
from diffeqformer.config import saved_config


def of_checkpoint(folder: epath.Path, step: int) -> Damaged | None:
    """What is wrong with a checkpoint, as this process finds by reading all of it by itself; None if nothing is."""
    reading = functools.partial(readable, folder, step)
    try:
        with reading():  # Orbax's own way would wait for other processes
            recorded = About.from_json(read_json(folder, step)).checksums
            arrays = open_arrays(folder, step, recorded)
            rest = [tuple(name.split("/")) for name in checksums.named(saved_tree(folder, step, "optimizer"))]
            where = folder / str(step) / "optimizer"
            for array in (arrays | stored_arrays.open_arrays(where, rest, reading, recorded, "/".join)).values():
                collections.deque(array.checked_blocks(), maxlen=0)
    except Damaged as found:
        return found


def damaged_records(folder: epath.Path) -> tuple[list[Damaged], tuple[int, About] | None]:
    """What is wrong with the metadata of the newest checkpoints, and the step and metadata of the first that are whole.

    Raises:
        Damaged: if something is wrong with all of them, or one can't be read for a reason that may pass.
    """
    found = []
    for step in reversed(steps_of(folder)):
        try:
            return found, (step, read_about(folder, step))
        except Damaged as error:
            if may_pass(error):
                raise
            found.append(error)
    if found:
        raise found[-1]
    return found, None


def newest_readable(workdir: epath.PathLike) -> tuple[About, ConfigDict] | None:
    """The metadata and config of the newest checkpoint whose metadata aren't damaged; None without a checkpoint."""
    folder = folder_of(workdir)
    _, newest = damaged_records(folder)
    if newest is None:
        return None
    step, about = newest
    with readable(folder, step):
        return about, saved_config(about.config)
