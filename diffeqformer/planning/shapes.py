"""The memory of a train step from shapes alone, for devices whose compiler isn't at hand.

The state's shapes are exact, and so is what the loops over depth read and write: the step is traced. The rest follows
the order of its work (`diffeqformer.training.loss`):

    loss      W, what was stored, the gathered head, the embeddings' gradient, a chunk of logits
    backward  W and its gradient, what was stored, the embeddings' gradient, a step of depth computed again
    update    the gradients of W and of the embeddings as they are summed, and a P's gradient

A step that is computed again holds what it would store with `model.remat=none`, at most. What XLA needs for itself, its
workspaces and fragments, isn't in the account.
"""

import math
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from ml_collections import ConfigDict

from diffeqformer.cross_entropy import CHUNK
from diffeqformer.depth.depths import longest_grid
from diffeqformer.errors import UserError
from diffeqformer.fields import attention
from diffeqformer.parallel.sharding import BATCH
from diffeqformer.planning.chips import Gpu
from diffeqformer.planning.estimate import Planned
from diffeqformer.planning.programs import size_of
from diffeqformer.training.step import Program
from diffeqformer.transformer import MODELS, abstract_model, padded_vocabulary, vector_field


@jax.custom_vjp
def flash(query, key, value):
    """Stands for attention that stores its result and a number for each row of scores, as cuDNN's does.

    cuDNN's own can't be traced without a GPU.
    """
    return query


def _flash_forward(query, key, value):
    result = query + value[:, :, :1]
    result, rows = (checkpoint_name(x, "attention") for x in (result, query[..., 0].astype(jnp.float32)))
    return result, (query, key, value, result, rows)


def _flash_backward(stored, gradient):
    query, key, value, result, rows = stored
    few, rows = (x[:, :, : key.shape[2]] for x in (gradient, rows[..., None].astype(value.dtype)))
    return gradient * result, few * key, few * value * rows


flash.defvjp(_flash_forward, _flash_backward)


def attention_on(gpu: Gpu, config: ConfigDict) -> tuple[Callable, str]:
    """The attention of a run on a kind of GPU, or what stands for it, and its description for the log."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=gpu.capability)
    head_width = vector_field(config.model).head_width
    attend, said = attention.fastest(device, config.model.dtype, config.sequence_length, head_width)
    return flash if attend is attention.cudnn else attend, said


def train_step_by_shapes(program: Program) -> Planned:
    """A run's deepest train step, with the bytes of a device at the moment that needs most, by cause.

    Args:
        program: with `attention_on` the devices that are planned for. Its own may be of any kind.

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
    examples = config.batch_size // config.microbatches // math.prod(program.mesh.shape[axis] for axis in BATCH)
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
    parts |= max(moments, key=lambda moment: sum(moment.values()))
    return Planned(f"train step, {num_steps} steps of depth", sum(parts.values()), parts)


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
