"""The folder that holds a run's checkpoints: which are kept, and which one is opened."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from diffeqformer.data.seals import from_json, unsealed
from diffeqformer.errors import UserError, UserErrorEverywhere, out_of_memory, reachable, reason_of
from diffeqformer.orbax import ocp
from diffeqformer.parallel import hosts

REPLACED = "restore its files or, if a running training has replaced it, start again"
"""The remedy if a checkpoint of a run that may be training can't be read."""

BEST = "best"
Step = int | str | None
"""Which checkpoint of a folder: its training step, `BEST` for the one that validated best, or (None) the newest."""


class NoCheckpoint(UserError):
    """There is no complete checkpoint in a folder."""


class NoSuchStep(UserError):
    """The folder of a run has checkpoints, but not the one of that training step."""

    def __init__(self, sentence: str, step: int | str):
        super().__init__(sentence)
        self.step = step


class Damaged(UserError):
    """A checkpoint can't be read, or isn't what was saved."""

    def __init__(self, message: str, directory: epath.Path, step: int):
        super().__init__(message)
        self.directory, self.step = directory, step

    @property
    def found(self) -> str:
        """The message without its last part, the remedy."""
        return str(self).rsplit("; ", 1)[0]


def work_folder(workdir: epath.PathLike) -> epath.Path:
    """A work folder, on this machine or on gs://."""
    try:
        return epath.Path(workdir)
    except KeyError:
        raise UserError(f"--workdir: must be a folder of this machine or on gs://, but it is {workdir}") from None


def folder_of(workdir: epath.PathLike, name: str = "checkpoints") -> epath.Path:
    """The folder of a work folder's checkpoints, which can be on gs://."""
    folder = work_folder(workdir) / name
    folder = folder if "://" in str(folder) else folder.absolute()
    if any("\ud800" <= character <= "\udfff" for character in str(folder)):  # as Python shows other bytes
        raise UserError(f"--workdir: {folder.parent}: its path must be UTF-8; rename the folder whose name isn't")
    return folder


def begin_save(checkpoints: ocp.training.Checkpointer, step: int, items: dict, validation: dict | None = None) -> None:
    """Start saving in the background, after the save before it has ended. `checkpoints.wait()` raises its errors.

    What is saved may be donated as soon as this returns.
    """
    checkpoints.wait()  # Orbax itself would wait too late
    saving = checkpoints.save_checkpointables_async(step, items, force=True, metrics=validation)

    def end() -> None:
        with contextlib.suppress(Exception):
            saving.result()

    threading.Thread(target=end, daemon=True).start()  # a save's own thread and event loop, which Orbax would keep


def newest(checkpoints: ocp.training.Checkpointer) -> int | None:
    """The training step of the newest complete checkpoint; None if there is none."""
    return checkpoints.latest.step if checkpoints.latest else None


@contextlib.contextmanager
def opening(folder: epath.Path) -> Iterator[None]:
    """Turn any error into a UserError that names the folder of checkpoints."""
    try:
        yield
    except Exception as error:  # of the file system or a cloud client
        raise UserError(
            f"{folder}: these checkpoints can't be opened: {reason_of(error)}; check that the folder can be reached"
        ) from error


def steps_of(folder: epath.Path) -> list[int]:
    """The training steps of the complete checkpoints in a folder, in order."""
    with opening(folder):
        found = ocp.path.step.standard_name_format().find_all(folder) if folder.exists() else ()
        return sorted(checkpoint.step for checkpoint in found)


def chosen_step(folder: epath.Path, step: Step, workdir: epath.PathLike, option: str = "--step") -> int:
    """The training step of one of the checkpoints in a folder. Raises `NoCheckpoint` or `NoSuchStep`."""
    steps = steps_of(folder)
    if not steps:
        raise NoCheckpoint(f"{workdir}: there is no complete checkpoint here; run the training again")
    there = " or ".join(map(str, steps))
    if step == BEST:
        best = best_step(folder)
        if best is None:
            raise UserError(f"{option}: no checkpoint in {workdir} was saved with a validation; give {there}")
        return best
    if step is not None and str(step) not in map(str, steps):
        raise NoSuchStep(
            f"{option}: must be {BEST} or the step of a checkpoint in {workdir}, {there}, but it is {step}", step
        )
    return steps[-1] if step is None else int(step)


def once_more(read: Callable[[], Any]) -> Any:
    """What `read` returns of a checkpoint; once more if it found damage where a running training may have replaced one.

    Raises `Damaged` if the damaged one is the newest, or it found damage again.
    """
    try:
        return read()
    except Damaged as error:
        if error.step >= max(steps_of(error.directory), default=error.step):
            raise
    return read()


def best_step(folder: epath.Path) -> int | None:
    """The training step of the checkpoint with the lowest validation loss; None if none was saved with a validation."""
    losses = {}
    for step in reversed(steps_of(folder)):  # of equal ones, the newest, as in `open_to_write`
        if validation := validation_of(folder, step):
            losses[step] = validation["loss"]
    return min(losses, key=losses.get, default=None)


@contextlib.contextmanager
def readable(folder: epath.Path, step: int, remedy: str = "") -> Iterator[None]:
    """Turn an error in reading a checkpoint's files, or a wrong checksum, into `Damaged`, which ends with a remedy."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from the file system, TensorStore or a file's content
        while isinstance(error, (KeyError, ocp.errors.InvalidLayoutError)) and error.__cause__:
            error = error.__cause__  # Orbax hides what went wrong, even an interrupt, behind errors of its own
        if out_of_memory(error) or not isinstance(error, Exception):
            raise error from None
        remedy = remedy or "restore its files, or choose another checkpoint"
        remedy = "see that it can be read, and start again" if may_pass(error) else remedy
        message = f"{folder / str(step)}: this checkpoint can't be read: {reason_of(error)}; {remedy}"
        raise Damaged(message, folder, step) from error


def validation_of(folder: epath.Path, step: int) -> dict | None:
    """The validation that was saved with a checkpoint; None if there was none."""
    file = folder / str(step) / "metrics" / "metrics"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except Exception as error:  # of a disk or a cloud client
        raise UserError(f"{file}: this file can't be read: {reason_of(error)}; check that it can be reached") from error
    try:
        validation = unsealed(from_json(content))
        return {**validation, "loss": float(validation["loss"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "restore it, or let training set it aside"
        raise Damaged(f"{file}: this validation is damaged: {reason_of(error)}; {remedy}", folder, step) from error


def set_validations_aside(folder: epath.Path) -> None:
    """Move the validations aside that aren't what was saved. Their checkpoints then count as not validated."""
    for step in steps_of(folder):
        try:
            validation_of(folder, step)
        except Damaged as error:
            moved = move_aside(folder / str(step) / "metrics", folder.parent / "damaged", f"{step}-metrics")
            print(f"{error.found}; it is now {moved}, and its checkpoint counts as not validated", flush=True)


def set_aside(folder: epath.Path, step: int) -> epath.Path:
    """Move a damaged checkpoint out of the folder, so that training can go on from the one before it.

    Returns its new path: <workdir>/damaged/<step>, with a number if there already is such a one.
    """
    return move_aside(folder / str(step), folder.parent / "damaged", str(step))


def move_aside(path: epath.Path, aside: epath.Path, name: str) -> epath.Path:
    """Move a folder into another, which is made if it is missing, and return its new path."""
    try:
        aside.mkdir(parents=True, exist_ok=True)
        if "://" in str(aside):
            (aside / "about").write_text("Checkpoints that were set aside.\n")  # makes the folder exist
        names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        target = next(aside / name for name in names if not (aside / name).exists())
        path.rename(target)
    except Exception as error:  # cloud clients have many exceptions of their own
        raise UserError(f"{aside}: {path} can't be moved there: {reason_of(error)}") from error
    return target


PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED")


def may_pass(cause: BaseException | None) -> bool:
    """Whether what caused a `Damaged` may pass, such as a disk that can't be reached."""
    of_disk = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return of_disk or any(word in str(cause) for word in PASSING)


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
    if any(hosts.of_all(occupied)):
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
