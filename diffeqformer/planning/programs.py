"""All programs of a run, compiled for TPUs that need not be there."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from diffeqformer import checkpoint
from diffeqformer.depth.depths import chunk_length, longest_grid
from diffeqformer.inference.cached import padded_prompt, read_prompt, read_token
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.inference.reader import without_depth
from diffeqformer.inference.scoring import full_batch, target_scores
from diffeqformer.parallel.memory import bytes_on_device, placed
from diffeqformer.parallel.mesh import divide_generator, make_mesh
from diffeqformer.parallel.sharding import EVERYWHERE, identity, sharding, shardings
from diffeqformer.planning.chips import Tpu
from diffeqformer.planning.compiler import Compiled, TooLarge, compile_for_tpu
from diffeqformer.solvers.checkpointing import schedule
from diffeqformer.training import finetune
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of
from diffeqformer.transformer import abstract_model, divide_copies, partition_specs, split_model, weights_of


class Planned(NamedTuple):
    """A program of a run. Bytes are those of one device.

    arrays: bytes of the run's arrays that are there while it runs
    needed: bytes in all, without results that take the place of arrays
    compiled: None if it doesn't fit
    num_steps: steps of depth of a train step; otherwise 0
    optional: the run goes on without it if it doesn't fit
    """

    name: str
    arrays: int
    needed: int
    compiled: Compiled | None
    num_steps: int = 0
    optional: bool = False

    def fits(self, chip: Tpu) -> bool:
        """Whether the compiler accepts it, and a device has as much memory."""
        return self.compiled is not None and self.needed <= chip.memory

    def bytes(self) -> dict[str, int]:
        """What it needs; nothing but the sum is known if it doesn't fit."""
        if not self.compiled:
            return {"needed": self.needed}
        more = {"temporaries": self.compiled.temporaries, "results": self.compiled.results}
        return {"arrays": self.arrays, **more, "needed": self.needed}


def planned(
    name: str,
    lowered: jax.stages.Lowered,
    arrays: int,
    num_steps: int = 0,
    dump: str | None = None,
    rounds: float = 0,
) -> Planned:
    """Compile a program of a run, while which its `arrays` take some bytes. The rest is as in `compile_for_tpu`."""
    try:
        compiled = compile_for_tpu(lowered, dump, rounds)
    except TooLarge as error:
        return Planned(name, arrays, error.args[0], None, num_steps)
    arrays = max(arrays, compiled.arguments)  # which XLA may pad
    return Planned(name, arrays, arrays + compiled.temporaries + compiled.results, compiled, num_steps)


def compile_run(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """Compile the programs of a run, one after the other: its start, train steps, validation and sample.

    In the sample, what needs the result of a program that doesn't fit is left out.

    Args:
        dump: a folder for what the compiler writes of train steps.
    """
    if config.base:
        yield from compile_start_from_base(config, program)
    else:
        yield planned("initial state", program.init.lower(), 0)
    yield from compile_train_steps(config, program, dump)
    for depth in (None, *(depth for depth in program.depths if depth != config.model.num_steps)):
        yield from compile_validation(program, depth)
    params = program.state_shapes["params"]
    for found in compile_sample(program, params, size_of(params)):  # the moments are gone by then
        yield found._replace(optional=True)


def compile_validation(program: Program, depth: int | None) -> Iterator[Planned]:
    """The programs of a validation at a number of steps of depth (None: as trained)."""
    state, at = size_of(program.state_shapes), f", {depth or program.config.model.num_steps} steps of depth"
    weights = size_of(program.weights_shapes(depth))
    for name, lowered in programs_of(program, depth):
        beside = name == "dynamics" or (name == "evaluation" and not program.config.model.generate_chunk)
        title = name if name == "dynamics" else f"{name}{at}"
        yield planned(title, lowered, state + weights * beside)


def compile_train_steps(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """The train steps of a run at each of its depths, the deepest first."""
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32)
    for depth in sorted(program.depths, reverse=True):
        lowered = program.train_step.lower(program.state_shapes, tokens, depth)
        yield planned(f"train step, {depth} steps of depth", lowered, 0, depth, dump, computed_again(config, depth))


def computed_again(config: ConfigDict, num_steps: int) -> float:
    """How many steps, or chunks of them, binomial checkpointing computes again before each one on the way back."""
    if config.model.remat != "binomial":
        return 0.0
    steps = longest_grid(config.model, num_steps)
    if chunk := config.model.generate_chunk:
        steps //= chunk_length(steps, chunk)
    return float(schedule(steps, min(config.model.snapshots, steps)).counts.mean())


def compile_start_from_base(config: ConfigDict, program: Program) -> Iterator[Planned]:
    """The start of a run from a base: its weights at the times of the grid, unless it goes on, then the first state."""
    base = checkpoint.load_config(config.base, finetune.step_of_base(config), "config.base")
    model = abstract_model(base)
    graph, shapes = split_model(model)
    shapes = placed(shapes, shardings(divide_copies(model, program.mesh), partition_specs(model)))
    if finetune.goes_on(config):
        yield planned("initial state", program.init.lower(shapes), 0)
        return
    arguments = graph, shapes, config.model.num_steps, jnp.dtype("float32"), config.model.solver
    found = planned("weights of the base", discretized_params.lower(*arguments), size_of(shapes))
    yield found
    if found.compiled:
        params = placed(jax.eval_shape(discretized_params, *arguments), found.compiled.output_shardings)
        yield planned("initial state", program.init.lower(params), 0)


def compile_sample(program: Program, params: dict, state: int) -> Iterator[Planned]:
    """Writing the sample at the end of a run, whose `state` takes some bytes."""
    if program.mesh.shape["generator"] > 1:
        mesh = divide_generator(program.mesh, 1)
        params = placed(params, shardings(mesh, program.loss.param_specs))
        state += size_of(params)
    made = planned("weights for the sample", weights_of.lower(program.graph, params, None), state)
    yield made
    if not made.compiled:
        return
    weights = placed(jax.eval_shape(weights_of, program.graph, params, None), made.compiled.output_shardings)
    model = without_depth(nnx.merge(program.graph, params))
    length = model.max_length
    graph, params = split_model(model)
    prompt = planned(
        "reading the prompt",
        read_prompt.lower(graph, params, weights, padded_prompt([], length), 1),
        state + size_of(weights),
    )
    yield prompt
    if prompt.compiled:
        _, cache = jax.eval_shape(read_prompt, graph, params, weights, padded_prompt([], length), 1)
        cache = placed(cache, prompt.compiled.output_shardings[1])
        token = read_token.lower(graph, params, weights, cache, np.zeros(1, np.int32), 1)
        yield planned("writing a token", token, state + size_of(weights) + size_of(cache))


def compile_scoring(config: ConfigDict, devices: list, windows: int = 16) -> Iterator[Planned]:
    """Compile what scores texts with a trained model (`diffeqformer.inference.scoring`) on some devices.

    Args:
        windows: sequences scored at once, rounded up to a multiple of the number of devices.
    """
    model, mesh = abstract_model(config), make_mesh(devices=devices)
    graph, shapes = split_model(model)
    params = placed(shapes, shardings(divide_copies(model, mesh), partition_specs(model)))
    made = planned("weights", weights_of.lower(graph, params, None), size_of(params))
    yield made
    if not made.compiled:
        return
    reader, others = split_model(without_depth(nnx.merge(graph, params)))
    weights = placed(jax.eval_shape(weights_of, graph, params, None), made.compiled.output_shardings)
    copies = NamedSharding(mesh, EVERYWHERE)
    copying = jax.jit(identity, out_shardings=copies).lower((others, weights))
    yield planned("copies of the weights", copying, size_of(params) + size_of(weights))
    others, weights = jax.tree.map(lambda leaf: leaf.update(sharding=copies), (others, weights))
    rows = full_batch(windows, mesh)
    tokens = jax.ShapeDtypeStruct((rows, config.sequence_length), jnp.int32, sharding=sharding(mesh, "batch", None))
    scores = target_scores.lower(reader, others, weights, tokens, tokens, mesh)
    yield planned(f"scores of {rows} windows", scores, size_of((others, weights)))


def size_of(shapes) -> int:
    """The bytes of a tree of shapes with shardings, on one device."""
    return sum(map(bytes_on_device, jax.tree.leaves(shapes)))
