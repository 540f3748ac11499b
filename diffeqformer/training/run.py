"""Opening a run: what all hosts must agree on, its folder, and its initial or restored state."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Set
from multiprocessing.pool import AsyncResult

import jax
from etils import epath
from jaxtyping import Array, Int
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.checkpoint import About
from diffeqformer.checkpoints.checksums import Differs
from diffeqformer.checkpoints.folder import (
    Damaged,
    folder_of,
    may_pass,
    newest,
    set_aside,
    set_validations_aside,
    steps_of,
)
from diffeqformer.config import check_config, check_fields, fields_of, saved_config
from diffeqformer.config_fields import OF_ONE_HOST
from diffeqformer.console.results import check_links
from diffeqformer.data.lock import only_run
from diffeqformer.data.preparation import open_prepared, store_folder
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError
from diffeqformer.orbax import ocp
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import bytes_of_device
from diffeqformer.parallel.mesh import make_mesh, mesh_shape
from diffeqformer.rules import decay_start
from diffeqformer.training import finetune, resuming
from diffeqformer.training.goodput import Stopwatch
from diffeqformer.training.room import check_memory, with_microbatches
from diffeqformer.training.step import Program
from diffeqformer.training.teacher import TeacherState, config_of_teacher, record_of_teacher, teacher_field
from diffeqformer.transformer import merge_trees


@dataclasses.dataclass(frozen=True)
class Run:
    """A run. It is ready for its steps after `open_run` and `start_or_resume`.

    Args:
        config: complete and checked, with the model of the base if there is one.
        folder: holds checkpoints and curves; no other run writes there.
        program: the compiled functions.
        splits: the token store's `train` and `validation`.
        about: the record of the next checkpoint, except that `validation_due` and `time_spent` are the newest one's.
        clock: counts where the run's time goes.
        verified: the check of the token store, which goes on in the background; None: it isn't checked.
        checkpoints: the run's, and the only writer of new ones.
        teacher_state: of its teacher, if there is one, once its steps begin.
    """

    config: ConfigDict
    folder: epath.Path
    program: Program
    splits: dict[str, Split]
    about: About
    clock: Stopwatch
    verified: AsyncResult | None = None
    checkpoints: ocp.training.Checkpointer | None = None
    teacher_state: tuple[TeacherState, ...] = ()

    def check_store(self, wait: bool = False) -> None:
        """Check that the token store hasn't been found damaged so far. With `wait`, first wait for its check to end."""
        if self.verified and (wait or self.verified.ready()):
            self.verified.get()

    def batch(self, step: int) -> Int[Array, "B S"]:
        """The global batch of a step, counted from 1, on the devices."""
        config, shape = self.config, (self.config.batch_size, self.config.sequence_length)
        return jax.make_array_from_callback(
            shape,
            self.program.shardings.batch,
            lambda index: self.splits["train"].batch(step - 1, *shape, config.seed, rows=index[0]),
        )

    def other_depths(self) -> tuple[int, ...]:
        """The numbers of steps of depth in training besides `config.model.num_steps`, which are validated as well."""
        return tuple(depth for depth in self.program.depths if depth != self.config.model.num_steps)


def complete(config: ConfigDict, workdir: epath.PathLike, given: Set[str] | None = None) -> ConfigDict:
    """The config with the model of its base, if it has one, checked for all devices and to be the same on all hosts."""
    check_fields(config)
    with hosts.all_succeed("the base"):
        config = finetune.inherit(config, workdir, given)
    check_config(config, jax.device_count(), jax.default_backend())
    shared = {f"config.{name}": value for name, value in fields_of(config).items() if name not in OF_ONE_HOST}
    hosts.check_same(shared, "give all of them the same config")
    return config


def saved_tokenizer(config: ConfigDict, workdir: epath.PathLike) -> tuple[str, str] | None:
    """Name and data of the tokenizer of a run's newest checkpoint, if it is of the config's kind."""
    saved, there = checkpoint.newest_readable(workdir)
    same = there and there.data.tokenizer == config.data.tokenizer
    return (saved.tokenizer, saved.tokenizer_data) if same else None


def agree(config: ConfigDict, folder: epath.Path, tokenizer: Tokenizer) -> tuple[dict[str, Split], About]:
    """The token store's splits and the record of the run's checkpoints, which are the same on all processes.

    A UserError comes on every process if one can't continue, or finds something different from the others.
    """
    about = About(config.to_dict(), tokenizer.name, tokenizer.save())
    if jax.process_count() > 1:  # from here on processes must agree, or they would wait for one another
        make_folder(folder)
        hosts.check_shared(folder)
    with hosts.all_succeed("the newest checkpoint"):  # fail before a corpus is prepared for hours
        saved = read_saved(config, folder, about)
        origins_of(config, about, saved)
    with hosts.all_succeed("the token store"):
        data = config.data.copy_and_resolve_references()
        store, before = store_folder(data, tokenizer), pathlib.Path(saved and saved.store or "")
        if not store.exists() and before.name == store.name and before.exists():
            data.dir = str(before.parent)  # where the run had it
        splits = open_prepared(data, tokenizer, config.sequence_length, saved is not None)
        store = os.path.abspath(store_folder(data, tokenizer))
    with hosts.all_succeed("the base"):  # its checkpoint now, as one of before the preparation may be gone
        origins = origins_of(config, about, saved)
    remedy = "give all hosts the same run, which has ended"
    hosts.check_same({f"config.{name}": origin for name, origin in origins.items()}, remedy)
    make_folder(folder)
    hashes = {"data_sha256": splits["train"].sha256, "validation_sha256": splits["validation"].sha256}
    hosts.check_same({"config.data.dir: the token store": hashes}, "give all hosts the same one")
    return splits, dataclasses.replace(about, store=store, **origins, **hashes)


def origins_of(config: ConfigDict, about: About, saved: About | None) -> dict[str, dict | None]:
    """What a run records of its base and its teacher: what its newest checkpoint has, or what is there now."""
    if saved:
        return {"base": saved.base, "teacher": saved.teacher}
    base = finetune.base_of(config, about) if config.base else None
    return {"base": base, "teacher": record_of_teacher(config, about) if config.teacher_weight else None}


def program_of(config: ConfigDict, workdir: epath.PathLike) -> Program:
    """The functions of a complete config on all devices, not yet compiled."""
    with hosts.all_succeed("the teacher"):
        teacher = config_of_teacher(config, jax.devices(), workdir)
    return Program(config, make_mesh(mesh_shape(config.mesh, jax.device_count())), teacher=teacher)


def make_program(config: ConfigDict, workdir: epath.PathLike = "") -> Program:
    """`program_of` a run, which may have no folder. Its config has a number of microbatches."""
    program = program_of(config, workdir)
    memory = bytes_of_device(program.mesh.local_devices)
    return with_microbatches(program, memory and min(hosts.of_all(memory)))


@contextlib.contextmanager
def open_run(run: Run) -> Iterator[Run]:
    """The run with its checkpoints, and its folder locked against other runs. Saves are complete at the block's end.

    A UserError says if the newest checkpoint can't be resumed with this config.
    """
    config, folder = run.config, run.folder
    with contextlib.ExitStack() as stack:
        with hosts.all_succeed("the work folder"):
            if hosts.is_first():
                stack.enter_context(only_run(folder))
                set_validations_aside(folder_of(folder))
            saved = read_saved(config, folder, run.about)  # again: another run may have written a checkpoint meanwhile
            if saved:
                resuming.check_unchanged(run.about, saved, folder)
        with hosts.all_succeed("the checkpoints before the decay"):
            if hosts.is_first() and saved:
                resuming.set_decayed_aside(config, saved_config(saved.config), folder)
        about = dataclasses.replace(run.about, validation_due=bool(config.base))
        opened = checkpoint.open_to_write(folder, config.checkpoints_kept, always=decay_start(config))
        yield dataclasses.replace(run, about=about, checkpoints=stack.enter_context(opened))


def make_folder(workdir: epath.Path) -> None:
    """Create the work folder if it is missing, or raise a UserError if that can't be."""
    with checkpoint.reachable("--workdir", workdir):
        if "://" not in str(workdir):
            check_links(pathlib.Path(workdir), "--workdir")
        (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (workdir / "parameters.txt").touch()


def read_saved(config: ConfigDict, workdir: epath.PathLike, about: About) -> About | None:
    """The record of the newest checkpoint, if this config can resume it; None if there is none."""
    saved, config_there = checkpoint.newest_readable(workdir)
    if saved is None:
        return None
    if saved.materialized_from is not None:
        raise UserError(
            f"{workdir}: holds a materialized or imported model, which has no optimizer state to resume; use another "
            "--workdir"
        )
    for field in ("base", "teacher"):
        if finetune.is_base_of(config, saved, config_there, field):
            config_there[field] = config[field]
    resuming.check_resumable(config, config_there, workdir)
    resuming.check_extendable(config, config_there, workdir)
    if about.tokenizer != saved.tokenizer:
        raise UserError(
            f"config.data.tokenizer_file: must be that of the run in {workdir}, {saved.tokenizer}, but it is "
            f"{about.tokenizer}; give the file that the run began with, or use another --workdir"
        )
    return saved


def start_or_resume(run: Run) -> tuple[Run, dict]:
    """The run with a new state, or the run as of its newest checkpoint that isn't damaged, with the state there.

    A UserError says if processes see different checkpoints, one can't be read, or there isn't enough memory.
    """
    folder = run.checkpoints.directory
    while (step := newest_step(run)) is not None:
        with hosts.all_succeed("the newest checkpoint"):
            saved = checkpoint.read_about(folder, step)
        kept = {name: getattr(saved, name) for name in ("base", "teacher", "validation_due", "time_spent")}
        about = dataclasses.replace(run.about, **kept, earlier_rates=resuming.earlier_rates(saved, step, run.config))
        run = dataclasses.replace(run, about=about)
        run.clock.resume(saved.time_spent, step)
        check_room(run, step)
        if (state := restored(run, step)) is not None:
            # Wait for all of it: after a failed allocation, a single scalar may never be ready.
            return run, jax.block_until_ready(state)
    check_room(run, None)
    return run, jax.block_until_ready(first_state(run))


def with_teacher(run: Run) -> Run:
    """The run with the state of its teacher, if it has one, which a new run saves for those that resume it."""
    teacher, record = run.program.loss.teacher, run.about.teacher
    if not teacher:
        return run
    print(f"its teacher is {record['workdir']} at step {record['step']:,}", flush=True)
    if newest(run.checkpoints) is None:
        loaded = finetune.load_base(run.config, record["step"], run.program.mesh, teacher_field(run.config))
        state = teacher.state(loaded.model)
        checkpoint.save_frozen(run.folder, state._asdict(), record, "teacher")
    else:
        state = TeacherState(**checkpoint.restore_frozen(run.folder, teacher.shapes._asdict(), record, "teacher"))
    return dataclasses.replace(run, teacher_state=(state,))


def newest_step(run: Run) -> int | None:
    """The step of the newest checkpoint, after those with damaged metadata are set aside; None if there is none."""
    folder = run.checkpoints.directory
    with hosts.all_succeed("the newest checkpoint"):
        for error in checkpoint.damaged_records(folder)[0] if hosts.is_first() else ():
            aside = set_aside(folder, error.step)
            print(f"{error.found}; it is now {aside}, and the one before it is taken", flush=True)
    run.checkpoints.reload()
    step = newest(run.checkpoints)
    seen = {f"{run.folder}: the newest checkpoint": step}
    hosts.check_same(seen, "start again when the disk shows the same to all hosts")
    return step


def check_room(run: Run, step: int | None) -> None:
    """Check that there is enough memory to go on from a checkpoint's step, or (None) to begin; this compiles."""
    run.clock.lap("start-up")
    with hosts.all_succeed("the memory"):
        for field in ("base", "teacher") if step is None else ():
            if run.config[field]:
                finetune.check_base_fits(run.config, getattr(run.about, field)["step"], run.program.mesh, field)
        check_memory(run.program, (step or 0) < run.config.steps)
    run.clock.lap("compilation")


def restored(run: Run, step: int) -> dict | None:
    """The state of a checkpoint; None if it is damaged and has been set aside. All processes call this together.

    A UserError says if it can't be read and stays, or if this process couldn't read it while others can.
    """
    if step < run.config.steps:
        print(f"Resuming {run.folder} from its checkpoint at step {step:,}", flush=True)
    for last, rate in (run.about.earlier_rates or {}).items():
        now = f"now it is {run.config.optimizer.learning_rate:g}, so this is another run"
        print(f"until step {int(last):,} its peak learning rate was {rate:g}; {now}", flush=True)
    folder, shapes, state, error = run.checkpoints.directory, run.program.state_shapes, None, None
    trained, frozen = run.program.loss.trained_and_frozen(shapes["params"])
    try:
        state = checkpoint.restore_state(folder, step, {**shapes, "params": trained})
        if frozen:  # which were saved once
            frozen = checkpoint.restore_frozen(run.folder, frozen, run.about.base)
            state["params"] = merge_trees(state["params"], frozen)
    except Damaged as raised:
        if jax.process_count() > 1 and not isinstance(raised.__cause__, Differs):
            # The others wait in the middle of reading.
            if aside := set_aside_if_damaged(folder, step):
                raise UserError(f"{aside}; start again to go on from the one before it") from raised
            raise
        error = raised
    if not any(hosts.of_all(error is not None)):
        return state
    with hosts.all_succeed("the newest checkpoint"):
        if hosts.is_first():
            aside = set_aside_if_damaged(folder, step)
            if not aside:
                raise error or UserError(f"{folder / str(step)}: another process can't read this checkpoint")
            print(f"{aside}, and the one before it is taken", flush=True)


def set_aside_if_damaged(folder: epath.Path, step: int) -> str | None:
    """Set a checkpoint aside if this process finds by itself that its bytes are damaged, and there is one before it.

    What else can end a restore is no damage: another process that has ended, a disk that can't be reached, frozen
    parameters, memory. Returns what was found and done; None if nothing was.
    """
    found = checkpoint.damage_of(folder, step)
    if found is None or may_pass(found.__cause__):
        return None
    if min(steps_of(folder), default=step) >= step or not (folder / str(step)).exists():
        return None
    return f"{found.found}; it is now {set_aside(folder, step)}"


def first_state(run: Run) -> dict:
    """The state before the first step: parameters drawn at random, or taken from the base."""
    config, program, base = run.config, run.program, run.about.base
    if not config.base:
        return program.init()
    print(f"beginning with {base['workdir']} at step {base['step']:,}", flush=True)
    state = program.init(finetune.initial_params(config, base["step"], program.mesh))
    _, frozen = program.loss.trained_and_frozen(state["params"])
    if frozen:
        checkpoint.save_frozen(run.folder, frozen, base)
    return state
