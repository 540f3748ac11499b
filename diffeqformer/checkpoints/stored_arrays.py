"""Arrays of a checkpoint on disk, read block by block.

For arrays that don't fit into memory, or of which little is needed at a time. Orbax stores an array in chunks, and a
chunk is read and decompressed as a whole. So blocks consist of whole chunks.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import tensorstore as ts
from etils import epath

from diffeqformer.checkpoints import checksums
from diffeqformer.orbax import ocp
from diffeqformer.parallel import memory

Path = tuple[str, ...]
CHUNK_BYTES = 2**26
"""Limit of a chunk, before compression. Orbax's own is up to 2 GiB, all of which would be read for any part of it.

64 MiB: a few chunks fit into any memory. On a mesh, Orbax cuts a shard along the axis that is sharded already. With
smaller chunks, those of the last axis would become slivers, which are slow to copy.
"""
MOST_BLOCKS = 2**20  # in how many parts an array is read at most


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array on disk. Indexing reads a part of it."""

    store: ts.TensorStore
    reading: Callable[[], AbstractContextManager]  # the context in which it is read, which may translate errors
    name: str = ""  # under which it was saved (`checksums`)
    checksum: str | None = None  # None: of an earlier version

    @property
    def shape(self) -> tuple[int, ...]:
        return self.store.shape

    @property
    def dtype(self) -> np.dtype:
        return self.store.dtype.numpy_dtype

    def __getitem__(self, index) -> np.ndarray:
        largest = max(self.store[index].size, math.prod(self.store.chunk_layout.read_chunk.shape or ()))
        needed = largest * self.dtype.itemsize
        part, remedy = f"{self.name}: a part of it", "use a machine with more memory"
        memory.check_enough(part, needed, memory.free_on_host(), remedy)
        with self.reading():
            return self.store[index].read().result()

    def whole(self) -> np.ndarray:
        """All of it, after a comparison with its checksum."""
        array = self[...]
        self._compare(checksums.of_array(array))
        return array

    def checked_blocks(self) -> Iterator[np.ndarray]:
        """All blocks, one after another. At the end, the checksum of all of them is compared with the saved one."""
        total = np.zeros(2, np.uint32)
        for index in self.blocks(4 * checksums.SMALL):
            block = self[index]
            if self.checksum is not None:
                total += checksums.sums_of_block(block, tuple(part.start for part in index), self.shape)
            yield block
        self._compare(checksums.as_text(total))

    def _compare(self, found: str) -> None:
        with self.reading():
            if self.checksum is not None and found != self.checksum:
                raise checksums.Differs(self.name)

    def blocks(self, bytes_at_once: int) -> list[tuple[slice, ...]]:
        """The indices of blocks of at most so many bytes, or of a single chunk, that make up the array.

        Too many are refused (by `reading`).
        """
        sizes = list(self.store.chunk_layout.read_chunk.shape or ())  # none of a scalar
        for axis in reversed(range(len(sizes))):  # the last axis first, which is contiguous
            size = math.prod(sizes) * self.dtype.itemsize
            sizes[axis] = min(self.shape[axis], sizes[axis] * max(1, bytes_at_once // size))
        with self.reading():  # a small file can claim any shape
            if math.prod(-(-size // step) for size, step in zip(self.shape, sizes)) > MOST_BLOCKS:
                raise ValueError(f"{self.name} has the shape {self.shape}, in more than {MOST_BLOCKS:,} blocks")
        cuts = [
            [slice(start, min(start + step, size)) for start in range(0, size, step)]
            for size, step in zip(self.shape, sizes)
        ]
        return list(itertools.product(*cuts))


def open_arrays(
    folder: epath.Path,
    names: dict[Path, str],
    reading: Callable[[], AbstractContextManager],
    recorded: dict[str, str] | None,
) -> dict[Path, StoredArray]:
    """Open the arrays of a folder that Orbax wrote, given their names in `recorded`. Only their metadata is read."""
    context = ts.Context({"cache_pool#index": {"total_bytes_limit": 10**8}})
    base = f"{folder}/" if "://" in str(folder) else {"driver": "file", "path": f"{folder}/"}
    with reading():
        opening = {}
        for path in names:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(path)}/", "cache_pool": "cache_pool#index"}
            spec = {"driver": "zarr", "kvstore": kvstore, "open": True, "fill_missing_data_reads": False}
            opening[path] = ts.open(spec, context=context)
        return {
            path: StoredArray(array.result(), reading, names[path], recorded[names[path]] if recorded else None)
            for path, array in opening.items()
        }


def context() -> ocp.Context:
    """Orbax's settings for saving: arrays in chunks of at most `CHUNK_BYTES`, and `about` as JSON."""
    context = ocp.Context()
    context.array.saving.use_zarr3 = False  # the form of earlier checkpoints
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.array.saving.ocdbt_target_data_file_size = CHUNK_BYTES  # so much is kept in memory until it is written
    context.memory.deepcopy_host_arrays = False  # nobody changes them
    context.asynchronous.timeout_secs = 24 * 3600  # a large model on a slow disk
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name="about")
    return context
