"""Checkpoints, by Orbax: parameters, optimizer state, config and tokenizer of a run in one place.

    <workdir>/checkpoints/<step>/{params, optimizer, about, metrics}; metrics if it was just validated
    <workdir>/frozen/0/params: the frozen parameters, if there are any; saved once

A checkpoint's folder gets its name, the step, only when it is complete (on gs://, it then has `commit_success.txt`).
`about` (`diffeqformer.about.About`) holds the config, the tokenizer and the hash of the training data, so a checkpoint
can be opened on any machine without other files. A materialized model (`diffeqformer.materialize`) has no optimizer.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx, traverse_util
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffeqformer import checksums, stored_arrays
from diffeqformer.about import About
from diffeqformer.checkpoint_folder import (
    Damaged,
    NoCheckpoint,
    Step,
    chosen_step,
    folder_of,
    handlers,
    older,
    open_checkpoints,
    open_read_only,
    readable,
)
from diffeqformer.config import saved_config
from diffeqformer.data.seals import from_json, sealed, unsealed
from diffeqformer.data.tokenizers import Tokenizer, restore_tokenizer
from diffeqformer.errors import Stopped, UserError, out_of_memory, reachable, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import check_free
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
def open_to_write(workdir: epath.PathLike, kept: int, name: str = "checkpoints") -> Iterator[ocp.CheckpointManager]:
    """The manager of `open_checkpoints`, for a `with` block. Saves are complete when the block ends.

    If only one of several processes fails, it doesn't wait for saves: Orbax would wait for the others.
    """
    manager = open_checkpoints(workdir, kept, name)
    try:
        yield manager
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, Stopped):
            manager.close()
        raise
    manager.close()


def save(
    manager: ocp.CheckpointManager, step: int, state: dict, about: About, validation: dict[str, float] | None = None
) -> None:
    """Start saving the state after `step` steps, which may be donated as soon as this returns.

    Args:
        state: see `diffeqformer.training.step`; only the parameters if the model won't be trained further.
        validation: what the validation after this step found, with its `loss`; None if there was none.
    """
    about = dataclasses.replace(about, checksums=checksums.of_tree(state))
    items = {"params": stored_arrays.standard_save(state["params"]), "about": ocp.args.JsonSave(about.to_json())}
    rest = {name: value for name, value in state.items() if name != "params"}
    if rest:
        items["optimizer"] = stored_arrays.standard_save(rest)
    with written(manager):
        manager.save(step, args=ocp.args.Composite(**items), metrics=validation and sealed(validation))


def save_one_by_one(
    workdir: epath.PathLike, step: int, shapes: dict, arrays: Iterator[tuple[Path, np.ndarray]], about: About
) -> None:
    """Save parameters, each before the next one is made, as the only checkpoint of a folder.

    Args:
        shapes: their shapes and types.
        arrays: makes the parameters, with their paths.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)

    def record(found):
        return dataclasses.replace(about, checksums=found).to_json()

    own, items = stored_arrays.one_by_one(shapes, arrays, record)
    with ocp.CheckpointManager(folder_of(workdir), options=options, item_handlers=handlers() | own) as manager:
        with written(manager):
            manager.save(step, args=ocp.args.Composite(**items))


@contextlib.contextmanager
def written(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Turn an error of a save, in the foreground or background, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from the file system, TensorStore or another host
        if out_of_memory(error):
            raise
        raise UserError(
            f"{manager.directory}: a checkpoint can't be written: {reason_of(error)}; earlier ones are untouched, and "
            "the same command resumes from the newest"
        ) from error


def check(manager: ocp.CheckpointManager, wait: bool = False) -> None:
    """Check that no save in the background has failed. With `wait`, first wait for saves to finish.

    `manager.check_for_errors` isn't enough: once it has raised an error, Orbax considers that save complete.

    Raises:
        UserError: if one has failed.
    """
    with written(manager):
        if wait or not manager.is_saving_in_progress():
            manager.wait_until_finished()


def read_about(manager: ocp.CheckpointManager, step: int) -> About:
    """The metadata stored in a checkpoint.

    Raises:
        UserError: if it can't be read.
    """
    with readable(manager, step):
        return About.from_json(_read_json(manager, step))


def _read_json(manager: ocp.CheckpointManager, step: int) -> dict:
    return manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]


def restore_state(manager: ocp.CheckpointManager, step: int, abstract_state: dict) -> dict:
    """The state saved at `step`, placed according to `abstract_state` (`jax.ShapeDtypeStruct`s with shardings).

    Raises:
        Damaged: if it can't be read, or isn't what was saved.
    """
    recorded = read_about(manager, step).checksums
    rest = {name: value for name, value in abstract_state.items() if name != "params"}
    with readable(manager, step):
        restored = manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract_state["params"]), optimizer=ocp.args.StandardRestore(rest)
            ),
        )
        state = {"params": restored["params"], **restored["optimizer"]}
        check_arrays(state, recorded)
    return state


def check_arrays(tree: dict, recorded: dict[str, str] | None) -> None:
    """Compare the checksums of a restored tree with those that were saved, if there are any.

    Raises:
        Differs: for the first array that differs.
    """
    if recorded is not None:
        checksums.check(checksums.of_tree(tree), recorded)


def saved_arrays(manager: ocp.CheckpointManager, step: int, remedy: str = "") -> dict[Path, Any]:
    """Shape and dtype of the parameters of a checkpoint, by path, without reading the parameters.

    Raises:
        UserError: if they can't be read.
    """
    with readable(manager, step, remedy):
        return traverse_util.flatten_dict(manager.item_metadata(step)["params"].tree)


def open_arrays(
    manager: ocp.CheckpointManager, step: int, recorded: dict[str, str] | None, remedy: str = ""
) -> dict[Path, stored_arrays.StoredArray]:
    """The parameters of a checkpoint on disk, by path. Needs neither a model nor the devices of training.

    Args:
        recorded: `About.checksums`, with which those are compared that are read as a whole.

    Raises:
        UserError: if they can't be read, now or later.
    """
    reading = functools.partial(readable, manager, step, remedy)
    saved = saved_arrays(manager, step, remedy)
    with reading():
        return stored_arrays.open_arrays(saved, reading, recorded)


def damage(manager: ocp.CheckpointManager, step: int) -> Damaged | None:
    """What is wrong with a checkpoint, as this process finds by reading all of it by itself; None if nothing is."""
    reading = functools.partial(readable, manager, step)
    try:
        with reading():  # Orbax's own way would wait for other processes
            record = from_json((manager.directory / str(step) / "about" / "metadata").read_text())
            items = manager.item_metadata(step)
            state = {"params": items["params"].tree, **items["optimizer"].tree}
            saved = {(name,): array for name, array in checksums.named(state).items()}
            for array in stored_arrays.open_arrays(saved, reading, About.from_json(record).checksums, "".join).values():
                array.verify()
    except Damaged as found:
        return found


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, ready for use."""

    step: int
    config: ConfigDict
    model: Transformer
    tokenizer: Tokenizer
    about: About


@contextlib.contextmanager
def open_to_read(
    workdir: epath.PathLike, option: str = "--workdir", step: Step = None
) -> Iterator[tuple[ocp.CheckpointManager, int, About, ConfigDict]]:
    """The checkpoints of a folder, opened for reading, and the step, metadata and config of one of them.

    Args:
        option: the option that gave the folder.
        step: see `Step`.

    Raises:
        NoCheckpoint: if there is none.
        UserError: if there is none for that step, or it can't be read.
    """
    with reachable(option, workdir):
        there = folder_of(workdir).is_dir()
    if not there:
        raise NoCheckpoint(f"{workdir}: there is no checkpoint here; give the folder of a run")
    with open_read_only(folder_of(workdir)) as manager:
        step = chosen_step(manager, step, workdir, "--step" if option == "--workdir" else f"{option}_step")
        about = read_about(manager, step)
        with readable(manager, step):
            config = saved_config(about.config)
        yield manager, step, about, config


def newest_readable(workdir: epath.PathLike, or_older: bool) -> tuple[About, ConfigDict]:
    """The metadata and config of the newest checkpoint; with `or_older`, of the newest of which they can be read.

    Raises:
        NoCheckpoint: if there is none.
        Damaged: if they can't be read.
    """
    step = None
    while True:
        try:
            with open_to_read(workdir, step=step) as (_, _, about, config):
                return about, config
        except Damaged as error:
            with open_read_only(folder_of(workdir)) as manager:
                step = older(manager, error.step)
            if step is None or not or_older:
                raise


def load_config(workdir: epath.PathLike, step: Step = None, of: str = "--workdir") -> ConfigDict:
    """The config of a checkpoint. Its parameters aren't read.

    Raises:
        UserError: if there is none.
    """
    with open_to_read(workdir, of, step) as (_, _, _, config):
        return config


def save_frozen(workdir: epath.PathLike, params: dict, base: dict) -> None:
    """Save a new run's frozen parameters, which its checkpoints won't hold. Earlier ones are replaced.

    Args:
        base: their origin, the same as `About.base` of the run's checkpoints.
    """
    with hosts.all_succeed("the frozen weights"), reachable("--workdir", workdir):
        if hosts.is_first():
            folder_of(workdir, "frozen").rmtree(missing_ok=True)
    with open_to_write(workdir, 1, "frozen") as manager, written(manager):
        record = sealed({**base, "checksums": checksums.of_tree({"params": params})})
        items = {"params": stored_arrays.standard_save(params), "about": ocp.args.JsonSave(record)}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()


@contextlib.contextmanager
def open_frozen(
    workdir: epath.PathLike, base: dict
) -> Iterator[tuple[ocp.CheckpointManager, dict[str, str] | None, str]]:
    """The checkpoint of `save_frozen`, whose step is 0, its checksums, and the remedy if it can't be read.

    Raises:
        UserError: if it is missing, has another base, or can't be read.
    """
    folder, remedy = folder_of(workdir, "frozen"), "restore the folder that the run made"
    with reachable("--workdir", workdir):
        there = (folder / "0").is_dir()
    if not there:
        raise UserError(f"{folder}: the frozen weights that this run's adapters belong to are missing; {remedy}")
    with open_read_only(folder) as manager:
        with readable(manager, 0, remedy):
            theirs = unsealed(_read_json(manager, 0))
            recorded = theirs.pop("checksums", None)
        if theirs != base:
            raise UserError(f"{folder}: these frozen weights belong to other adapters than this run's; {remedy}")
        yield manager, recorded, remedy


def restore_frozen(workdir: epath.PathLike, abstract: dict, base: dict) -> dict:
    """The parameters of `save_frozen`, placed according to `abstract`.

    Raises:
        UserError: if they are missing, come from another base, or can't be read.
    """
    with open_frozen(workdir, base) as (manager, recorded, remedy), readable(manager, 0, remedy):
        params = manager.restore(0, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract)))["params"]
        check_arrays({"params": params}, recorded)
    return params


def _placed(leaf: jax.ShapeDtypeStruct, saved: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, saved.dtype, sharding=sharding)


def load(workdir: epath.PathLike, mesh: Mesh | None = None, step: Step = None, of: str = "--workdir") -> Checkpoint:
    """Open a checkpoint of a run, or a materialized model. Nothing is written, so the run may still be training.

    Parameters have the type in which they were saved. The optimizer's state isn't read.

    Args:
        mesh: devices over which the parameters are sharded, a generator over its copies (`data`), too; by default all
            are on the first device.
        step: see `Step`.
        of: the option that gave the folder.

    Raises:
        UserError: if there is none.
    """
    with open_to_read(workdir, of, step) as (manager, step, about, config):
        model = abstract_model(config)
        graph, params = split_model(model)
        if mesh is None:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            placed = jax.tree.map(lambda _: device, params)
        else:
            placed = shardings(divide_copies(model, mesh), partition_specs(model))
        trained, frozen = (select(params, lambda path, of=of: model.trains(path) == of) for of in (True, False))
        replaced = "start again, with the newest checkpoint"  # a running training removes old ones
        with readable(manager, step, "" if step == manager.latest_step() else replaced):
            saved = manager.item_metadata(step)["params"].tree
            target = jax.tree.map(_placed, trained, saved, select(placed, model.trains))
            parts = 1 if mesh is None else mesh.size  # at most, as not every array is divided
            check_free(f"{workdir}: its parameters", [target, frozen], 1 / parts, "use a machine with more memory")
            restored = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(target)))["params"]
            check_arrays({"params": restored}, about.checksums)
            tokenizer = restore_tokenizer(about.tokenizer, about.tokenizer_data)
    if frozen:
        rest = select(placed, lambda path: not model.trains(path))
        restored = merge_trees(
            restored, restore_frozen(workdir, jax.tree.map(_placed, frozen, frozen, rest), about.base)
        )
    return Checkpoint(step, config, nnx.merge(graph, restored), tokenizer, about)


def load_on_all(workdir: epath.PathLike, step: Step = None) -> Checkpoint:
    """A checkpoint on all devices of all processes (`load`).

    Raises:
        UserError: on every process, if one can't open it or sees another one.
    """
    with hosts.all_succeed("the checkpoint"), open_to_read(workdir, step=step) as (_, step, _, _):
        pass
    hosts.check_same("--workdir: the checkpoint", f"{step:016x}", "start again, or wait until training has ended")
    with hosts.all_succeed("the checkpoint"):
        return load(workdir, make_mesh(), step)
