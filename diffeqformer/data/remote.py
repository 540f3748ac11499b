"""Token stores at a URL, such as gs://bucket/stores: copied there once, and from there to each training host.

Any URL that fsspec can open works; gs:// needs the package gcsfs.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable

import fsspec
import numpy as np

from diffeqformer.data.lock import only_process
from diffeqformer.data.seals import write_lasting
from diffeqformer.data.store import SPLITS, Split, parse_about, read_about, sha256, shards_of
from diffeqformer.errors import UserError

AT_ONCE = 8  # files copied in parallel
CHUNK = 1 << 24  # bytes


def open_remote(remote: str, name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path of a store in it.

    Raises:
        UserError: if the file system is unknown, or its package isn't installed.
    """
    try:
        system, path = fsspec.url_to_fs(remote)
    except (ImportError, ValueError) as error:
        raise UserError(f"config.data.remote: {remote}: {error}") from None
    return system, f"{path.rstrip('/')}/{name}"


def upload(folder: pathlib.Path, remote: str) -> None:
    """Copy a complete local store to a URL. `store.json` comes last, so that no host takes an unfinished store.

    `uploading.json` identifies the store that is being copied, so that an interrupted copy can be resumed.

    Raises:
        UserError: if the URL can't be written, or has another store of the same name, or a part of one.
    """
    about, ours = read_about(folder), (folder / "store.json").read_text()
    system, there = open_remote(remote, folder.name)

    def read(name: str) -> str | None:
        return system.cat_file(f"{there}/{name}").decode() if system.exists(f"{there}/{name}") else None

    def put(shard: dict) -> int:
        path, target = folder / shard["file"], f"{there}/{shard['file']}"
        size = path.stat().st_size
        if not (goes_on and system.exists(target) and system.size(target) == size):
            with open(path, "rb") as source, system.open(target, "wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
        return size

    try:
        theirs, unfinished = read("store.json"), read("uploading.json")
        place = f"{remote}/{folder.name}/store.json"
        if theirs is not None and _ids(parse_about(theirs.encode("utf-8"), place)) == _ids(about):
            print(f"{remote}/{folder.name}: this token store is there already", flush=True)
            return
        if theirs is not None or unfinished not in (None, ours):
            what = "a token store" if theirs is not None else "an unfinished copy of a token store"
            raise UserError(
                f"config.data.remote: {remote}/{folder.name} is {what} with other content, which is never replaced; "
                "name another URL, or delete it there"
            )
        goes_on, shards = unfinished is not None, shards_of(about, folder / "store.json")
        system.makedirs(there, exist_ok=True)
        system.pipe_file(f"{there}/uploading.json", ours.encode())
        each_shard(put, shards, f"Copying {folder} to {remote}")
        system.pipe_file(f"{there}/store.json", ours.encode())
        system.rm(f"{there}/uploading.json")
    except UserError:
        raise
    except Exception as error:  # each file system has exceptions of its own
        raise UserError(f"config.data.remote: {remote} can't be written: {_reason(error)}") from error


def _ids(about: dict) -> list[str]:
    """What identifies a store, wherever and from whatever files it was made."""
    return [about["tokenizer"], *(about["splits"][split]["sha256"] for split in SPLITS)]


def has_store(remote: str, name: str) -> bool:
    """Whether a whole store of this name is at a URL.

    Raises:
        UserError: if the URL can't be read.
    """
    system, there = open_remote(remote, name)
    try:
        return system.exists(f"{there}/store.json")
    except Exception as error:  # each file system has exceptions of its own
        raise UserError(f"config.data.remote: {remote} can't be read: {_reason(error)}") from error


def check_writable(remote: str) -> None:
    """Write an empty file at a URL and remove it, before the hours that preparing a store takes.

    Raises:
        UserError: if the URL can't be written.
    """
    system, there = open_remote(remote, f".writable-{uuid.uuid4().hex}")
    try:
        system.makedirs(there.rpartition("/")[0], exist_ok=True)
        system.pipe_file(there, b"")
        system.rm(there)
    except Exception as error:  # each file system has exceptions of its own
        raise UserError(f"config.data.remote: {remote} can't be written: {_reason(error)}") from error


def stage(remote: str, folder: pathlib.Path) -> None:
    """Copy the store at a URL to `folder`, verifying every shard's SHA-256. Intact shards of an earlier call are kept.

    Raises:
        UserError: if there is no store, it can't be read, a shard differs from what was written, or the disk is full.
    """
    system, there = open_remote(remote, folder.name)
    partial = folder.with_name(f"{folder.name}.copying")
    with only_process(partial):
        if folder.exists():
            return
        try:
            about = system.cat_file(f"{there}/store.json")
        except FileNotFoundError:
            raise UserError(
                f"config.data.remote: there is no token store {folder.name} at {remote}; make it with "
                "`python -m diffeqformer.prepare` and the same config"
            ) from None
        except Exception as error:
            raise UserError(f"config.data.remote: {remote} can't be read: {_reason(error)}") from error

        def get(shard: dict) -> int:
            path = partial / shard["file"]
            if not path.exists() or sha256(path) != shard["sha256"]:
                with system.open(f"{there}/{shard['file']}", "rb") as source, open(path, "wb") as target:
                    shutil.copyfileobj(source, target, CHUNK)
                    target.flush()
                    os.fsync(target.fileno())
                if sha256(path) != shard["sha256"]:
                    raise UserError(
                        f"{remote}/{folder.name}/{shard['file']}: its content isn't what was written, by its SHA-256; "
                        "delete the folder there, and prepare it again"
                    )
            return path.stat().st_size

        try:
            place = f"{remote}/{folder.name}/store.json"
            each_shard(get, shards_of(parse_about(about, place), place), f"Copying {remote}/{folder.name} to {folder}")
            write_lasting(partial / "store.json", about.decode("utf-8"))
            read_about(partial)
            partial.rename(folder)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"config.data: {remote} can't be copied to {folder}: {_reason(error)}") from error
        (folder / "lock").unlink()


def read_split(remote: str, name: str, split: str) -> tuple[Split, str]:
    """A split of the store at a URL, in memory, after verifying every shard's SHA-256; and the training ids' SHA-256.

    Raises:
        UserError: if it can't be read, or a shard differs from what was written.
    """
    try:
        system, there = open_remote(remote, name)
        about = parse_about(system.cat_file(f"{there}/store.json"), f"{remote}/{name}/store.json")
        entry, parts = about["splits"][split], []
        for shard in entry["shards"]:
            content = system.cat_file(f"{there}/{shard['file']}")
            if hashlib.sha256(content).hexdigest() != shard["sha256"]:
                raise UserError(f"{remote}/{name}/{shard['file']}: its content isn't what was written, by its SHA-256")
            parts.append(np.frombuffer(content, np.dtype(about["dtype"])))
        return Split.of(parts, entry), about["splits"]["train"]["sha256"]
    except UserError:
        raise
    except Exception as error:  # each file system has exceptions of its own, and the file can hold anything
        raise UserError(f"{remote}/{name}: this token store can't be read: {_reason(error)}") from error


def each_shard(copy: Callable[[dict], int], shards: list[dict], what: str) -> None:
    """Copy every shard, several in parallel, with a progress line. `copy` returns the number of bytes of a shard."""
    start, shown, size = time.monotonic(), 0.0, 0
    print(what, flush=True)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done, bytes_of_shard in enumerate(pool.map(copy, shards), 1):
            size, now = size + bytes_of_shard, time.monotonic()
            if now - shown > 2 or done == len(shards):
                shown = now
                rate = size / 1e6 / max(now - start, 1e-9)
                print(f"  file {done:,}/{len(shards):,}  {size / 1e9:.2f} GB  {rate:,.0f} MB/s", flush=True)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
