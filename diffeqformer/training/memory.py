"""Whether a run fits into memory, checked before anything is allocated.

Without this check, running out of memory on a CPU is reported late or never. JAX 0.10 can wait forever for scalars of
a program whose allocation failed, and Linux kills a process that uses more memory than there is.
"""

import math

import jax
from ml_collections import ConfigDict

from diffeqformer.errors import UserError, out_of_memory
from diffeqformer.parallel.memory import bytes_of_program, bytes_on_device, free_bytes, gigabytes, placed
from diffeqformer.training.step import Program


def check_memory(config: ConfigDict, program: Program, state: dict, will_train: bool) -> None:
    """Compare a run's memory needs with the free memory of each device of this process, if the device reports it.

    This compiles the train step, and the validation at the highest number of steps. Their first calls then find them
    compiled.

    Args:
        state: shapes and shardings of the whole state.
        will_train: whether train steps will follow.

    Raises:
        UserError: if the state is too large, or a train step or the validation needs too much.
    """
    free = free_bytes(program.batch_sharding.mesh.local_devices)
    if free is None:
        return
    needed = sum(map(bytes_on_device, jax.tree.leaves(state)))
    if needed > free:
        raise UserError(
            f"config.model: its parameters and the optimizer's state need {gigabytes(needed)} on each device, but "
            f"{gigabytes(free)} are free; take a smaller model, or spread it over more devices (config.mesh.fsdp)"
        )
    if not will_train:
        return
    tokens, valid = program.batch_to_evaluate()
    train_step = program.train_step.lower(state, tokens, max(program.depths))
    check_program("a train step", train_step, free, program)
    moments = sum(map(bytes_on_device, jax.tree.leaves(state["optimizer"])))  # are there, too
    check_program("a validation", lower_evaluation(program, state["params"], tokens, valid), free - moments, program)


def lower_evaluation(program: Program, params: dict, tokens, valid) -> jax.stages.Lowered:
    """The evaluation at the highest number of steps that a run validates."""
    config = program.config
    deepest = max(program.depths)
    depth = deepest if deepest > config.model.num_steps else None  # as the validation names it
    if config.model.generate_chunk:
        return program.evaluate.lower(params, program.for_evaluation(params, depth), tokens, valid)
    shapes = jax.eval_shape(program.weights, params, depth)
    places = program.weights.lower(params, depth).compile().output_shardings
    return program.evaluate.lower(params, placed(shapes, places), tokens, valid)


def check_program(what: str, lowered: jax.stages.Lowered, free: int, program: Program) -> None:
    """Compile a program of a run, and compare what it needs with `free` bytes on each device.

    Raises:
        UserError: if it needs more.
    """
    try:
        needed = bytes_of_program(lowered.compile())
    except jax.errors.JaxRuntimeError as error:  # the TPU's compiler refuses a program that is too large
        if not out_of_memory(error):
            raise
        needed = math.inf
    if needed > free:
        said = gigabytes(needed) if needed < math.inf else "more memory"
        raise UserError(
            f"config.batch_size: {what} needs {said} on each device, but {gigabytes(free)} are free; take "
            f"{remedies(program.config, program.mesh.size, needed / max(1, free))}"
        )


def remedies(config: ConfigDict, num_devices: int, excess: float) -> str:
    """The three options that would save most memory, of those that this config can take.

    Args:
        excess: what is needed divided by what is free; infinite: not known.
    """
    halvings = max(1, math.ceil(math.log2(excess))) if excess < math.inf else 1
    parts = config.microbatches * 2**halvings
    divides = config.batch_size % (parts * num_devices // max(1, config.mesh.tensor)) == 0
    remat = {"none": "step", "products": "step", "step": "binomial"}.get(config.model.remat)
    return ", ".join(
        [
            f"config.microbatches={parts}" if divides else "a smaller batch",
            *([f"config.model.remat={remat}"] if remat else []),
            "or more devices with config.mesh.fsdp",
        ]
    )
