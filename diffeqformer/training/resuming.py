"""What may change when a run is resumed. With the schedule `wsd` it can be given more steps, or a lower rate.

Then it goes on from before its decay. The decayed checkpoints move to <workdir>/ended-<steps>, with the curves until
then. That folder opens like a run.
"""

import os

from etils import epath
from ml_collections import ConfigDict

from diffeqformer.checkpoints.about import About
from diffeqformer.checkpoints.folder import folder_of, move_aside, steps_of
from diffeqformer.config import fields_of, get_field
from diffeqformer.config_fields import CHANGEABLE, OF_DECAY
from diffeqformer.errors import UserError, reachable
from diffeqformer.rules import decay_start


def last_stable(config: ConfigDict, saved: ConfigDict) -> int | None:
    """The last step until which a run of `config` can go on from one of `saved`; None if the schedules are equal."""
    stable = config.optimizer.schedule == saved.optimizer.schedule == "wsd"
    differ = any(get_field(config, name) != get_field(saved, name) for name in OF_DECAY)
    return min(decay_start(config), decay_start(saved)) if stable and differ else None


def check_resumable(config: ConfigDict, saved: ConfigDict, where: os.PathLike) -> None:
    """Check that a run of `config` continues the one that saved `saved`, or raise a UserError with what differs."""
    extends, differing, more = last_stable(config, saved) is not None, [], ""
    now, there = fields_of(config), fields_of(saved)
    for name in sorted({*now, *there}):
        ours, theirs = now.get(name, "absent"), there.get(name, "absent")
        raised = extends and name == "optimizer.learning_rate" and ours > theirs
        may_differ = name in CHANGEABLE or (extends and name in OF_DECAY and not raised)
        if ours != theirs and not may_differ:
            differing.append(f"config.{name} (there {theirs!r}, now {ours!r}{'; it may only be lowered' * raised})")
            if name == "steps" and saved.optimizer.schedule == "cosine":
                more = "; to train its model further, begin a new run with it "
                more += f"(--config.base={where}); one with config.optimizer.schedule=wsd can be given more steps"
    if differing:
        raise UserError(
            f"{where}: holds a run with another {', '.join(differing)}; use another --workdir, the same config, or "
            f"delete the folder{more}"
        )


def check_unchanged(about: About, saved: About, workdir: epath.PathLike) -> None:
    """Check that the run so far had the same ids. An earlier version didn't record those of the validation."""
    for what in ("data_sha256", "validation_sha256"):
        ours, theirs = getattr(about, what), getattr(saved, what)
        if theirs and ours != theirs:
            raise UserError(
                f"config.data.dir: the token store has another {what} ({ours}) than the run in {workdir} "
                f"({theirs}); use another --workdir, or the run's own store"
            )


def check_extendable(config: ConfigDict, saved: ConfigDict, workdir: epath.PathLike) -> None:
    """Check that a run that saved `saved` is given more steps, and has a checkpoint of before its decay, if need be."""
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
    """Move the checkpoints after which a run of `config` takes another course than that of `saved`, if any."""
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


def earlier_rates(saved: About, step: int, config: ConfigDict) -> dict | None:
    """The higher rates, by their last step, that a run had before it goes on from the checkpoint of a step, if any."""
    before = saved.config["optimizer"]["learning_rate"]
    changed = {str(step): before} if before != config.optimizer.learning_rate else {}
    return {**(saved.earlier_rates or {}), **changed} or None
