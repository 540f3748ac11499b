"""The programs of a run, compiled for TPUs that need not be there."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from diffeqformer import checkpoint
from diffeqformer.depth.depths import chunk_length, longest_grid
from diffeqformer.inference.cached import padded_prompt, read_prompt, read_token
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.inference.reader import without_depth
from diffeqformer.inference.scoring import full_batch, target_scores
from diffeqformer.parallel.memory import bytes_on_device, placed
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.parallel.sharding import EVERYWHERE, identity, sharding, shardings
from diffeqformer.planning.compiler import compile_for_tpu
from diffeqformer.planning.estimate import Planned
from diffeqformer.solvers.checkpointing import schedule
from diffeqformer.training import finetune
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of
from diffeqformer.transformer import abstract_model, divide_copies, partition_specs, split_model, weights_of


def compile_run(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """Compile what a run needs, one program after the other: its start, train steps and validation.

    Args:
        dump: a folder for what the compiler writes of train steps.
    """
    if config.base:
        yield from compile_start_from_base(config, program)
    else:
        yield compile_for_tpu("initial state", program.init.lower())
    yield from compile_train_steps(config, program, dump)
    state = size_of(program.state_shapes)
    for depth in (None, *(depth for depth in program.depths if depth != config.model.num_steps)):
        weights, at = size_of(program.weights_shapes(depth)), f", {depth or config.model.num_steps} steps of depth"
        for name, lowered in programs_of(program, depth):
            beside = name == "dynamics" or (name == "evaluation" and not config.model.generate_chunk)
            title = name if name == "dynamics" else f"{name}{at}"
            yield compile_for_tpu(title, lowered, state + weights * beside)


def compile_train_steps(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """The train steps of a run at each of its depths, the deepest first."""
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32)
    for depth in sorted(program.depths, reverse=True):
        name, rounds = f"train step, {depth} steps of depth", computed_again(config, depth)
        lowered = program.train_step.lower(program.state_shapes, tokens, depth)
        step = compile_for_tpu(name, lowered, dump=dump, rounds=rounds)
        yield step._replace(num_steps=depth)


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
    graph, params = parameters(base, program.mesh)
    if not finetune.goes_on(config):
        arguments = graph, params, config.model.num_steps, jnp.dtype("float32"), config.model.solver
        made = compile_for_tpu("weights of the base", discretized_params.lower(*arguments), size_of(params))
        yield made
        if not made.parts:
            return
        params = placed(jax.eval_shape(discretized_params, *arguments), made.shardings)
    yield compile_for_tpu("initial state", program.init.lower(params))


def compile_scoring(config: ConfigDict, devices: list, windows: int = 16) -> Iterator[Planned]:
    """Compile what scores texts with a trained model (`diffeqformer.inference.scoring`) on some devices.

    Args:
        windows: sequences scored at once, rounded up to a multiple of the number of devices.
    """
    mesh = make_mesh(devices=devices)
    graph, params = parameters(config, mesh)
    made = compile_for_tpu("weights", weights_of.lower(graph, params, None), size_of(params))
    yield made
    if not made.parts:
        return
    weights = placed(jax.eval_shape(weights_of, graph, params, None), made.shardings)
    reader, others = split_model(without_depth(nnx.merge(graph, params)))
    everywhere = NamedSharding(mesh, EVERYWHERE)
    copying = jax.jit(identity, out_shardings=everywhere).lower((others, weights))
    yield compile_for_tpu("copies of the weights", copying, size_of(params) + size_of(weights))
    others, weights = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), (others, weights))
    rows = full_batch(windows, mesh)
    tokens = jax.ShapeDtypeStruct((rows, config.sequence_length), jnp.int32, sharding=sharding(mesh, "batch", None))
    scores = target_scores.lower(reader, others, weights, tokens, tokens, mesh)
    yield compile_for_tpu(f"scores of {rows} windows", scores, size_of((others, weights)))


def parameters(config: ConfigDict, mesh: Mesh) -> tuple[nnx.GraphDef, dict]:
    """A model's structure, and the shapes of its parameters where a mesh holds them."""
    model = abstract_model(config)
    graph, shapes = split_model(model)
    return graph, placed(shapes, shardings(divide_copies(model, mesh), partition_specs(model)))


def size_of(shapes) -> int:
    """The bytes of a tree of shapes with shardings, on one device."""
    return sum(map(bytes_on_device, jax.tree.leaves(shapes)))
