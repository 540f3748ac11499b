"""Write a model's weights at the times of one grid as a small checkpoint.

    python -m diffeqformer.materialize --workdir=runs/tiny --num_steps=4 --dtype=bfloat16

The hypernetwork and the optimizer's state are left out. The result is as small as a vanilla transformer, and every
command that takes a run also takes it.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator

import numpy as np
from absl import flags, logging
from etils import epath
from flax import traverse_util

from diffeqformer.checkpoints import checkpoint, checksums
from diffeqformer.checkpoints.finite import not_finite
from diffeqformer.checkpoints.folder import REPLACED, Step, begin_save, new_checkpoints, once_more, size_on_disk
from diffeqformer.console import command_line
from diffeqformer.console.results import check_link
from diffeqformer.console.terminal import show_progress
from diffeqformer.errors import UserError, reason_of
from diffeqformer.inference.discretize import discretized_arrays, discretized_config
from diffeqformer.parallel import hosts
from diffeqformer.transformer import MODELS, Path


def materialize(
    workdir: epath.PathLike,
    num_steps: int | None = None,
    dtype: str | None = None,
    output: epath.PathLike | None = None,
    step: Step = None,
) -> epath.Path:
    """Write a checkpoint of a run as a discretized model, numbered by its training step, and return the folder.

    Args:
        workdir: folder of the run.
        num_steps: steps of depth; None: as trained.
        dtype: float32 or bfloat16, of weights and computation; None: the run's compute type.
        output: folder of the new checkpoint, which must not hold one yet; by default a subfolder of the run's.
        step: see `diffeqformer.checkpoints.folder.Step`.
    """
    folder, step, about, config = checkpoint.open_to_read(workdir, step=step)
    if config.model.solver not in MODELS["discretized"].solvers(unit_steps=not config.model.span):
        raise UserError(
            f"--workdir: a model that was trained with {config.model.solver} takes weights at several times of each "
            "step, and a materialized one has one set; use the run itself, or fine-tune it with --config.base"
        )
    num_steps = config.model.num_steps if num_steps is None else num_steps
    dtype = dtype or config.model.dtype
    stored = checkpoint.open_arrays(folder, step, about.checksums, REPLACED)
    if config.model.lora_rank:
        frozen, recorded, remedy = checkpoint.open_frozen(workdir, about.base)
        stored |= checkpoint.open_arrays(frozen, 0, recorded, remedy)
    if not output:
        output = epath.Path(workdir) / f"materialized-{num_steps}-{dtype}"
        check_link(output, "--workdir")
    trained = (about.materialized_from or {}).get("model", config.model.to_dict())
    about = dataclasses.replace(
        about,
        config=discretized_config(config, num_steps, dtype).to_dict(),
        materialized_from={"workdir": str(workdir), "step": step, "model": trained},
        time_spent=None,
    )
    arrays = discretized_arrays(config, stored, num_steps, dtype, show_progress("weights", "layers"))
    with new_checkpoints(epath.Path(output), "--output"):
        checked, bad = show_progress("checksums", "arrays"), []
        for done, array in enumerate(stored.values(), 1):  # in a pass of its own: each layer reads a part of it
            if not all([np.isfinite(block).all() for block in array.checked_blocks()]):
                bad.append(array.name)
            checked(done, len(stored))
        if bad:  # after all checksums: damage may look like it
            raise not_finite(f"{workdir}, checkpoint {step}", bad[0])
        save_one_by_one(epath.Path(output), step, arrays, about)
    return epath.Path(output)


def save_one_by_one(
    workdir: epath.PathLike, step: int, arrays: Iterator[tuple[Path, np.ndarray]], about: checkpoint.About
) -> None:
    """Save parameters as the only checkpoint of a folder. Each is made after the one before it is on disk.

    They are written twice: as they are made, to files that are then mapped into memory, and as Orbax stores them.
    """
    made, found = {}, {}
    with checkpoint.open_to_write(workdir, 1) as checkpoints, checkpoint.written(checkpoints):
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


def main() -> None:
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    step = command_line.define_step()
    num_steps = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    dtype = flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Type of weights and computation; by default as in training."
    )
    output = flags.DEFINE_string("output", None, "Folder to write; by default materialized-STEPS-DTYPE in the run's.")

    def command() -> None:
        hosts.check_one("materialize: this command")
        folder = once_more(lambda: materialize(workdir.value, num_steps.value, dtype.value, output.value, step.value))
        print(f"{folder}: {size_on_disk(folder) / 1e6:,.1f} MB; use it like the run, with --workdir={folder}")

    command_line.run(command, verbosity=logging.FATAL)


if __name__ == "__main__":
    main()
