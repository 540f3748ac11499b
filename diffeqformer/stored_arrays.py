"""Arrays of a checkpoint on disk: read block by block, and written one by one.

For arrays that don't fit into memory, or of which little is needed at a time. Orbax stores an array in chunks, and a
chunk is read and decompressed as a whole. So blocks consist of whole chunks.
"""

import asyncio
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from diffeqformer import checksums
from diffeqformer.parallel import memory

Path = tuple[str, ...]
CHUNK_BYTES = 2**26
"""Limit of a chunk, before compression. Orbax's own is up to 2 GiB, all of which would be read for any part of it.

64 MiB: a few chunks fit into any memory. On a mesh, Orbax cuts a shard along the axis that is sharded already. With
smaller chunks, those of the last axis would become slivers, which are slow to copy.
"""

BYTES_AT_ONCE = 2**28
"""How much of an array is read at a time."""

MOST_BLOCKS = 2**20
"""In how many parts an array is read at most."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array on disk. Indexing reads a part of it.

    Args:
        store: the open array.
        reading: the context in which it is read, which may translate errors.
        name, checksum: those under which it was saved (`diffeqformer.checksums`); None: of an earlier version.
    """

    store: ts.TensorStore
    reading: Callable[[], AbstractContextManager]
    name: str = ""
    checksum: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.store.shape

    @property
    def nbytes(self) -> int:
        return self.store.size * self.store.dtype.numpy_dtype.itemsize

    def __getitem__(self, index) -> np.ndarray:
        """A part of the array.

        Raises:
            UserError: if it can't be read (by `reading`), or it or a chunk doesn't fit into the free memory.
        """
        largest = max(self.store[index].size, math.prod(self.store.chunk_layout.read_chunk.shape or ()))
        needed = largest * self.store.dtype.numpy_dtype.itemsize
        part, remedy = f"{self.name}: a part of it", "use a machine with more memory"
        memory.check_enough(part, needed, memory.free_on_host(), remedy)
        with self.reading():
            return self.store[index].read().result()

    def checked_blocks(self) -> Iterator[np.ndarray]:
        """All blocks, one after another. At the end, the checksum of all of them is compared with the saved one.

        Raises:
            UserError: at the end, if they aren't what was saved (by `reading`).
        """
        total = np.zeros(2, np.uint32)
        for index in self.blocks(4 * checksums.SMALL):
            block = self[index]
            if self.checksum is not None:
                total += checksums.sums_of_block(block, tuple(part.start or 0 for part in index), self.shape)
            yield block
        if self.checksum is not None:
            with self.reading():
                checksums.check({self.name: checksums.as_text(total)}, {self.name: self.checksum})

    def verify(self) -> None:
        """Read the whole array, and compare its checksum with the saved one.

        Raises:
            UserError: if it isn't what was saved (by `reading`).
        """
        collections.deque(self.checked_blocks(), maxlen=0)

    def blocks(self, bytes_at_once: int = BYTES_AT_ONCE, axes: tuple[int, ...] | None = None) -> list[tuple]:
        """The indices of blocks that make up the array.

        Args:
            bytes_at_once: limit of a block's size, unless a single chunk, over the whole of the other axes, is larger.
            axes: the axes that may be cut; None: all.

        Returns:
            For each block, a slice for each axis, or `slice(None)` for those that aren't cut.

        Raises:
            UserError: if there are too many (by `reading`): a small file can claim any shape.
        """
        axes = tuple(range(len(self.shape))) if axes is None else axes
        chunk = self.store.chunk_layout.read_chunk.shape
        sizes = [chunk[axis] if axis in axes else size for axis, size in enumerate(self.shape)]
        for axis in sorted(axes, reverse=True):  # the last axis first, which is contiguous
            size = math.prod(sizes) * self.store.dtype.numpy_dtype.itemsize
            sizes[axis] = min(self.shape[axis], sizes[axis] * max(1, bytes_at_once // size))
        with self.reading():
            if math.prod(-(-size // step) for size, step in zip(self.shape, sizes)) > MOST_BLOCKS:
                raise ValueError(f"{self.name} has the shape {self.shape}, in more than {MOST_BLOCKS:,} blocks")
        cuts = [
            [slice(start, min(start + sizes[axis], size)) for start in range(0, size, sizes[axis])]
            if axis in axes
            else [slice(None)]
            for axis, size in enumerate(self.shape)
        ]
        return list(itertools.product(*cuts))


def open_arrays(
    saved: dict[Path, Any],
    reading: Callable[[], AbstractContextManager],
    recorded: dict[str, str] | None,
    name: Callable[[Path], str] = checksums.name_of_parameter,
) -> dict[Path, StoredArray]:
    """Open the arrays of a checkpoint, by default its parameters. Only their metadata is read.

    Args:
        saved: what Orbax says of each.
        reading: see `StoredArray`.
        recorded: their checksums by name; None if there are none.
        name: the name of the array with a path.
    """
    names = {path: name(path) for path in saved}
    context = ts.Context({"cache_pool#index": {"total_bytes_limit": 10**8}})
    with reading():
        opening = {key: ts.open(_spec(array.directory, array.name), context=context) for key, array in saved.items()}
        return {
            path: StoredArray(array.result(), reading, names[path], recorded[names[path]] if recorded else None)
            for path, array in opening.items()
        }


def _spec(folder: epath.Path, name: str) -> dict:
    """TensorStore's description of an array in a folder that Orbax wrote."""
    base = f"{folder}/" if "://" in str(folder) else {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#index"}
    return {"driver": "zarr", "kvstore": kvstore, "open": True, "fill_missing_data_reads": False}


def _save_args(tree: Any) -> Any:
    return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)


def standard_save(tree: Any) -> ocp.args.StandardSave:
    """Orbax's arguments for saving a tree of arrays, in chunks of at most `CHUNK_BYTES`."""
    return ocp.args.StandardSave(tree, save_args=_save_args(tree))


def one_by_one(
    shapes: Any, arrays: Iterator[tuple[Path, np.ndarray]], about: Callable[[dict[str, str]], dict]
) -> tuple[dict[str, ocp.CheckpointHandler], dict[str, ocp.args.CheckpointArgs]]:
    """Orbax's handlers and arguments for saving `params` one by one, and then `about`.

    An array is written before the next one is taken, so only one need be in memory. Works without background saves.

    Args:
        shapes: tree of the arrays' shapes.
        arrays: the arrays, with their paths.
        about: what is saved as `about` when the checksums of all arrays are known.
    """
    writer = _OneByOne(arrays)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.ShapeDtypeStruct, writer),
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),  # Orbax warns if there is none
    )
    params = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    saved = ocp.args.PyTreeSave(shapes, save_args=_save_args(shapes))
    return {"params": params, "about": _LateJson()}, {"params": saved, "about": _LateJsonSave(writer, about)}


class _OneByOne(ocp.type_handlers.NumpyHandler):
    def __init__(self, arrays):
        super().__init__(deepcopy_host_arrays=False)
        self._arrays = arrays
        self.checksums, self.done = {}, False

    async def serialize(self, values, infos, args=None):
        places = {info.name: (shape, info, arg) for shape, info, arg in zip(values, infos, args)}
        for path, array in self._arrays:
            shape, info, arg = places.pop(".".join(path))
            assert (array.shape, array.dtype) == (shape.shape, shape.dtype), path
            self.checksums[checksums.name_of_parameter(path)] = checksums.of_array(array)
            for write in await super().serialize([array], [info], [arg]):
                write.result()
            del array, write  # not kept while the next one is made
        assert not places, list(places)
        self.done = True
        return []


class _LateJson(ocp.JsonCheckpointHandler):
    async def async_save(self, directory, item=None, args=None):
        while not args.writer.done:  # if it fails, Orbax cancels this
            await asyncio.sleep(0.01)
        return await super().async_save(directory, args=ocp.args.JsonSave(args.content(args.writer.checksums)))


@ocp.args.register_with_handler(_LateJson, for_save=True, for_restore=True)  # Orbax wants both
@dataclasses.dataclass
class _LateJsonSave(ocp.args.CheckpointArgs):
    writer: _OneByOne
    content: Callable[[dict[str, str]], dict]
