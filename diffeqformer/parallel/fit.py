"""Whether a config's mesh fits the devices and the model."""

from jax.sharding import Mesh

from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import mesh_shape, number_of_slices
from diffeqformer.parallel.sharding import LOGICAL_AXES


def check_mesh(config, field, num_devices: int, platform: str, vocabulary: int) -> None:
    """Check that a config's mesh uses all devices, and splits batch, heads and rows evenly.

    On TPUs, rows must be split into whole tiles. A part of 20 rows, for example, would be padded to 24 or 32 at every
    gather, which is slower than not sharding at all.

    Args:
        field: the config's vector field (`diffeqformer.fields.field.Block`).
        vocabulary: number of rows of the embedding.

    Raises:
        UserError: with the sizes that would work.
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


def generator_parts(mesh: Mesh, rows: list[tuple[int, str]]) -> int:
    """The largest number of parts into which copies of a model divide its generator (`mesh.divide_generator`).

    Each part has whole tiles of 8 rows. XLA's tiles of gathered weights have as many, in bf16 too. Copies in different
    slices don't share one: the network between them is too slow.

    Args:
        mesh: the devices.
        rows: number of rows of each generated kernel, and their logical axis.
    """
    copies = mesh.shape["data"] * mesh.shape["generator"] // number_of_slices(list(mesh.devices.flat))
    tiles = [size / (8 * mesh.shape["fsdp"] * mesh.shape.get(LOGICAL_AXES[axis], 1)) for size, axis in rows]
    return max((n for n in range(1, copies + 1) if not copies % n and not any(tile % n for tile in tiles)), default=1)
