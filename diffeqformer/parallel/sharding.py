"""The one table that maps logical axes to the device mesh (`diffeqformer.parallel.mesh`). Models only name axes.

Outside the depth loop (initial parameters, the generator, the optimizer) the compiler partitions by these shardings.
The loop itself is written for one device (`on_each_device`), because communication determines its speed. Before the
loop, W of all steps (or of a chunk of them) is gathered over `generator`. A step gathers its weights W(t_n) over
`fsdp`, and never P. Its backward pass scatters their gradient. After all microbatches, dW is scattered over `generator`
and summed over `data`.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diffeqformer.parallel.mesh import AXES, number_of_slices

BATCH = ("data", "generator", "fsdp")  # the axes over which examples are split
ROWS = ("fsdp",)  # the rows of a matrix (its first axis) are also sharded over this axis: parts of rows are whole tiles
GENERATOR_ROWS = ("fsdp", "generator")  # those of a generator's matrices, and of the weights it makes
EVERYWHERE = PartitionSpec()  # every device holds a copy

LOGICAL_AXES = {
    "batch": BATCH,  # examples are independent
    "heads": "tensor",  # so are heads, until their outputs are summed
    "mlp": "tensor",  # and hidden units
    "vocab": "tensor",  # rows, gathered for the embedding and the loss, where devices split positions instead
    "sequence": None,
    "embed": None,  # norms and the residual stream need the whole width
    "time": None,  # each step of depth reads all of its weights
    "rank": None,  # of adapters: their other side is sharded like their kernel's, and over fsdp
    "time_embed": None,  # contracted by the generator, on every device for its part of W
}


def on_every_device(tree, mesh: Mesh | None = None):
    """Copies of a tree's arrays on every device of a mesh; None: of the mesh on which they are, if they are on one.

    Arrays that belong to several processes are gathered by all of them together.
    """
    place = getattr(jax.tree.leaves(tree)[0], "sharding", None)
    mesh = mesh or getattr(place, "mesh", None)
    if mesh is None:
        return tree
    copies = NamedSharding(mesh, EVERYWHERE)
    if jax.process_count() > 1:
        return jax.jit(identity, out_shardings=copies)(tree)
    return jax.device_put(tree, copies)


def partition(axes: tuple[str | None, ...], rows: tuple[str, ...] = ROWS) -> PartitionSpec:
    """The partition spec of an array whose dimensions have these logical axes (None: never split).

    Args:
        rows: the axes of the mesh over which the rows of a matrix are also sharded.
    """
    places = [axis and LOGICAL_AXES[axis] for axis in axes]
    sides = [i for i, axis in enumerate(axes) if axis in ("vocab", "sequence", "embed", "heads", "mlp")]
    if len(sides) == 2 or "rank" in axes:  # a matrix; vectors are small enough to be replicated
        first = sides[0]
        places[first] = (places[first], *rows) if places[first] else rows
    return PartitionSpec(*places)


def generator_parts(mesh: Mesh, rows: list[tuple[int, str]]) -> int:
    """The largest number of parts into which copies of a model divide its generator (`divide_generator`).

    Each part has whole tiles of 8 rows. XLA's tiles of gathered weights have as many, in bf16 too. Copies in different
    slices don't share one: the network between them is too slow.

    Args:
        rows: number of rows of each generated kernel, and their logical axis.
    """
    copies = mesh.shape["data"] * mesh.shape["generator"] // number_of_slices(list(mesh.devices.flat))
    tiles = [size / (8 * mesh.shape["fsdp"] * mesh.shape.get(LOGICAL_AXES[axis], 1)) for size, axis in rows]
    return max((n for n in range(1, copies + 1) if not copies % n and not any(tile % n for tile in tiles)), default=1)


def shardings(mesh: Mesh, specs):
    """A tree of partition specs as shardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def identity(x):
    """The identity: what a single device does in place of a sum or gather over several."""
    return x


def on_each_device(mesh: Mesh, function: Callable, in_specs, out_specs) -> Callable:
    """`function`, run by every device on its own parts; it gets other devices' data by its sums and gathers alone."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of the mesh that divide an array with this spec."""
    return tuple(axis for _, axis in _cuts(spec))


def _cuts(spec: PartitionSpec) -> list[tuple[int, str]]:
    """Each axis of the mesh that divides an array with this spec, with the dimension that it cuts, outer axes first."""
    return [(dimension, axis) for dimension, place in enumerate(spec) for axis in jax.tree.leaves(place)]


def gather(values, specs, over: tuple[str, ...]):
    """Gather every array over some axes of the mesh, within `on_each_device`; its gradient is summed and scattered.

    Args:
        values: a tree of arrays, each device's parts.
        specs: a tree like `values`, of results of `partition`.
        over: names of mesh axes.
    """

    def whole(value, spec):
        for dimension, axis in reversed(_cuts(spec)):
            if axis in over and jax.lax.axis_size(axis) > 1:
                value = jax.lax.all_gather(value, axis, axis=dimension, tiled=True)
        return value

    return jax.tree.map(whole, values, specs)


def scatter(values, specs, over: tuple[str, ...]):
    """The transpose of `gather`, with its arguments: sums over some axes of the mesh, each device keeping its part."""

    def part(value, spec):
        for dimension, axis in _cuts(spec):
            if axis in over and jax.lax.axis_size(axis) > 1:
                value = jax.lax.psum_scatter(value, axis, scatter_dimension=dimension, tiled=True)
        return value

    return jax.tree.map(part, values, specs)


def sum_copies(values, specs):
    """The sums of arrays over the devices that hold copies of the same part. Used within `on_each_device`."""

    def add(value, spec):
        cut = axes_of(spec)
        return jax.lax.psum(value, tuple(axis for axis in AXES if axis not in cut and jax.lax.axis_size(axis) > 1))

    return jax.tree.map(add, values, specs)
