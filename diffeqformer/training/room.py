"""Whether a run fits into memory, checked before anything is allocated.

Without this check, running out of memory on a CPU is reported late or never. JAX 0.10 can wait forever for scalars of
a program whose allocation failed, and Linux kills a process that uses more memory than there is.

The number of microbatches, and plans for GPUs, go by the memory of a train step from shapes alone, in seconds and
without a compiler. The state's shapes are exact, and so is what the loops over depth read and write: the step is
traced. The rest follows the order of its work (`diffeqformer.training.loss`):

    loss      W, what was stored, the gathered head, the embeddings' gradient, a chunk of logits
    backward  W and its gradient, what was stored, the embeddings' gradient, a step of depth computed again
    update    the gradients of W and of the embeddings as they are summed, and a P's gradient

A step that is computed again holds what it would store with `model.remat=none`, at most. What XLA needs for itself, its
workspaces and fragments, isn't in the account.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from ml_collections import ConfigDict

from diffeqformer.cross_entropy import CHUNK
from diffeqformer.depth.depths import chunk_length, chunk_lengths, longest_grid
from diffeqformer.errors import UserError, counted, out_of_memory, reason_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import bytes_of, bytes_of_program, free_bytes, gigabytes, size_of
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of
from diffeqformer.transformer import MODELS, abstract_model, padded_vocabulary, vector_field

USED = 0.9
"""The share of a device's memory that a train step may take by its shapes.

For the configs, the TPU compiler's figures were at most 8 % above these, and XLA's on an H200 below.
"""


def check_memory(program: Program, will_train: bool) -> None:
    """Compare a run's memory needs with the free memory of each device, if devices report it; the least of all hosts.

    If train steps will follow, this compiles the train step, and the programs of a validation, at `largest_depths`.
    Their first calls then find them compiled. For TPUs their temporaries aren't known beside other arrays
    (`bytes_of_program`), so there a validation is compared with less than it needs.
    """
    free = free_bytes(program.mesh.local_devices)
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
    for depth in largest_depths(config.model, chunk_lengths(config.model)):
        lowered = program.train_step.lower(state, program.tokens, depth, *program.teacher_shapes)
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


def with_microbatches(program: Program, memory: int | None) -> Program:
    """The program, with the fewest microbatches that fit if its config leaves their number open (0).

    Their number follows from the config and the devices alone, so a run that is resumed on the same ones keeps it. If
    none fits, it is that of the examples of a device.

    Args:
        memory: bytes of a device; None: not known, which gives one microbatch.
    """
    if program.config.microbatches:
        return program
    [examples, _] = program.shardings.batch.shard_shape((program.config.batch_size, 1))
    for number in (number for number in range(1, examples + 1) if examples % number == 0):
        config = program.config.copy_and_resolve_references()
        config.microbatches = number
        program = program.changed(config)
        needed = sum(train_step_by_shapes(program).values())
        if memory is None or needed <= USED * memory:
            break
    of = f" of a device's {gigabytes(memory)}" if memory is not None else "; a device's memory isn't known"
    print(f"microbatches: {number}; by its shapes, a train step needs {gigabytes(needed)}{of}", flush=True)
    return program


def train_step_by_shapes(program: Program) -> dict[str, int]:
    """The bytes of a device in a run's deepest train step, at the moment that needs most, by cause.

    Args:
        program: with the attention of the devices that are meant. Its own may be of any kind. It must make all
            weights at once, and leave no layer out.
    """
    config, model, state = program.config, program.config.model, program.state_shapes
    num_steps = max(program.depths)
    if model.generate_chunk or model.left_out:
        name = "generate_chunk" if model.generate_chunk else "left_out"
        raise UserError(
            f"config.model.{name}: must be left out in a plan for GPUs, which goes by the loops over all steps, but it "
            f"is {model[name]}"
        )
    steps, compute = longest_grid(model, num_steps), jnp.dtype(model.dtype).itemsize
    examples = program.shardings.batch.shard_shape((config.batch_size, 1))[0] // config.microbatches
    weights, all_stored, gradient = bytes_of_loops(program, num_steps, "none")
    states_kept = {"binomial": min(model.snapshots, steps) + 1, "reversible": 1}.get(model.remat)
    if states_kept:
        x = jax.ShapeDtypeStruct((examples, config.sequence_length, model.width), jnp.float32)
        kept = jax.eval_shape(abstract_model(config).solver.begin, x, jax.ShapeDtypeStruct((), jnp.float32))
        stored = states_kept * bytes_of(kept)
    else:
        _, stored, _ = bytes_of_loops(program, num_steps, model.remat)
    vocabulary = padded_vocabulary(model)
    matrix = vocabulary * model.width
    after = sums = {"embeddings' gradient": 4 * matrix * (1 if vector_field(model).tied_head else 2)}
    in_float32 = 4 * gradient // compute
    if not MODELS[model.kind].weights.continuous:  # the loops read what isn't cast beforehand where it lies
        uncast = state["params"] if model.dtype == "float32" else program.loss.trained_and_frozen(state["params"])[1]
        weights = max(0, weights - size_of(uncast.get("depth", {})))
    largest = 0  # gradient of a P that XLA stores; AdamW's kernels form theirs by tiles
    if projections := program.loss.projections:
        layers = state["params"]["depth"]["layers"]
        stored_whole = projections.shapes.keys() - program.optimizer.fused.values()
        largest = max((size_of(layers[name]["projection"]) for name in stored_whole), default=0)
    if config.microbatches > 1:  # what is added up, in fp32
        sums = after | {"sums over microbatches": in_float32 + after["embeddings' gradient"]}
    of_teacher = 8 + compute if program.loss.teacher else 0  # its logits, their probabilities, and a head as large
    logits = min(CHUNK, examples * config.sequence_length) * vocabulary * (4 + compute + of_teacher)
    forward = {"weights": weights, "states": stored, **sums}
    moments = [
        forward | {"head and logits": compute * matrix + logits},
        forward | {"weights' gradient": gradient, "a step computed again": all_stored // steps},
        {"weights' gradient": in_float32, **after, "a P's gradient": largest},
    ]
    parts = {"parameters": size_of(state["params"]), "moments": size_of(state["optimizer"])}
    if program.loss.teacher:
        parts["teacher"] = size_of(program.teacher_shapes)
    return parts | max(moments, key=lambda moment: sum(moment.values()))


def bytes_of_loops(program: Program, num_steps: int, remat: str) -> tuple[int, int, int]:
    """The bytes on a device of what the train step's loops over depth would need with another `model.remat`.

    These are the weights that they read, what they store, and the gradient that they write.
    """
    config = program.config.copy_and_resolve_references()
    config.model.remat = remat
    program = program.changed(config)
    arguments = program.state_shapes, program.tokens, num_steps, *program.teacher_shapes
    traced = program.train_step.trace(*arguments).jaxpr.jaxpr
    steps = longest_grid(config.model, num_steps)
    found = [scan for scan in scans(traced) if scan.params["length"] == steps]
    written = {scan: bytes_by_step(scan.outvars, scan.params["jaxpr"].out_avals) for scan in found}
    # Parts of the loss can be as many as steps, but write less.
    forward, backward = (
        max((scan for scan in found if scan.params["reverse"] == reverse), key=written.get) for reverse in (False, True)
    )
    read = bytes_by_step(forward.invars, forward.params["jaxpr"].in_avals)
    return read, written[forward], written[backward]


def bytes_by_step(variables: list, in_a_step: list) -> int:
    """The bytes of arrays with a row for each step of a scan. What steps share or hand on has the same shape inside."""
    arrays = (variable.aval for variable in variables)
    return bytes_of([array for array, inside in zip(arrays, in_a_step) if array.shape != inside.shape])


def scans(jaxpr) -> Iterator:
    """All scans of a traced program, in the order in which they run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)
