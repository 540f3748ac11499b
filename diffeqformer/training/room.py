"""Whether a run fits into memory, checked before anything is allocated.

Without this check, running out of memory on a CPU is reported late or never. JAX 0.10 can wait forever for scalars of
a program whose allocation failed, and Linux kills a process that uses more memory than there is.
"""

import functools
import math
import os
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from diffeqformer.depth.depths import chunk_length, chunk_lengths
from diffeqformer.errors import UserError, counted, out_of_memory, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import bytes_of_program, bytes_on_device, free_bytes, gigabytes
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of


def check_memory(config: ConfigDict, program: Program, state: dict, will_train: bool) -> None:
    """Compare a run's memory needs with the free memory of each device, if devices report it; the least of all hosts.

    This compiles the train step, and the programs of a validation, at `largest_depths`. Their first calls then find
    them compiled. For TPUs their temporaries aren't known beside other arrays (`bytes_of_program`), so there a
    validation is compared with less than it needs.

    Args:
        state: shapes and shardings of the whole state.
        will_train: whether train steps will follow.

    Raises:
        UserError: if the state is too large, or a train step or the validation needs too much.
    """
    free = free_bytes(program.batch_sharding.mesh.local_devices)
    if free is None:
        return
    free = hosts.min_over_processes(free)  # on all hosts or on none: the others would wait for one that has given up
    needed = sum(map(bytes_on_device, jax.tree.leaves(state)))
    if needed > free:
        raise UserError(
            f"config.model: its parameters and the optimizer's state need {gigabytes(needed)} on each device, but "
            f"{gigabytes(free)} are free; take a smaller model, or spread it over more devices (config.mesh.fsdp)"
        )
    if not will_train:
        return
    tokens, _ = program.batch_to_evaluate()
    devices, chunk = program.mesh.size // program.mesh.shape["tensor"], config.model.generate_chunk
    remedy = functools.partial(remedies, config, devices)
    for depth in largest_depths(chunk_lengths(config.model) if chunk else dict(zip(program.depths, program.depths))):
        lowered = program.train_step.lower(state, tokens, depth)
        check_program("config.batch_size: a train step needs {}", lowered, free, remedy)
    free -= sum(map(bytes_on_device, jax.tree.leaves(state["optimizer"])))  # which no program of a validation takes
    own = config.model.num_steps  # a validation's grids aren't shifted
    validated = {depth: chunk_length(depth, chunk) if chunk else depth for depth in (own, *program.depths)}
    for depth in (None, *(depth for depth in largest_depths(validated) if depth != own)):
        for name, lowered in programs_of(program, depth):
            field = "model.num_steps" if depth is None else "model.training_depths"
            check_program(
                f"config.{field}: a validation in {counted(depth or own, 'step')} needs {{}} for its {name}",
                lowered,
                free,
                functools.partial(remedies, config, devices, what=name),
            )


def largest_depths(lengths: dict[int, int]) -> list[int]:
    """The numbers of steps that may need most memory: any higher one has shorter chunks.

    Args:
        lengths: the steps of a chunk by the number of steps; without chunks, all of them.
    """
    found = []
    for depth in sorted(lengths, reverse=True):
        if not found or lengths[depth] > lengths[found[-1]]:
            found.append(depth)
    return found


def check_program(what: str, lowered: jax.stages.Lowered, free: int, remedy: Callable[[float], str]) -> None:
    """Compile a program of a run, and compare what it needs with `free` bytes on each device.

    Args:
        what: the beginning of the message, with {} for the bytes.
        remedy: what to do, from what is needed divided by what is free; infinite: not known.

    Raises:
        UserError: if it needs more.
    """
    try:
        needed = bytes_of_program(lowered.compile())
    except jax.errors.JaxRuntimeError as error:  # the TPU's compiler refuses a program that is too large
        if not out_of_memory(error):
            raise
        if "memory space vmem" in str(error):  # of a kernel: no batch would be small enough
            raise UserError(
                f"A kernel's blocks don't fit into the TPU's VMEM ({reason_of(error)}); take "
                "config.kernels=xla if it is the hypernetwork's, or other config.model.heads if it is attention's"
            ) from error
        needed = math.inf
    if needed > free:
        said = what.format(gigabytes(needed) if needed < math.inf else "more memory")
        raise UserError(f"{said} on each device, but {gigabytes(free)} are free; take {remedy(needed / max(1, free))}")


def remedies(config: ConfigDict, parts_of_batch: int, excess: float, what: str = "train step") -> str:
    """The options that would save most memory, of those that this config can take.

    Args:
        parts_of_batch: over how many devices the examples of a batch are divided.
        excess: what is needed divided by what is free; infinite: not known.
        what: train step, or the weights or evaluation of a validation.
    """
    if what == "weights":
        return "fewer steps, or more devices with config.mesh.fsdp"
    halvings = max(1, math.ceil(math.log2(excess))) if excess < math.inf else 1
    parts = config.microbatches * 2**halvings
    divides = config.batch_size % (parts * parts_of_batch) == 0
    remat = {"none": "step", "products": "step", "step": "binomial"}.get(config.model.remat)
    remat = remat if what == "train step" else None  # an evaluation stores nothing
    return ", ".join(
        [
            f"config.microbatches={parts}" if divides else "a smaller batch",
            *([f"config.model.remat={remat}"] if remat else []),
            *(["XLA_CLIENT_MEM_FRACTION=.92 for more of the GPU"] if only_a_part_of_the_gpu() else []),
            "or more devices with config.mesh.fsdp",
        ]
    )


def only_a_part_of_the_gpu() -> bool:
    """Whether JAX takes three quarters of a GPU's memory, as it does if nobody tells it otherwise."""
    given = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ)  # JAX takes one alone
    return jax.default_backend() == "gpu" and not given
