"""Whether a run fits into memory, checked before anything is allocated.

Without this check, running out of memory on a CPU is reported late or never. JAX 0.10 can wait forever for scalars of
a program whose allocation failed, and Linux kills a process that uses more memory than there is.
"""

import math

import jax
from ml_collections import ConfigDict

from diffeqformer.depth.depths import chunk_length, chunk_lengths
from diffeqformer.errors import UserError, counted, out_of_memory, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import bytes_of_program, free_bytes, gigabytes, size_of
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of


def check_memory(program: Program, will_train: bool) -> None:
    """Compare a run's memory needs with the free memory of each device, if devices report it; the least of all hosts.

    If train steps will follow, this compiles the train step, and the programs of a validation, at `largest_depths`.
    Their first calls then find them compiled. For TPUs their temporaries aren't known beside other arrays
    (`bytes_of_program`), so there a validation is compared with less than it needs.
    """
    free = free_bytes(program.batch_sharding.mesh.local_devices)
    if free is None:
        return
    free = min(hosts.of_all(free))  # on all hosts or on none: the others would wait for one that has given up
    config, state = program.config, program.state_shapes
    teacher = program.teacher_shapes if will_train else ()
    needed, beside = size_of((state, teacher)), ", its teacher" * bool(teacher)
    if needed > free:
        raise UserError(
            f"config.model: its parameters{beside} and the optimizer's state need {gigabytes(needed)} on each device, "
            f"but {gigabytes(free)} are free; take a smaller model, or spread it over more devices (config.mesh.fsdp)"
        )
    if not will_train:
        return
    tokens, _ = program.batch_to_evaluate()
    for depth in largest_depths(config.model, chunk_lengths(config.model)):
        lowered = program.train_step.lower(state, tokens, depth, *program.teacher_shapes)
        check_program("config.batch_size: a train step needs {}", lowered, free)
    free -= size_of((state["optimizer"], teacher))  # which no program of a validation takes
    own, chunk = config.model.num_steps, config.model.generate_chunk  # a validation's grids aren't shifted
    validated = {depth: chunk_length(depth, chunk) for depth in (own, *program.depths)}
    for depth in (None, *(depth for depth in largest_depths(config.model, validated) if depth != own)):
        field = "model.num_steps" if depth is None else "model.training_depths"
        said = f"config.{field}: a validation in {counted(depth or own, 'step')} needs {{}} for its "
        for part, lowered in programs_of(program, depth):
            check_program(said + part, lowered, free)


def largest_depths(model: ConfigDict, lengths: dict[int, int]) -> list[int]:
    """The numbers of steps that may need most memory, from the steps of a chunk at each: any higher one has fewer.

    Where layers are left out, the others are copied, so the second number may need more than the first.
    """
    if model.left_out:
        return sorted(lengths, reverse=True)[:2]
    found = []
    for depth in sorted(lengths, reverse=True):
        if not found or lengths[depth] > lengths[found[-1]]:
            found.append(depth)
    return found


def check_program(said: str, lowered: jax.stages.Lowered, free: int) -> None:
    """Compile a part of a program, and check that it needs at most `free` bytes. `said` begins the message."""
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
        size = gigabytes(needed) if needed < math.inf else "more memory"
        raise UserError(
            f"{said.format(size)} on each device, but {gigabytes(free)} are free; take more config.microbatches, "
            "config.model.remat=step or binomial, a smaller batch, fewer steps of depth, or more devices with "
            "config.mesh.fsdp"
        )
