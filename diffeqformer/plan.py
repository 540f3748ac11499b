"""Plan a run's memory and time: `python -m diffeqformer.plan --config=large --topology=v5e:8x8`.

Compiles every program of the run with the TPU compiler, which needs no TPU, and prints whether they fit, what takes
memory and time, and how long the run takes. For GPUs, such as h100:8, it prints the memory of the train step alone, by
its shapes. Nothing is run. docs/scaling.md says what is modelled and what is known.
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
from diffeqformer.fields import attention  # noqa: E402
from diffeqformer.parallel.mesh import make_mesh, mesh_shape  # noqa: E402
from diffeqformer.planning.chips import Gpu, Tpu, gpus_of, tpu_of  # noqa: E402
from diffeqformer.planning.compiler import tpu_devices  # noqa: E402
from diffeqformer.planning.estimate import plan_of  # noqa: E402
from diffeqformer.planning.programs import compile_run, compile_scoring, compile_train_steps  # noqa: E402
from diffeqformer.planning.report import summary  # noqa: E402
from diffeqformer.planning.shapes import plan_on_gpus  # noqa: E402
from diffeqformer.training import finetune  # noqa: E402
from diffeqformer.training.step import Program  # noqa: E402

CONFIG = command_line.define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "A slice of TPUs, such as v5e:8x8, or a number of GPUs, such as h100:8.", required=True
)
SLICES = flags.DEFINE_integer("slices", 1, "Slices of that shape, joined by the data centre's network.", lower_bound=1)
PROGRAMS = flags.DEFINE_enum(
    "programs",
    "all",
    ["all", "train", "score"],
    "All programs of the run, its train steps alone, or what scores it afterwards (evaluate, downstream).",
)
PRICE = flags.DEFINE_float("price_per_chip_hour", None, "To print what training costs.", lower_bound=0)
JSON = flags.DEFINE_string("json", None, "A file for the plan.")
PLAIN = flags.DEFINE_bool("plain_attention", False, "Plan with XLA's own attention, for comparison.")
DUMP = flags.DEFINE_string("dump", None, "A folder for what the compiler writes of train steps.")


def main() -> None:
    config, gpus = CONFIG.value, gpus_of(TOPOLOGY.value)
    check_fields(config)
    check_used(sys.argv, config)
    for option, folder in (("--json", JSON.value and pathlib.Path(JSON.value).parent), ("--dump", DUMP.value)):
        if folder:  # before the minutes of compilation
            with reachable(option, folder):
                pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
    if gpus:  # opening a base takes JAX's devices; these stand for the GPUs
        jax.config.update("jax_num_cpu_devices", gpus[1])
    config = finetune.inherit(config, f"runs/{config.name}", given_fields(sys.argv))
    plan = planned_on_gpus(config, *gpus) if gpus else planned_on_tpus(config)
    if JSON.value:
        write_json(pathlib.Path(JSON.value), plan)


def planned_on_tpus(config: ConfigDict) -> dict:
    """Print and return the plan, by the TPU compiler.

    Raises:
        UserError: for options that don't go together, or a config that can't be run there.
    """
    chip = tpu_of(TOPOLOGY.value)
    check_config(config, None)
    scoring = PROGRAMS.value == "score"
    of_training = {"dump": DUMP.value, "price_per_chip_hour": PRICE.value, "plain_attention": PLAIN.value or None}
    for option, value in of_training.items():
        if scoring and value is not None:
            raise UserError(f"--{option}: is for train steps, which --programs=score leaves out; leave one of them out")
    devices = tpu_devices(TOPOLOGY.value, SLICES.value)
    check_config(config, len(devices), "tpu")
    program = program_of(config, devices)
    where = f"{SLICES.value} slices of {TOPOLOGY.value}" if SLICES.value > 1 else TOPOLOGY.value
    said = f"mesh: data {len(devices)}, fsdp 1, tensor 1" if scoring else program.describe()
    print(f"{title(config)} on {where}, {len(devices)} x {devices[0].device_kind}\n{said}", flush=True)
    plan = planned(config, program, chip)
    print(summary(config, plan))
    return plan


def planned_on_gpus(config: ConfigDict, gpu: Gpu, number: int) -> dict:
    """Print and return the plan by shapes.

    Raises:
        UserError: for options that need a compiler, or a config that can't be run there.
    """
    for option, wanted in (("dump", DUMP.value), ("price_per_chip_hour", PRICE.value)):
        if wanted is not None:
            raise UserError(f"--{option}: needs a compiler, and nothing compiles for GPUs without one; leave it out")
    if PROGRAMS.value == "score":
        raise UserError("--programs: must not be score for GPUs, for which nothing compiles without one")
    if SLICES.value > 1:
        raise UserError(f"--slices: are of TPUs; give the number of all GPUs, such as {TOPOLOGY.value}")
    if config.model.generate_chunk:
        raise UserError(
            "config.model.generate_chunk: must be 0 in a plan for GPUs, which goes by the loops over all steps, but it "
            f"is {config.model.generate_chunk}"
        )
    check_config(config, number, "gpu")
    plan = plan_on_gpus(config, jax.devices(), gpu, PLAIN.value)
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    print(f"{title(config)} on {number} x {gpu.name}")
    print(f"mesh: {mesh}; attention: {plan['attention']}\n{summary(config, plan)}")
    return plan


def program_of(config: ConfigDict, devices: list) -> Program:
    """What a run compiles; with --programs=score, on the mesh that scores, whose devices all have copies."""
    shape = None if PROGRAMS.value == "score" else mesh_shape(config.mesh, len(devices))
    mesh = make_mesh(shape, devices)
    return Program(config, mesh, (attention.plain, "plain") if PLAIN.value else None)


def planned(config: ConfigDict, program: Program, chip: Tpu) -> dict:
    """The plan of one run, with a line for each program that was compiled."""
    start, programs = time.monotonic(), []
    if PROGRAMS.value == "score":
        compiling = compile_scoring(config, list(program.mesh.devices.flat))
    else:
        compiling = (compile_run if PROGRAMS.value == "all" else compile_train_steps)(config, program, DUMP.value)
    for found in compiling:
        programs.append(found)
        print(f"  {found.name:<36} {found.needed / 2**30:7.2f} GiB  {time.monotonic() - start:5.0f} s", flush=True)
    return plan_of(config, program, programs, chip, SLICES.value, PRICE.value)


if __name__ == "__main__":
    command_line.run(main, check_overrides, explain)
