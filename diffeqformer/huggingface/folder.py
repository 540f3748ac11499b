"""The JSON and the weights of a folder in Hugging Face's format, without torch, pickles or Transformers."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from diffeqformer.errors import UserError, reason_of

INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""Bytes of a file of weights, unless a single tensor has more."""

Index = tuple[slice, ...] | EllipsisType
"""A part of an array: of each axis, from where to where."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a JSON file. Raises a UserError if it can't be read, or holds no fields."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {reason_of(error)}; name the folder of a pretrained model") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: must hold fields, but it holds a {type(fields).__name__}; download it again")
    return fields


class Tensors:
    """The tensors of a folder, each of which is read when it is asked for.

    They are in model.safetensors, in the files that an index names, of which only what it names counts, or in the only
    file of this kind.

    Raises:
        UserError: if there are none, or a file is missing or damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self._files, self._places = {}, {}
        if not (folder / INDEX).exists() or (folder / "model.safetensors").exists():
            path = _only_file(folder)
            self._places = dict.fromkeys(self._open(path).keys(), path)
            return
        for name, file in read_json(folder / INDEX).get("weight_map", {}).items():
            path = folder / file
            if pathlib.PurePath(file).name != file or not path.is_file():
                raise UserError(f"{folder / INDEX}: {name} is in {file}, which isn't in this folder; download it, too")
            if name not in self._open(path).keys():
                raise UserError(f"{path}: lacks {name}, which {INDEX} puts there; download both again")
            self._places[name] = path

    def _open(self, path: pathlib.Path):
        if path not in self._files:
            try:
                self._files[path] = safetensors.safe_open(path, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"{path}: can't be read: {reason_of(error)}; download it again") from None
        return self._files[path]

    def names(self) -> set[str]:
        return set(self._places)

    def describe(self, name: str) -> tuple[pathlib.Path, str, tuple[int, ...]]:
        """The file, type and shape of a tensor."""
        path = self._places[name]
        part = self._open(path).get_slice(name)
        return path, part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str, part: Index = ...) -> np.ndarray:
        """A part of a tensor in fp32. Nothing else of it is read. A UserError says if a number isn't finite."""
        path = self._places[name]
        array = self._open(path).get_slice(name)[part].astype(np.float32)
        if not np.isfinite(array).all():
            raise UserError(f"{path}: {name} has numbers that are NaN or infinite; download it again")
        return array


def _only_file(folder: pathlib.Path) -> pathlib.Path:
    """The file that holds all tensors of a folder without an index."""
    found = [folder / "model.safetensors"]
    found = found if found[0].exists() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if any(path.suffix in PICKLES for path in folder.iterdir()) and not found:
        raise UserError(
            f"{folder}: has its weights as a pickle alone, which can run any code; save them as safetensors where you "
            "trust it (save_pretrained of Transformers)"
        )
    what = f"{len(found)} files of weights, but no {INDEX}, which names them" if found else "no weights in safetensors"
    raise UserError(f"{folder}: has {what}; name the folder of a pretrained model, with all of its files")


def write_tensors(
    folder: pathlib.Path, tensors: dict[str, Callable[[], np.ndarray]], sizes: dict[str, int], dtype: str
) -> None:
    """Write tensors as `dtype`: one file, or several of up to `LARGEST` bytes with an index.

    Args:
        tensors: what makes each of them. Those of one file are in memory at a time.
        sizes: of each, in bytes.
    """
    files, room = [[]], LARGEST
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = LARGEST
        files[-1].append(name)
        room -= size
    places = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        made = {name: np.ascontiguousarray(tensors[name](), jnp.dtype(dtype)) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})  # some readers refuse files without it
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Write fields as a JSON file."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def check_new(folder: pathlib.Path) -> None:
    """Raise a UserError if there is a file, or a folder that isn't empty, where a folder will be written."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"--to: {folder} already holds something; give another folder, or delete it")


@contextlib.contextmanager
def written_whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside another, for a `with` block that writes into it. At the end it becomes the other.

    Raises:
        UserError: if it can't be written. After any error it is removed.
    """
    folder = folder.absolute()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            path.chmod(0o666 & partial.stat().st_mode)  # safetensors' are its owner's alone
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        check_new(folder)
        partial.replace(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--to: {folder} can't be written: {reason_of(error)}; give another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
