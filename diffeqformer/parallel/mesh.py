"""The device mesh. Every device has a place on four axes:

data       replicates the parameters; with several slices or nodes, the slow network lies within this axis
generator  does the same, except that it shards a hypernetwork and its optimizer state (`divide_generator`)
fsdp       shards the parameters; a step of depth gathers its weights before it uses them
tensor     shards heads, hidden units and the vocabulary, so devices share the work of every token
"""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from diffeqformer.errors import UserError, counted

AXES = ("data", "generator", "fsdp", "tensor")


def mesh_shape(config, num_devices: int) -> tuple[int, int, int]:
    """The sizes of the mesh's axes, from the `mesh` part of a config. There, -1 stands for all remaining devices.

    A UserError says if their product isn't the number of devices.
    """
    axes = ("data", "fsdp", "tensor")
    sizes = [config[axis] for axis in axes]
    for axis, size in zip(axes, sizes):
        if size < 1 and size != -1:
            raise UserError(f"config.mesh.{axis}: must be at least 1, or -1 for the rest, but it is {size}")
    if sizes.count(-1) > 1:
        raise UserError(f"config.mesh: only one axis can be -1, the rest, but they are {sizes}")
    try:
        return np.arange(num_devices).reshape(sizes).shape
    except ValueError:
        raise UserError(
            f"config.mesh: {' x '.join(axes)} must make up the {counted(num_devices, 'device')} of the run, but it is "
            f"{' x '.join(map(str, sizes))}; -1 means the rest"
        ) from None


def check_mesh(config, field, num_devices: int, platform: str, vocabulary: int) -> None:
    """Check that a config's mesh uses all devices, and splits batch, heads and rows evenly. Errors name what would do.

    On TPUs, rows must be split into whole tiles. A part of 20 rows, for example, would be padded to 24 or 32 at every
    gather, which is slower than not sharding at all.

    Args:
        field: the config's vector field (`diffeqformer.fields.field.Block`).
        vocabulary: number of rows of the embedding.
    """
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    microbatches = config.microbatches or 1  # 0: as many as are needed
    parts = data * fsdp * microbatches
    if config.batch_size % parts:
        raise UserError(
            f"config.batch_size: must be a multiple of the {data * fsdp} devices that share it (mesh.data x mesh.fsdp) "
            f"times microbatches ({microbatches}), such as {parts * -(-config.batch_size // parts)}, but it is "
            f"{config.batch_size}"
        )
    for what, size in (
        ("config.model.heads", field.heads),
        ("config.model.key_value_heads", field.key_value_heads),
        ("config.model.mlp", field.mlp),
        ("config.sequence_length", config.sequence_length),
        ("the embedding's rows, a multiple of config.model.vocab_multiple,", vocabulary),
    ):
        if size % tensor:
            works = [n for n in range(1, num_devices + 1) if num_devices % n == 0 and size % n == 0]
            raise UserError(
                f"config.mesh.tensor: must divide {what} ({size}), as {', '.join(map(str, works))} do, but it "
                f"is {tensor}"
            )
    positions = config.model.max_length if field.learned_positions else 0
    check_tiles(field, num_devices, fsdp, tensor, vocabulary, positions, tiled=platform == "tpu")


def check_tiles(field, num_devices: int, fsdp: int, tensor: int, vocabulary: int, positions: int, tiled: bool) -> None:
    """Check that rows are split evenly and, if memory is `tiled`, into whole tiles of the type that is gathered."""

    def misfit(fsdp: int, tensor: int) -> str | None:
        """What is not split well."""
        rows = [("config.model.width", field.width, 16), ("config.model.max_length", positions, 8)] * (fsdp > 1)
        rows += [
            ("the heads' width of a device", field.heads * field.head_width // tensor, 16),
            ("the hidden units of a device, config.model.mlp / mesh.tensor", field.mlp // tensor, 16),
            ("the rows of the embedding, which config.model.vocab_multiple fills up,", vocabulary // tensor, 8),
        ] * (fsdp * tensor > 1)
        for what, size, tile in rows:
            if size % (fsdp * (tile if tiled else 1)):
                return f"{what} ({size}) into equal parts{f' of whole tiles ({tile} rows)' * tiled}"

    if wrong := misfit(fsdp, tensor):
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        if fsdp > 1:
            axis, found, sizes = "fsdp", fsdp, [n for n in divisors if not misfit(n, tensor)]
        else:
            axis, found, sizes = "tensor", tensor, [n for n in divisors if not misfit(1, n) and not field.heads % n]
        works = f", as {', '.join(map(str, sizes))} would" if sizes else ""
        raise UserError(f"config.mesh.{axis}: must cut {wrong}{works}, but it is {found}")


def make_mesh(shape: tuple[int, int, int] | None = None, devices: list | None = None) -> Mesh:
    """A mesh of `devices` (by default all of the run), with neighbours on fast links where this matters most.

    Args:
        shape: sizes of the axes `data`, `fsdp` and `tensor`; by default all devices are on `data`. Over several slices
            of TPUs, `data` must be a multiple of their number: only this axis crosses the network between them.
    """
    devices = jax.devices() if devices is None else devices
    shape = (len(devices), 1, 1) if shape is None else shape
    slices = number_of_slices(devices)
    if shape[0] % slices:
        raise UserError(
            f"config.mesh.data: must be a multiple of the {slices} slices, between which only data parallelism is "
            f"fast enough, but it is {shape[0]}"
        )
    if slices > 1:
        within = (shape[0] // slices, *shape[1:])
        array = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)
    else:
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(array[:, None], AXES)


def number_of_slices(devices: list) -> int:
    """The number of slices of TPUs. A GPU's slice is its node, and nodes are fast enough for more than `data`."""
    on_tpus = devices[0].platform == "tpu"
    return len({getattr(device, "slice_index", 0) for device in devices}) if on_tpus else 1


def divide_generator(mesh: Mesh, parts: int) -> Mesh:
    """The mesh with its copies in groups of `parts` neighbours, each of which holds a part of a generator."""
    return Mesh(mesh.devices.reshape(-1, parts, *mesh.devices.shape[2:]), AXES)
