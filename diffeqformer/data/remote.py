"""Token stores behind a URL, such as gs://bucket/stores: copied there once, and to the local disk of each host that trains.

Anything that fsspec opens will do; gs:// needs the package gcsfs.
"""

import concurrent.futures
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable

import fsspec

from diffeqformer.data.lock import only_process
from diffeqformer.data.store import read_about
from diffeqformer.errors import UserError

AT_ONCE = 8  # files copied at the same time
CHUNK = 1 << 24  # bytes


def open_remote(remote: str, name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path of a store in it.

    Raises:
        UserError: if there is no such file system, or its package isn't installed.
    """
    try:
        system, path = fsspec.url_to_fs(remote)
    except (ImportError, ValueError) as error:
        raise UserError(f"config.data.remote: {remote}: {error}") from None
    return system, f"{path.rstrip('/')}/{name}"


def upload(folder: pathlib.Path, remote: str) -> None:
    """Copy a whole local store to a URL; `store.json` comes last, so that nobody takes what isn't whole.

    Files that are there already in their size are left as they are.

    Raises:
        UserError: if the URL can't be written.
    """
    about = read_about(folder)
    system, there = open_remote(remote, folder.name)

    def put(shard: dict) -> int:
        path = folder / shard["file"]
        size = path.stat().st_size
        if not (system.exists(f"{there}/{shard['file']}") and system.size(f"{there}/{shard['file']}") == size):
            with open(path, "rb") as source, system.open(f"{there}/{shard['file']}", "wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
        return size

    try:
        system.makedirs(there, exist_ok=True)
        each_shard(put, about, f"Copying {folder} to {remote}")
        with system.open(f"{there}/store.json", "w") as target:
            target.write((folder / "store.json").read_text())
    except Exception as error:  # each file system has exceptions of its own
        raise UserError(f"config.data.remote: {remote} can't be written: {_reason(error)}") from error


def stage(remote: str, folder: pathlib.Path) -> None:
    """Copy the store at a URL to `folder`, verifying every shard's SHA-256; shards that an earlier call finished stay.

    Raises:
        UserError: if there is none, it can't be read, a shard isn't what was written, or the local disk is full.
    """
    system, there = open_remote(remote, folder.name)
    partial = folder.with_name(f"{folder.name}.partial")
    with only_process(partial):
        if folder.exists():
            return
        try:
            about = json.loads(system.cat_file(f"{there}/store.json"))
        except FileNotFoundError:
            raise UserError(
                f"config.data.remote: there is no token store {folder.name} at {remote}; make it with "
                "`python -m diffeqformer.prepare` and the same config"
            ) from None
        except Exception as error:
            raise UserError(f"config.data.remote: {remote} can't be read: {_reason(error)}") from error

        def get(shard: dict) -> int:
            path = partial / shard["file"]
            if not path.exists():
                digest = hashlib.sha256()
                with system.open(f"{there}/{shard['file']}", "rb") as source, open(f"{path}.copy", "wb") as target:
                    while data := source.read(CHUNK):
                        digest.update(data)
                        target.write(data)
                if digest.hexdigest() != shard["sha256"]:
                    raise UserError(
                        f"{remote}/{folder.name}/{shard['file']}: its content isn't what was written, by its SHA-256"
                    )
                pathlib.Path(f"{path}.copy").rename(path)
            return path.stat().st_size

        try:
            each_shard(get, about, f"Copying {remote}/{folder.name} to {folder}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"config.data: {remote} can't be copied to {folder}: {_reason(error)}") from error
        (partial / "store.json").write_text(json.dumps(about, indent=1))
        read_about(partial)
        partial.rename(folder)
        (folder / "lock").unlink()


def each_shard(copy: Callable[[dict], int], about: dict, what: str) -> None:
    """Copy every shard, several at once, with a progress line; `copy` gives the bytes of each."""
    shards = [shard for split in about["splits"].values() for shard in split["shards"]]
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
