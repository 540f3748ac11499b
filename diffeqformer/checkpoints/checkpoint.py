"""Checkpoints, by Orbax: parameters, optimizer state, config and tokenizer of a run in one place.

    <workdir>/checkpoints/<step>/{params, optimizer, about, metrics}; metrics if it was just validated
    <workdir>/frozen/0/params: the frozen parameters, if there are any; saved once. <workdir>/teacher: a teacher's

A checkpoint's folder gets its name, the step, only when it is complete (on gs://, it then has `commit_success.txt`).
`about` (`about.About`) holds the config, the tokenizer and the hash of the training data, so a checkpoint can be opened
on any machine without other files. A materialized model (`diffeqformer.materialize`) has no optimizer.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from etils import epath
from flax import nnx, traverse_util
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checksums, stored_arrays
from diffeqformer.checkpoints.about import About
from diffeqformer.checkpoints.finite import check_parameters
from diffeqformer.checkpoints.folder import (
    Damaged,
    NoCheckpoint,
    Step,
    begin_save,
    chosen_step,
    folder_of,
    may_pass,
    once_more,
    opening,
    readable,
    steps_of,
    work_folder,
)
from diffeqformer.config import saved_config
from diffeqformer.data.seals import from_json, sealed, unsealed
from diffeqformer.data.tokenizers import Tokenizer, restore_tokenizer
from diffeqformer.errors import Stopped, UserError, out_of_memory, reachable, reason_of
from diffeqformer.orbax import awaited, ocp
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import check_free, placed
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.parallel.sharding import shardings
from diffeqformer.transformer import (
    Path,
    Transformer,
    abstract_model,
    divide_copies,
    merge_trees,
    partition_specs,
    select,
    split_model,
)


@contextlib.contextmanager
def open_to_write(
    workdir: epath.PathLike, kept: int, name: str = "checkpoints", always: int | None = None
) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints of a work folder, for a `with` block. Saves are complete when the block ends.

    Kept are the newest `kept`, the one that validated best, and that of the step `always`. The remains of an
    interrupted save are removed. If only one of several processes fails, it doesn't wait for saves: Orbax would wait
    for the others.
    """
    folder, policies = folder_of(workdir, name), ocp.training.preservation_policies
    loss = operator.itemgetter("loss")
    best = policies.BestN(get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
    policy = policies.AnyPreservationPolicy([policies.LatestN(kept), best, policies.CustomSteps([always])])
    with opening(folder):
        checkpoints = ocp.training.Checkpointer(
            folder, context=stored_arrays.context(), preservation_policy=policy, cleanup_tmp_directories=True
        )
    try:
        yield checkpoints
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, Stopped):
            with contextlib.suppress(Exception):  # which would hide this one
                checkpoints.close()
        raise
    with written(checkpoints):
        checkpoints.close()


def save(
    checkpoints: ocp.training.Checkpointer,
    step: int,
    state: dict,
    about: About,
    validation: dict[str, float] | None = None,
) -> None:
    """Start saving the state after `step` steps, which may be donated as soon as this returns.

    Args:
        state: see `diffeqformer.training.step`; only the parameters if the model won't be trained further.
        validation: what the validation after this step found, with its `loss`; None if there was none.
    """
    about = dataclasses.replace(about, checksums=checksums.of_tree(state))
    items = {"params": state["params"], "about": about.to_json()}
    rest = {name: value for name, value in state.items() if name != "params"}
    if rest:
        items["optimizer"] = rest
    with written(checkpoints):
        begin_save(checkpoints, step, items, validation and sealed(validation))


@contextlib.contextmanager
def written(checkpoints: ocp.training.Checkpointer) -> Iterator[None]:
    """Turn an error of a save, in the foreground or background, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from the file system, TensorStore or another host
        if out_of_memory(error):
            raise
        raise UserError(
            f"{checkpoints.directory}: a checkpoint can't be written or deleted: {reason_of(error)}; the others are "
            "untouched, and the same command resumes from the newest"
        ) from error


def save_alone(workdir: epath.PathLike, step: int, params: dict, about: About) -> None:
    """Save parameters as the only checkpoint of a work folder, and wait until that is done."""
    with open_to_write(workdir, 1) as checkpoints:
        save(checkpoints, step, {"params": params}, about)
        try:
            check(checkpoints, wait=True)
        except BaseException:  # an interrupt, too: nothing may go on writing when the folder is removed
            with contextlib.suppress(Exception):
                checkpoints.wait()
            raise


def check(checkpoints: ocp.training.Checkpointer, wait: bool = False) -> None:
    """Check that no save in the background has failed. With `wait`, first wait for it to end."""
    with written(checkpoints):
        if wait or not checkpoints.is_saving_in_progress():
            checkpoints.wait()


def read_about(folder: epath.Path, step: int) -> About:
    with readable(folder, step):
        return About.from_json(read_json(folder, step))


def read_json(folder: epath.Path, step: int) -> dict:
    """What Orbax saved as `about`, without waiting for other processes, as Orbax would."""
    about = folder / str(step) / "about"
    try:
        return from_json((about / "data.json").read_bytes())
    except FileNotFoundError:
        return from_json((about / "metadata").read_bytes())  # of version 0 of Orbax's interface


def restore_state(folder: epath.Path, step: int, abstract_state: dict) -> dict:
    """The state saved at `step`, placed according to `abstract_state` (`jax.ShapeDtypeStruct`s with shardings).

    Raises `Damaged` if it can't be read, or isn't what was saved.
    """
    recorded = read_about(folder, step).checksums
    rest = {name: value for name, value in abstract_state.items() if name != "params"}
    with readable(folder, step):
        items = {"params": abstract_state["params"], "optimizer": rest}
        restored = ocp.load_checkpointables(folder / str(step), items)
        state = {"params": restored["params"], **restored["optimizer"]}
        checksums.check(state, recorded)
    return state


def saved_arrays(folder: epath.Path, step: int, remedy: str = "") -> dict[Path, Any]:
    """Shape and dtype of the parameters of a checkpoint, by path, without reading the parameters."""
    with readable(folder, step, remedy):
        return traverse_util.flatten_dict(saved_tree(folder, step, "params"))


def saved_tree(folder: epath.Path, step: int, item: str) -> Any:
    """What Orbax knows of an item's arrays. `ocp.metadata` wouldn't say why it can't be read."""
    return awaited(ocp.handlers.PyTreeHandler().metadata(folder / str(step) / item))


def open_arrays(
    folder: epath.Path, step: int, recorded: dict[str, str] | None, remedy: str = ""
) -> dict[Path, stored_arrays.StoredArray]:
    """The parameters of a checkpoint on disk, by path. Needs neither a model nor the devices of training.

    Those that are read as a whole are compared with `recorded`, the `About.checksums`.
    """
    reading = functools.partial(readable, folder, step, remedy)
    names = {path: "/".join(("params", *path)) for path in saved_arrays(folder, step, remedy)}
    return stored_arrays.open_arrays(folder / str(step) / "params", names, reading, recorded)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    step: int
    config: ConfigDict
    model: Transformer
    tokenizer: Tokenizer
    about: About


class Opened(NamedTuple):
    """The folder of a run's checkpoints, and the step, metadata and config of one of them."""

    folder: epath.Path
    step: int
    about: About
    config: ConfigDict


def open_to_read(workdir: epath.PathLike, option: str = "--workdir", step: Step = None) -> Opened:
    """A checkpoint of a work folder. Its arrays aren't read, and nothing is written."""
    folder = folder_of(workdir)
    with reachable(option, workdir):
        there = folder.is_dir()
    if not there:
        raise NoCheckpoint(f"{workdir}: there is no checkpoint here; give the folder of a run")
    step = chosen_step(folder, step, workdir, "--step" if option == "--workdir" else f"{option}, after its @")
    about = read_about(folder, step)
    with readable(folder, step):
        return Opened(folder, step, about, saved_config(about.config))


def load_config(workdir: epath.PathLike, step: Step = None, of: str = "--workdir") -> ConfigDict:
    """The config of a checkpoint. Its parameters aren't read."""
    return once_more(lambda: open_to_read(workdir, of, step)).config


def save_frozen(workdir: epath.PathLike, params: dict, base: dict, name: str = "frozen") -> None:
    """Save what a new run keeps `frozen`, or its `teacher`, with the record of its origin, in a folder of that name.

    The run's checkpoints won't hold it. What is there is replaced.
    """
    with hosts.all_succeed("the frozen weights"), reachable("--workdir", workdir):
        if hosts.is_first():
            folder_of(workdir, name).rmtree(missing_ok=True)
    with open_to_write(workdir, 1, name) as checkpoints, written(checkpoints):
        record = sealed({**base, "checksums": checksums.of_tree({"params": params})})
        begin_save(checkpoints, 0, {"params": params, "about": record})
        checkpoints.wait()


def open_frozen(
    workdir: epath.PathLike, base: dict, name: str = "frozen"
) -> tuple[epath.Path, dict[str, str] | None, str]:
    """The folder of `save_frozen`'s checkpoint, whose step is 0, its checksums, and the remedy if it can't be read."""
    folder, remedy = folder_of(workdir, name), "restore the folder that the run made"
    with reachable("--workdir", workdir):
        if work_folder(workdir).name.startswith("ended-") and not folder.exists():  # inside the run's folder
            folder = folder.parent.parent / name
        there = (folder / "0").is_dir()
    if not there:
        raise UserError(f"{folder}: frozen weights of this run are missing; {remedy}")
    with readable(folder, 0, remedy):
        theirs = unsealed(read_json(folder, 0))
        recorded = theirs.pop("checksums", None)
    if theirs != base:
        raise UserError(f"{folder}: these frozen weights belong to another run; {remedy}")
    return folder, recorded, remedy


def restore_frozen(workdir: epath.PathLike, abstract: dict, base: dict, name: str = "frozen") -> dict:
    """The parameters of `save_frozen`, placed according to `abstract`."""
    folder, recorded, remedy = open_frozen(workdir, base, name)
    with readable(folder, 0, remedy):
        params = ocp.load(folder / "0", abstract, checkpointable_name="params")
        checksums.check({"params": params}, recorded)
    return params


def load(workdir: epath.PathLike, mesh: Mesh | None = None, step: Step = None, of: str = "--workdir") -> Checkpoint:
    """Open a checkpoint of a run, or a materialized model. Nothing is written, so the run may still be training.

    Parameters have the type in which they were saved. The optimizer's state isn't read.

    Args:
        mesh: devices over which the parameters are sharded, a generator over its copies (`data`), too; by default all
            are on the first device.
    """
    return once_more(lambda: _load(workdir, mesh, step, of))


def _load(workdir: epath.PathLike, mesh: Mesh | None, step: Step, of: str) -> Checkpoint:
    folder, step, about, config = open_to_read(workdir, of, step)
    model = abstract_model(config)
    graph, params = split_model(model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: device, params)
    else:
        places = shardings(divide_copies(model, mesh), partition_specs(model))
    trained, frozen = (select(params, lambda path, of=of: model.trains(path) == of) for of in (True, False))
    replaced = "start again, with the newest checkpoint"  # a running training removes old ones
    with readable(folder, step, "" if step == max(steps_of(folder), default=step) else replaced):
        saved = saved_tree(folder, step, "params")
        target = jax.tree.map(lambda leaf, saved: leaf.update(dtype=saved.dtype), trained, saved)
        target = placed(target, select(places, model.trains))
        parts = 1 if mesh is None else mesh.size  # at most, as not every array is divided
        check_free(f"{workdir}: its parameters", [target, frozen], 1 / parts, "use a machine with more memory")
        restored = ocp.load(folder / str(step), target, checkpointable_name="params")
        checksums.check({"params": restored}, about.checksums)
        tokenizer = restore_tokenizer(about.tokenizer, about.tokenizer_data)
    if frozen:
        rest = placed(frozen, select(places, lambda path: not model.trains(path)))
        restored = merge_trees(restored, restore_frozen(workdir, rest, about.base))
    check_parameters(restored, f"{workdir}, checkpoint {step}")
    return Checkpoint(step, config, nnx.merge(graph, restored), tokenizer, about)


def load_on_all(workdir: epath.PathLike, step: Step = None) -> Checkpoint:
    """A checkpoint on all devices of all processes (`load`)."""
    with hosts.all_succeed("the checkpoint"):
        if jax.process_count() == 1:
            return load(workdir, make_mesh(), step)
        step = open_to_read(workdir, step=step).step
    hosts.check_same({"--workdir: the checkpoint": step}, "start again, or wait until training has ended")
    with hosts.all_succeed("the checkpoint"):
        return _load(workdir, make_mesh(), step, "--workdir")  # no host tries again alone


def damage_of(folder: epath.Path, step: int) -> Damaged | None:
    """What is wrong with a checkpoint, as this process finds by reading all of it by itself; None if nothing is."""
    reading = functools.partial(readable, folder, step)
    try:
        with reading():  # Orbax's own way would wait for other processes
            recorded = About.from_json(read_json(folder, step)).checksums
            arrays = open_arrays(folder, step, recorded)
            rest = {tuple(name.split("/")): name for name in checksums.named(saved_tree(folder, step, "optimizer"))}
            arrays |= stored_arrays.open_arrays(folder / str(step) / "optimizer", rest, reading, recorded)
            for array in arrays.values():
                collections.deque(array.checked_blocks(), maxlen=0)
    except Damaged as found:
        return found


def damaged_records(folder: epath.Path) -> tuple[list[Damaged], int | None, About | None]:
    """What is wrong with the metadata of the newest checkpoints, and the step and metadata of the first that are whole.

    Raises `Damaged` if something is wrong with all of them, or one can't be read for a reason that may pass.
    """
    found = []
    for step in reversed(steps_of(folder)):
        try:
            return found, step, read_about(folder, step)
        except Damaged as error:
            if may_pass(error.__cause__):
                raise
            found.append(error)
    if found:
        raise found[-1]
    return found, None, None


def newest_readable(workdir: epath.PathLike) -> tuple[About | None, ConfigDict | None]:
    """The metadata and config of the newest checkpoint whose metadata aren't damaged; None, None if there is none."""
    folder = folder_of(workdir)
    _, step, about = damaged_records(folder)
    if about is None:
        return None, None
    with readable(folder, step):
        return about, saved_config(about.config)
