"""Plan a run's memory and time: `python -m diffeqformer.plan --config=large --topology=v5e:8x8`.

Compiles the run's start, train steps and validation with the TPU compiler, which needs no TPU, and prints whether they
fit, what takes time, how long the run takes and what it costs. For GPUs, such as h100:8, it prints the memory of the
train step alone, by its shapes. Nothing is run. docs/scaling.md says what is modelled and what is known.
"""

import pathlib
import sys
import tempfile
import time

import jax
from absl import flags

from diffeqformer.config import check_config, check_overrides, check_used, explain, given_fields
from diffeqformer.console import command_line
from diffeqformer.console.results import title, write_json
from diffeqformer.errors import UserError, reachable
from diffeqformer.parallel.mesh import make_mesh, mesh_shape
from diffeqformer.planning.chips import Gpu, chip_of
from diffeqformer.planning.estimate import Planned, gib, plan_of, summary
from diffeqformer.planning.flash import attention_on
from diffeqformer.planning.programs import compile_run, compile_train_steps, tpu_devices
from diffeqformer.training import finetune
from diffeqformer.training.room import train_step_by_shapes, with_microbatches
from diffeqformer.training.step import Program
from diffeqformer.training.teacher import config_of_teacher

BY_SHAPES = """\
This is the memory of the train step by its shapes, since nothing compiles for GPUs without one: what XLA needs for \
itself isn't in it, and times aren't modelled. The memory of a device is what JAX takes of it by default, three \
quarters (XLA_CLIENT_MEM_FRACTION)."""


def plan(options) -> None:
    """Print a plan, and write it if there is a file for it. `options` are those of the command."""
    config, topology, chip = options.config, options.topology, chip_of(options.topology)
    on_gpus = isinstance(chip, Gpu)
    check_used(sys.argv, config)
    check_options(options, on_gpus)
    jax.config.update("jax_platforms", "cpu")
    if on_gpus:  # opening a base takes JAX's devices; these stand for the GPUs
        jax.config.update("jax_num_cpu_devices", int(topology.partition(":")[2]))
    workdir = f"runs/{config.name}"
    config = finetune.inherit(config, workdir, given_fields(sys.argv))
    devices = jax.devices() if on_gpus else tpu_devices(topology, options.slices)
    check_config(config, len(devices), "gpu" if on_gpus else "tpu")
    mesh = make_mesh(mesh_shape(config.mesh, len(devices)), devices)
    teacher = config_of_teacher(config, devices, workdir)
    program = Program(config, mesh, attention_on(chip, config) if on_gpus else None, teacher)
    program = with_microbatches(program, chip.memory)
    config = program.config
    where = f"{options.slices} slices of {topology}" if options.slices > 1 else topology
    print(f"{title(config)} on {where}, {len(devices)} x {chip.name}\n{program.describe()}", flush=True)
    programs, start = [], time.monotonic()
    if on_gpus:  # the deepest train step, as no compiler has seen it
        parts = train_step_by_shapes(program)
        programs.append(Planned(f"train step, {max(program.depths)} steps of depth", sum(parts.values()), parts))
    else:
        for found in (compile_run if options.programs == "all" else compile_train_steps)(config, program, options.dump):
            programs.append(found)
            print(f"  {found.name:<36} {gib(found.needed):>7} GiB  {time.monotonic() - start:5.0f} s", flush=True)
    price = options.price_per_chip_hour and options.price_per_chip_hour / chip.devices
    found = plan_of(program, programs, chip, options.slices, price)
    print(summary(config, found))
    if on_gpus:
        print(BY_SHAPES)
    if options.json:
        write_json(pathlib.Path(options.json), found)


def check_options(options, on_gpus: bool) -> None:
    """Check the options that GPUs don't have, and those of files, before the minutes of compilation."""
    price = options.price_per_chip_hour is not None
    for option, given in {"dump": options.dump, "price_per_chip_hour": price, "slices": options.slices > 1}.items():
        if on_gpus and given:
            raise UserError(f"--{option}: is for TPUs; for GPUs only the memory of a train step is known; leave it out")
    for option, folder in (("--json", options.json and pathlib.Path(options.json).parent), ("--dump", options.dump)):
        if folder:
            with reachable(option, folder):
                pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()


if __name__ == "__main__":
    command_line.define_config()
    help_text = "A slice of TPUs, such as v5e:8x8, or a number of GPUs, such as h100:8."
    flags.DEFINE_string("topology", None, help_text, required=True)
    flags.DEFINE_integer("slices", 1, "Slices of that shape, joined by the data centre's network.", lower_bound=1)
    help_text = "The run's start, train steps and validation, or its train steps alone."
    flags.DEFINE_enum("programs", "all", ["all", "train"], help_text)
    flags.DEFINE_float("price_per_chip_hour", None, "To print what training costs.", lower_bound=0)
    flags.DEFINE_string("json", None, "A file for the plan.")
    flags.DEFINE_string("dump", None, "A folder for what the compiler writes of train steps.")
    command_line.run(lambda: plan(flags.FLAGS), check_overrides, explain)
