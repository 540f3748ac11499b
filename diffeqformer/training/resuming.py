"""What may change when a run is resumed. With the schedule `wsd` it can be given more steps, or a lower rate.

Then it goes on from before its decay. The decayed checkpoints move to <workdir>/ended-<steps>, with the curves until
then. That folder opens like a run.
"""

import dataclasses
import os

from etils import epath
from ml_collections import ConfigDict

from diffeqformer.checkpoints.about import About
from diffeqformer.checkpoints.folder import folder_of, move_aside, steps_of
from diffeqformer.config import field_names, get_field
from diffeqformer.config_fields import CHANGEABLE, OF_DECAY
from diffeqformer.errors import UserError, reachable
from diffeqformer.rules import decay_start


def schedule_changes(config: ConfigDict, saved: ConfigDict) -> bool:
    """Whether two configs of the schedule `wsd` differ in what a run may change before its decay."""
    stable = config.optimizer.schedule == saved.optimizer.schedule == "wsd"
    return stable and any(get_field(config, name) != get_field(saved, name) for name in OF_DECAY)


def check_resumable(config: ConfigDict, saved: ConfigDict, where: os.PathLike) -> None:
    """Check that a run of `config` continues the one that saved `saved`.

    Raises:
        UserError: naming the fields that differ.
    """
    names = sorted({*field_names(config), *field_names(saved)})
    differing = {}
    for name in names:
        ours, theirs = (get_field(c, name) if name in field_names(c) else "absent" for c in (config, saved))
        if ours != theirs and name not in CHANGEABLE:
            differing[name] = f"config.{name} (there {theirs!r}, now {ours!r})"
    if schedule_changes(config, saved):
        ours, theirs = config.optimizer.learning_rate, saved.optimizer.learning_rate
        differing = {name: said for name, said in differing.items() if name not in OF_DECAY}
        if ours > theirs:
            what = "config.optimizer.learning_rate"
            differing[what] = f"{what} (there {theirs!r}, now {ours!r}; it may only be lowered)"
    if differing:
        more = ""
        if "steps" in differing and saved.optimizer.schedule == "cosine":
            more = "; to train its model further, begin a new run with it "
            more += f"(--config.base={where}); one with config.optimizer.schedule=wsd can be given more steps"
        raise UserError(
            f"{where}: holds a run with another {', '.join(differing.values())}; use another --workdir, the same "
            f"config, or delete the folder{more}"
        )


def check_unchanged(what: str, about: About, saved: About | None, workdir: epath.PathLike) -> None:
    """Check that the run so far had the same ids (`data_sha256`, `validation_sha256`).

    An earlier version didn't record the last one.
    """
    if saved is None or (what == "validation_sha256" and not saved.validation_sha256):
        return
    ours, theirs = getattr(about, what), getattr(saved, what)
    if ours != theirs:
        raise UserError(
            f"config.data.dir: the token store has another {what} ({ours}) than the run in {workdir} "
            f"({theirs}); use another --workdir, or the run's own store"
        )


def last_stable(config: ConfigDict, saved: ConfigDict) -> int | None:
    """The last step until which a run of `config` can go on from one of `saved`; None if the schedules are equal."""
    return min(decay_start(config), decay_start(saved)) if schedule_changes(config, saved) else None


def check_extendable(config: ConfigDict, saved: ConfigDict, workdir: epath.PathLike) -> None:
    """Check that a run has a checkpoint from before its decay, if it needs one to go on with this config.

    Args:
        saved: the config of its newest checkpoint.

    Raises:
        UserError: if not, or if it is given no more steps.
    """
    limit, steps = last_stable(config, saved), steps_of(folder_of(workdir))
    if limit is None or steps[-1] <= limit:
        return
    if config.steps <= saved.steps:
        raise UserError(
            f"config.steps: must be above {saved.steps:,} to go on from before the decay of the run in {workdir}, but "
            f"it is {config.steps:,}; give it more, or use another --workdir"
        )
    if steps[0] > limit:
        raise UserError(
            f"{workdir}: a run with these steps or this rate has to go on from a checkpoint of step {limit:,} or "
            f"before, but there are {', '.join(map(str, steps))}; use another --workdir"
        )


def set_decayed_aside(config: ConfigDict, saved: ConfigDict, workdir: epath.Path) -> None:
    """Move the checkpoints after which a run of `config` takes another course, if its schedule has changed.

    Args:
        saved: the config of its newest checkpoint.
    """
    limit, folder = last_stable(config, saved), folder_of(workdir)
    decayed = [step for step in steps_of(folder) if limit is not None and step > limit]
    if not decayed:
        return
    ended = workdir / f"ended-{saved.steps}"
    with reachable("--workdir", workdir):
        for file in (workdir / "tensorboard").glob("*.tfevents.*"):
            (ended / "tensorboard").mkdir(parents=True, exist_ok=True)
            (ended / "tensorboard" / file.name).write_bytes(file.read_bytes())
    if (workdir / "trackers").exists():
        move_aside(workdir / "trackers", ended, "trackers")  # so that what goes on is tracked as another run
    for step in reversed(decayed):
        move_aside(folder / str(step), ended / "checkpoints", str(step))
    print(
        f"the checkpoints after step {limit:,}, of the decay until step {saved.steps:,}, are now in {ended}", flush=True
    )


def with_rates(about: About, saved: About, step: int, config: ConfigDict) -> About:
    """The record of a run that goes on from a checkpoint, with the higher rates that it had until there, if any.

    Args:
        about: the record of its next checkpoints.
        saved: that of the checkpoint.
        step: of the checkpoint.
    """
    before = saved.config["optimizer"]["learning_rate"]
    changed = {str(step): before} if before != config.optimizer.learning_rate else {}
    return dataclasses.replace(about, earlier_rates={**(saved.earlier_rates or {}), **changed} or None)
