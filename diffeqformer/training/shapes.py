"""The memory of a train step from shapes alone, in seconds and without a compiler.

The state's shapes are exact, and so is what the loops over depth read and write: the step is traced. The rest follows
the order of its work (`diffeqformer.training.loss`):

    loss      W, what was stored, the gathered head, the embeddings' gradient, a chunk of logits
    backward  W and its gradient, what was stored, the embeddings' gradient, a step of depth computed again
    update    the gradients of W and of the embeddings as they are summed, and a P's gradient

A step that is computed again holds what it would store with `model.remat=none`, at most. What XLA needs for itself, its
workspaces and fragments, isn't in the account.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from ml_collections import ConfigDict

from diffeqformer.cross_entropy import CHUNK
from diffeqformer.depth.depths import longest_grid
from diffeqformer.errors import UserError
from diffeqformer.parallel.memory import gigabytes, size_of
from diffeqformer.parallel.sharding import BATCH
from diffeqformer.training.step import Program
from diffeqformer.transformer import MODELS, abstract_model, padded_vocabulary, vector_field

USED = 0.9
"""The share of a device's memory that a train step may take by its shapes.

For the configs, the TPU compiler's figures were at most 8 % above these, and XLA's on an H200 below.
"""


def with_microbatches(program: Program, memory: int | None) -> Program:
    """The program, with the fewest microbatches that fit if its config leaves their number open (0).

    Their number follows from the config and the devices alone, so a run that is resumed on the same ones keeps it. If
    none fits, it is that of the examples of a device.

    Args:
        memory: bytes of a device; None: not known, which gives one microbatch.
    """
    if program.config.microbatches:
        return program
    examples = program.config.batch_size // parts_of_batch(program)
    for number in (number for number in range(1, examples + 1) if examples % number == 0):
        config = program.config.copy_and_resolve_references()
        config.microbatches = number
        program = Program(config, program.mesh, (program.loss.attend, program.attention))
        needed = sum(train_step_by_shapes(program).values())
        if memory is None or needed <= USED * memory:
            break
    of = f" of a device's {gigabytes(memory)}" if memory is not None else "; a device's memory isn't known"
    print(f"microbatches: {number}; by its shapes, a train step needs {gigabytes(needed)}{of}", flush=True)
    return program


def parts_of_batch(program: Program) -> int:
    """The number of parts into which devices split the examples of a batch."""
    return math.prod(program.mesh.shape[axis] for axis in BATCH)


def train_step_by_shapes(program: Program) -> dict[str, int]:
    """The bytes of a device in a run's deepest train step, at the moment that needs most, by cause.

    Args:
        program: with the attention of the devices that are meant. Its own may be of any kind.

    Raises:
        UserError: if weights are made in chunks, which has other loops.
    """
    config, model, num_steps = program.config, program.config.model, max(program.depths)
    if model.generate_chunk:
        raise UserError(
            "config.model.generate_chunk: must be 0 in a plan for GPUs, which goes by the loops over all steps, but it "
            f"is {model.generate_chunk}"
        )
    steps, compute = longest_grid(model, num_steps), jnp.dtype(model.dtype).itemsize
    examples = config.batch_size // config.microbatches // parts_of_batch(program)
    weights, all_stored, gradient = bytes_of_loops(program, num_steps, "none")
    states_kept = {"binomial": min(model.snapshots, steps) + 1, "reversible": 1}.get(model.remat)
    if states_kept:
        stored = states_kept * bytes_of_state(config, examples)
    else:
        stored = bytes_of_loops(program, num_steps, model.remat).stored
    vocabulary = padded_vocabulary(model)
    matrix = vocabulary * model.width
    after = sums = {"embeddings' gradient": 4 * matrix * (1 if vector_field(model).tied_head else 2)}
    in_float32 = 4 * gradient // compute
    if config.microbatches > 1:  # what is added up, in fp32
        sums = after | {"sums over microbatches": in_float32 + after["embeddings' gradient"]}
    logits = min(CHUNK, examples * config.sequence_length) * vocabulary * (4 + compute)
    forward = {"weights": weights - read_in_place(program, weights), "states": stored, **sums}
    moments = [
        forward | {"head and logits": compute * matrix + logits},
        forward | {"weights' gradient": gradient, "a step computed again": all_stored // steps},
        {"weights' gradient": in_float32, **after, "a P's gradient": largest_gradient(program)},
    ]
    state = program.state_shapes
    parts = {"parameters": size_of(state["params"]), "moments": size_of(state["optimizer"])}
    return parts | max(moments, key=lambda moment: sum(moment.values()))


def bytes_of_state(config: ConfigDict, examples: int) -> int:
    """The bytes of a solver's state between two steps."""
    model = abstract_model(config)
    x = jax.ShapeDtypeStruct((examples, config.sequence_length, config.model.width), jnp.float32)
    state = jax.eval_shape(model.solver.begin, x, jax.ShapeDtypeStruct((), jnp.float32))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def read_in_place(program: Program, weights: int) -> int:
    """The bytes of weights that the loops read where they lie: parameters of layers that aren't cast beforehand."""
    model, params = program.config.model, program.state_shapes["params"]
    if MODELS[model.kind].weights.generated:
        return 0
    uncast = params if model.dtype == "float32" else program.frozen(params)
    return min(weights, size_of(uncast.get("depth", {})))


def largest_gradient(program: Program) -> int:
    """The bytes of the largest gradient of a P that XLA stores on a device; AdamW's kernels form theirs by tiles."""
    if not program.loss.projections:
        return 0
    layers = program.state_shapes["params"]["depth"]["layers"]
    names = program.loss.projections.shapes.keys() - program.optimizer.fused.values()
    return max((size_of(layers[name]["projection"]) for name in names), default=0)


class Loops(NamedTuple):
    """The bytes on a device that the loops over depth read and write."""

    weights: int
    stored: int
    gradient: int


def bytes_of_loops(program: Program, num_steps: int, remat: str) -> Loops:
    """What the train step's loops over depth would read and write with another `model.remat`."""
    config = program.config.copy_and_resolve_references()
    config.model.remat = remat
    program = Program(config, program.mesh, (program.loss.attend, ""))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32)
    traced = program.train_step.trace(program.state_shapes, tokens, num_steps).jaxpr.jaxpr
    steps = longest_grid(config.model, num_steps)
    found = [scan for scan in scans(traced) if scan.params["length"] == steps]
    written = {scan: size(stacked(scan.outvars, scan.params["jaxpr"].out_avals)) for scan in found}
    # Parts of the loss can be as many as steps, but write less.
    forward, backward = (
        max((scan for scan in found if scan.params["reverse"] == reverse), key=written.get) for reverse in (False, True)
    )
    read = size(stacked(forward.invars, forward.params["jaxpr"].in_avals))
    return Loops(read, written[forward], written[backward])


def stacked(variables: list, in_a_step: list) -> list:
    """The arrays with a row for each step of a scan. What steps share or hand on has the same shape inside."""
    return [outside for outside, inside in zip(variables, in_a_step) if outside.aval.shape != inside.shape]


def size(variables: list) -> int:
    """The bytes of traced arrays."""
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)


def scans(jaxpr) -> Iterator:
    """All scans of a traced program, in the order in which they run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)
