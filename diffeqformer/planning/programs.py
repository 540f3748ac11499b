"""The programs of a run, compiled for TPUs that need not be there."""

import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from ml_collections import ConfigDict

from diffeqformer.depth.depths import chunk_length, longest_grid
from diffeqformer.errors import UserError
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.parallel.memory import placed, size_of
from diffeqformer.parallel.sharding import shardings
from diffeqformer.planning.estimate import Planned
from diffeqformer.planning.hlo import Module
from diffeqformer.solvers.checkpointing import schedule
from diffeqformer.training import finetune
from diffeqformer.training.step import Program
from diffeqformer.training.validation import programs_of
from diffeqformer.transformer import MODELS, abstract_model, divide_copies, partition_specs, split_model


def compile_run(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """Compile what a run needs, one program after the other: its start, train steps and validation."""
    if config.base:
        yield from compile_start_from_base(config, program)
    else:
        yield compile_for_tpu("initial state", program.init.lower())
    yield from compile_train_steps(config, program, dump)
    state = size_of((program.state_shapes, program.teacher_shapes))
    for depth in (None, *(depth for depth in program.depths if depth != config.model.num_steps)):
        at = f", {depth or config.model.num_steps} steps of depth"
        weights = 0 if config.model.generate_chunk else size_of(program.weights_shapes(depth))
        for name, lowered in programs_of(program, depth):
            yield compile_for_tpu(f"{name}{at}", lowered, state + weights * (name == "evaluation"))


def compile_train_steps(config: ConfigDict, program: Program, dump: str | None = None) -> Iterator[Planned]:
    """The train steps of a run at each of its depths, the deepest first."""
    for depth in sorted(program.depths, reverse=True):
        name, rounds = f"train step, {depth} steps of depth", computed_again(config, depth)
        lowered = program.train_step.lower(program.state_shapes, program.tokens, depth, *program.teacher_shapes)
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
    base = finetune.config_of_base(config)
    model = abstract_model(base)
    graph, params = split_model(model)
    params = placed(params, shardings(divide_copies(model, program.mesh), partition_specs(model)))
    if not MODELS[config.model.kind].weights.continuous:
        arguments = graph, params, config.model.num_steps, jnp.dtype("float32"), config.model.solver
        made = compile_for_tpu("weights of the base", discretized_params.lower(*arguments), size_of(params))
        yield made
        if not made.parts:
            return
        params = placed(jax.eval_shape(discretized_params, *arguments), made.shardings)
    yield compile_for_tpu("initial state", program.init.lower(params))


def tpu_devices(topology: str, slices: int) -> list:
    """The devices of one or more slices, which need not exist. The compiler must know their topology."""
    kind, _, shape = topology.partition(":")
    chips = math.prod(map(int, re.findall(r"\d+", shape)))
    if kind == "v5e" and chips > 256:  # libtpu would end the process
        raise UserError(f"--topology: a slice of v5e has at most 256 chips, but {topology} has {chips:,}")
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")  # libtpu need not be on a TPU's host
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it uses no TPU that another process could have
    more: dict = {"num_slices": slices} if slices > 1 else {}
    if set(re.findall(r"\d+", shape)) == {"1"}:  # a host usually has four
        more["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **more).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--topology: {topology} isn't available ({reason}); libtpu comes with pip install -e '.[tpu]'"
        ) from None


def needed_bytes(message: str) -> int | None:
    """The bytes that a program needs by the compiler's message about memory; None: it says another thing."""
    found = re.search(r"required for HLO temporaries \(([\d.]+)([KMGTP])\)|Used ([\d.]+)([KMGTP]) of", message)
    if "RESOURCE_EXHAUSTED" not in message or not found:
        return None
    number, unit = (group for group in found.groups() if group)
    return round(float(number) * 2 ** (10 * (1 + "KMGTP".index(unit))))


def size_of_temporaries(buffers: str) -> int:
    """The bytes of the part of the main memory that all temporary values share.

    XLA's `memory_analysis` can state half as many again, but isn't what the compiler compares with a chip's memory.
    """
    # The main memory has no color.
    found = re.findall(r"^allocation \d+: size (\d+)(?:, page \d+)?, preallocated-temp:", buffers, re.M)
    if not found and re.search("^(?!.* color ).*preallocated-temp", buffers, re.M):
        raise ValueError("the compiler's allocations can't be read; plan with the libtpu of constraints.txt")
    return sum(map(int, found))


def compile_for_tpu(
    name: str, lowered: jax.stages.Lowered, arrays: int = 0, dump: str | None = None, rounds: float = 0
) -> Planned:
    """Compile a program that was lowered for such devices.

    Args:
        arrays: bytes of a run's arrays that are there while it runs.
        dump: a folder that keeps all that the compiler writes; None: it is removed.
        rounds: how often loops run on average whose number of rounds is computed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(dump or temporary)
        try:
            compiled = lowered.compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
            return Planned(name, needed, {})
        program, buffers = (
            max(folder.glob(f"*{what}.txt"), key=os.path.getmtime).read_text()
            for what in ("after_codegen", "after_optimizations-buffer-assignment")
        )
    stats = compiled.memory_analysis()
    parts = {
        "arrays": max(arrays, stats.argument_size_in_bytes),  # which XLA may pad
        "temporaries": size_of_temporaries(buffers),
        "results": stats.output_size_in_bytes - stats.alias_size_in_bytes,
    }
    return Planned(name, sum(parts.values()), parts, Module(program, rounds), compiled.output_shardings)
