"""Plan a run's memory and time: `python -m diffeqformer.plan --config=large --topology=v5e:8x8`.

Compiles the run's start, train steps and validation with the TPU compiler, which needs no TPU, and prints whether they
fit, what takes time, how long the run takes and what it costs. For GPUs, such as h100:8, it prints the memory of the
train step alone, by its shapes. Nothing is run. docs/scaling.md says what is modelled and what is known.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")  # for libtpu
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the compiler uses no TPU that another process could have

import pathlib  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from diffeqformer.config import (  # noqa: E402
    check_config,
    check_fields,
    check_overrides,
    check_used,
    explain,
    given_fields,
)
from diffeqformer.console import command_line  # noqa: E402
from diffeqformer.console.results import title, write_json  # noqa: E402
from diffeqformer.errors import UserError, reachable  # noqa: E402
from diffeqformer.parallel.mesh import make_mesh, mesh_shape  # noqa: E402
from diffeqformer.planning.chips import Gpu, chip_of  # noqa: E402
from diffeqformer.planning.estimate import Planned, plan_of, summary  # noqa: E402
from diffeqformer.planning.flash import attention_on  # noqa: E402
from diffeqformer.planning.programs import compile_run, compile_train_steps, tpu_devices  # noqa: E402
from diffeqformer.training import finetune  # noqa: E402
from diffeqformer.training.shapes import train_step_by_shapes, with_microbatches  # noqa: E402
from diffeqformer.training.step import Program  # noqa: E402
from diffeqformer.training.teacher import config_of_teacher  # noqa: E402

CONFIG = command_line.define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "A slice of TPUs, such as v5e:8x8, or a number of GPUs, such as h100:8.", required=True
)
SLICES = flags.DEFINE_integer("slices", 1, "Slices of that shape, joined by the data centre's network.", lower_bound=1)
PROGRAMS = flags.DEFINE_enum(
    "programs", "all", ["all", "train"], "The run's start, train steps and validation, or its train steps alone."
)
PRICE = flags.DEFINE_float("price_per_chip_hour", None, "To print what training costs.", lower_bound=0)
JSON = flags.DEFINE_string("json", None, "A file for the plan.")
DUMP = flags.DEFINE_string("dump", None, "A folder for what the compiler writes of train steps.")

BY_SHAPES = """\
This is the memory of the train step by its shapes, since nothing compiles for GPUs without one: what XLA needs for \
itself isn't in it, and times aren't modelled. The memory of a device is what JAX takes of it by default, three \
quarters (XLA_CLIENT_MEM_FRACTION)."""


def main() -> None:
    config, chip = CONFIG.value, chip_of(TOPOLOGY.value)
    on_gpus = isinstance(chip, Gpu)
    check_fields(config)
    check_used(sys.argv, config)
    check_options(on_gpus)
    if on_gpus:  # opening a base takes JAX's devices; these stand for the GPUs
        jax.config.update("jax_num_cpu_devices", int(TOPOLOGY.value.partition(":")[2]))
    workdir = f"runs/{config.name}"
    config = finetune.inherit(config, workdir, given_fields(sys.argv))
    devices = jax.devices() if on_gpus else tpu_devices(TOPOLOGY.value, SLICES.value)
    check_config(config, len(devices), "gpu" if on_gpus else "tpu")
    mesh = make_mesh(mesh_shape(config.mesh, len(devices)), devices)
    teacher = config_of_teacher(config, devices, workdir)
    program = Program(config, mesh, attention_on(chip, config) if on_gpus else None, teacher)
    program = with_microbatches(program, chip.memory)
    config = program.config
    where = f"{SLICES.value} slices of {TOPOLOGY.value}" if SLICES.value > 1 else TOPOLOGY.value
    print(f"{title(config)} on {where}, {len(devices)} x {chip.name}\n{program.describe()}", flush=True)
    if on_gpus:  # the deepest train step, as no compiler has seen it
        parts = train_step_by_shapes(program)
        programs = [Planned(f"train step, {max(program.depths)} steps of depth", sum(parts.values()), parts)]
    else:
        programs = compiled(config, program)
    price = None if PRICE.value is None else PRICE.value / chip.devices
    plan = plan_of(config, program, programs, chip, SLICES.value, price)
    print(summary(config, plan))
    if on_gpus:
        print(BY_SHAPES)
    if JSON.value:
        write_json(pathlib.Path(JSON.value), plan)


def check_options(on_gpus: bool) -> None:
    """Check the options that GPUs don't have, and those of files, before the minutes of compilation."""
    of_tpus = {"dump": DUMP.value, "price_per_chip_hour": PRICE.value is not None, "slices": SLICES.value > 1}
    for option, given in of_tpus.items():
        if on_gpus and given:
            raise UserError(f"--{option}: is for TPUs; for GPUs only the memory of a train step is known; leave it out")
    for option, folder in (("--json", JSON.value and pathlib.Path(JSON.value).parent), ("--dump", DUMP.value)):
        if folder:
            with reachable(option, folder):
                pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()


def compiled(config: ConfigDict, program: Program) -> list[Planned]:
    """The programs that are asked for, by the TPU compiler, with a line for each."""
    start, programs = time.monotonic(), []
    for found in (compile_run if PROGRAMS.value == "all" else compile_train_steps)(config, program, DUMP.value):
        programs.append(found)
        print(f"  {found.name:<36} {found.needed / 2**30:7.2f} GiB  {time.monotonic() - start:5.0f} s", flush=True)
    return programs


if __name__ == "__main__":
    command_line.run(main, check_overrides, explain)
