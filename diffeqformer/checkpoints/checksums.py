"""Checksums of arrays that don't depend on how devices share them.

The bits of each element are mixed with its position, and the results are added up modulo 2^32. So shards, blocks and
hosts can be added in any order, and restoring on another mesh costs nothing more. The mixing is one-to-one (it is the
end of MurmurHash3), so a change to any one element changes the sum. Two such sums make 64 bits, which catch other
damage but for one case in 2^64. They don't protect against somebody who wants to deceive: see docs/security.md.
(Zarr's crc32c can't take their place: in Orbax's arrays only the index of chunks can have it.)
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, UInt32

SMALL = 2**18  # elements of an array that NumPy adds up sooner than XLA compiles a program


def _mixed(x: UInt32[Any, "..."]) -> UInt32[Any, "..."]:
    """A one-to-one function of 32 bits, each of which depends on all of them."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _sums(np_or_jnp, bits: UInt32[Any, "..."], start: UInt32[Any, "axes"], strides: UInt32[Any, "axes"]):
    """The two sums of a block that begins at `start` in an array, whose `strides` count elements."""
    position = np_or_jnp.zeros(bits.shape, np.uint32)
    for axis, size in enumerate(bits.shape):
        index = (np_or_jnp.arange(size, dtype=np.uint32) + start[axis]) * strides[axis]
        position = position + index.reshape([-1 if other == axis else 1 for other in range(bits.ndim)])
    first = _mixed(bits ^ _mixed(position))
    second = _mixed(first ^ np.uint32(0x9E3779B9))
    if np_or_jnp is np:
        return np.stack([first.sum(dtype=np.uint32), second.sum(dtype=np.uint32)])
    zero, add = np.uint32(0), lambda x, y: (x[0] + y[0], x[1] + y[1])
    both = jax.lax.reduce((first, second), (zero, zero), add, range(bits.ndim))  # in one pass, so nothing is stored
    return jnp.stack(both)


@functools.cache
def _compiled(replicated: Sharding | None) -> Callable:
    def sums(array, start, strides):
        bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
        return _sums(jnp, bits, start, strides)

    return jax.jit(sums, out_shardings=replicated)


def _places(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[UInt32[Any, "axes"], UInt32[Any, "axes"]]:
    """`start` and `strides` of `_sums` for a block that begins there in an array of a shape."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return tuple(np.array([number % 2**32 for number in numbers], np.uint32) for numbers in (start, strides))


def sums_of_block(block: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> UInt32[np.ndarray, "2"]:
    """The two sums of a block that begins at `start` in an array of a shape; those of all blocks are to be added."""
    if not shape:
        block, start, shape = np.reshape(block, 1), (0,), (1,)
    if block.size <= SMALL:
        bits = np.ascontiguousarray(block).view(f"uint{8 * block.itemsize}").astype(np.uint32)
        return _sums(np, bits, *_places(start, shape))
    axis = int(np.argmax(block.shape))
    half = block.shape[axis] // 2
    first, second = np.split(block, [half], axis)
    moved = tuple(place + half * (other == axis) for other, place in enumerate(start))
    return sums_of_block(first, start, shape) + sums_of_block(second, moved, shape)


def of_array(array: Array | np.ndarray) -> str:
    """The checksum of an array. All processes that share it must call this together."""
    array = array.reshape(array.shape or (1,))
    start = (0,) * array.ndim
    if isinstance(array, np.ndarray) or (array.size <= SMALL and array.is_fully_addressable):
        return as_text(sums_of_block(np.asarray(array), start, array.shape))
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return as_text(_compiled(mesh and NamedSharding(mesh, PartitionSpec()))(array, *_places(start, array.shape)))


def as_text(sums: UInt32[Any, "2"]) -> str:
    """A checksum as 16 hexadecimal digits."""
    first, second = np.asarray(sums).tolist()
    return f"{first:08x}{second:08x}"


def of_tree(tree: Any) -> dict[str, str]:
    """The checksum of each array of a tree, by its path, such as `params/head/kernel`.

    All processes that share the arrays must call this together. Each sum is awaited: on CPUs, collectives of programs
    that run at the same time can wait for one another.
    """
    return {name: of_array(leaf) for name, leaf in named(tree).items()}


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `params/head/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class Differs(ValueError):
    """An array isn't what was saved. Of a copy that each process has, only the one that read it wrong finds this."""

    def __init__(self, name: str):
        super().__init__(f"{name} isn't what was saved, by its checksum")


def check(tree: Any, recorded: dict[str, str] | None) -> None:
    """Compare the checksums of a tree with those that were recorded, if any were; `Differs` names the first array."""
    for name, found in of_tree(tree).items() if recorded is not None else ():
        if found != recorded.get(name):
            raise Differs(name)
