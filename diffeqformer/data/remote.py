"""Token stores at a URL, such as gs://bucket/stores: copied there once, and from there to each training host.

Any URL that fsspec can open works; gs:// needs the package gcsfs.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

import fsspec
import numpy as np

from diffeqformer.console.results import write_whole
from diffeqformer.console.terminal import show_progress
from diffeqformer.data.lock import only_process
from diffeqformer.data.store import SPLITS, Split, parse_about, read_about, sha256, shards_of
from diffeqformer.errors import UserError, reason_of

AT_ONCE = 8  # files copied in parallel
CHUNK = 1 << 24  # bytes


@contextlib.contextmanager
def _opened(remote: str, name: str, verb: str = "read") -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """The file system of a URL, and the path of a store in it. What fails in the block becomes a UserError."""
    try:
        system, path = fsspec.url_to_fs(remote)
    except (ImportError, ValueError) as error:
        raise UserError(f"config.data.remote: {remote}: {error}") from None
    try:
        yield system, f"{path.rstrip('/')}/{name}"
    except UserError:
        raise
    except Exception as error:  # each file system has exceptions of its own
        raise UserError(f"config.data.remote: {remote} can't be {verb}: {reason_of(error)}") from error


def upload(folder: pathlib.Path, remote: str) -> None:
    """Copy a complete local store to a URL. `store.json` comes last, so that no host takes an unfinished store."""
    about, name = read_about(folder), f"{remote}/{folder.name}"
    with _opened(remote, folder.name, "written") as (system, there):
        if system.exists(f"{there}/store.json"):
            if _ids(parse_about(system.cat_file(f"{there}/store.json"), f"{name}/store.json")) != _ids(about):
                raise UserError(
                    f"config.data.remote: {name} is a token store with other content, which is never replaced; name "
                    "another URL, or delete it there"
                )
            print(f"{name}: this token store is there already", flush=True)
            return
        system.makedirs(there, exist_ok=True)

        def put(shard: dict) -> None:
            system.put_file(str(folder / shard["file"]), f"{there}/{shard['file']}")

        each_shard(put, shards_of(about), f"Copying {folder} to {remote}")
        put({"file": "store.json"})


def _ids(about: dict) -> list[str]:
    """What identifies a store, wherever and from whatever files it was made."""
    return [about["tokenizer"], *(about["splits"][split]["sha256"] for split in SPLITS)]


def has_store(remote: str, name: str) -> bool:
    """Whether a whole store of this name is at a URL; a UserError says that the URL can't be read."""
    with _opened(remote, name) as (system, there):
        return system.exists(f"{there}/store.json")


def check_writable(remote: str) -> None:
    """Write an empty file at a URL and remove it, before the hours that preparing a store takes."""
    with _opened(remote, f".writable-{uuid.uuid4().hex}", "written") as (system, there):
        system.makedirs(there.rpartition("/")[0], exist_ok=True)
        system.pipe_file(there, b"")
        system.rm(there)


def stage(remote: str, folder: pathlib.Path) -> None:
    """Copy the store at a URL to `folder`, verifying every SHA-256. Intact shards of an earlier call are kept."""
    partial, name = folder.with_name(f"{folder.name}.copying"), f"{remote}/{folder.name}"
    with only_process(partial), _opened(remote, folder.name, f"copied to {folder}") as (system, there):
        if folder.exists():
            return
        if not system.exists(f"{there}/store.json"):
            raise UserError(
                f"config.data.remote: there is no token store {folder.name} at {remote}; make it with "
                "`python -m diffeqformer.prepare` and the same config"
            )
        content = system.cat_file(f"{there}/store.json")
        about = parse_about(content, f"{name}/store.json")

        def get(shard: dict) -> None:
            path = partial / shard["file"]
            if path.exists() and sha256(path) == shard["sha256"]:
                return
            with system.open(f"{there}/{shard['file']}", "rb") as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
                target.flush()
                os.fsync(target.fileno())
            _check(sha256(path), shard, name)

        each_shard(get, shards_of(about), f"Copying {name} to {folder}")
        write_whole(partial / "store.json", content.decode("utf-8"))
        read_about(partial)
        partial.rename(folder)


def _check(found: str, shard: dict, name: str) -> None:
    if found != shard["sha256"]:
        raise UserError(
            f"{name}/{shard['file']}: its content isn't what was written, by its SHA-256; delete the folder there, and "
            "prepare it again"
        )


def read_split(remote: str, name: str, split: str) -> tuple[Split, str]:
    """A split of the store at a URL, in memory, after verifying every SHA-256; and the training ids' SHA-256."""
    with _opened(remote, name) as (system, there):
        about = parse_about(system.cat_file(f"{there}/store.json"), f"{remote}/{name}/store.json")
        entry, parts = about["splits"][split], []
        for shard in entry["shards"]:
            content = system.cat_file(f"{there}/{shard['file']}")
            _check(hashlib.sha256(content).hexdigest(), shard, f"{remote}/{name}")
            parts.append(np.frombuffer(content, np.dtype(about["dtype"])))
        return Split.of(parts, entry), about["splits"]["train"]["sha256"]


def each_shard(copy: Callable[[dict], None], shards: list[dict], what: str) -> None:
    """Copy every shard, several in parallel, with a progress line."""
    print(what, flush=True)
    show = show_progress("copied", "files")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done, _ in enumerate(pool.map(copy, shards), 1):
            show(done, len(shards))
