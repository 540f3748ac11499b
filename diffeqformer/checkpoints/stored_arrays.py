"""Arrays of a checkpoint on disk, read one by one, without a model or devices."""

import dataclasses
import math
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array on disk."""

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

    def read(self) -> np.ndarray:
        """All of it, after a comparison with its checksum. A UserError says if there is too little memory."""
        largest = max(self.store.size, math.prod(self.store.chunk_layout.read_chunk.shape or ()))
        needed, remedy = largest * self.dtype.itemsize, "use a machine with more memory"
        memory.check_enough(self.name, needed, memory.free_on_host(), remedy)  # a small file can claim any shape
        with self.reading():
            array = self.store.read().result()
            if self.checksum is not None and checksums.of_array(array) != self.checksum:
                raise checksums.Differs(self.name)
        return array


def open_arrays(
    folder: epath.Path,
    names: dict[Path, str],
    reading: Callable[[], AbstractContextManager],
    recorded: dict[str, str] | None,
) -> dict[Path, StoredArray]:
    """Open the arrays of a checkpoint, given their names in `recorded`. Only their metadata is read."""
    context = ts.Context({"cache_pool#index": {"total_bytes_limit": 10**8}})
    with reading():
        opening = {path: ts.open(_spec(folder, ".".join(path)), context=context) for path in names}
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


def _spec(folder: epath.Path, name: str) -> dict:
    """TensorStore's description of an array in a folder that Orbax wrote."""
    base = f"{folder}/" if "://" in str(folder) else {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#index"}
    return {"driver": "zarr", "kvstore": kvstore, "open": True, "fill_missing_data_reads": False}
