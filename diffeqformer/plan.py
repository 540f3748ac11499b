"""Plan a run on TPUs: `python -m diffeqformer.plan --config=configs/large.py --topology=v5e:8x8`.

Compiles every program of the run with the TPU compiler, which needs no TPU, and prints whether they fit, what takes
memory and time, and how long the run takes. Nothing is run. docs/scaling.md says what is modelled and what is known.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")  # for libtpu
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")

import json  # noqa: E402
import pathlib  # noqa: E402
import time  # noqa: E402

from absl import flags  # noqa: E402

from diffeqformer.config import check_config, check_fields, check_overrides  # noqa: E402
from diffeqformer.console import command_line  # noqa: E402
from diffeqformer.console.results import write_text  # noqa: E402
from diffeqformer.fields import attention  # noqa: E402
from diffeqformer.parallel.sharding import make_mesh, mesh_shape  # noqa: E402
from diffeqformer.planning.chips import chip_of  # noqa: E402
from diffeqformer.planning.compiler import tpu_devices  # noqa: E402
from diffeqformer.planning.estimate import plan_of  # noqa: E402
from diffeqformer.planning.programs import Planned, programs_of_run, train_steps  # noqa: E402
from diffeqformer.planning.report import summary  # noqa: E402
from diffeqformer.training import finetune  # noqa: E402
from diffeqformer.training.step import Program  # noqa: E402

CONFIG = command_line.define_config()
TOPOLOGY = flags.DEFINE_string("topology", None, "Kind and shape of a slice of TPUs, such as v5e:8x8.", required=True)
SLICES = flags.DEFINE_integer("slices", 1, "Slices of that shape, joined by the data centre's network.", lower_bound=1)
PROGRAMS = flags.DEFINE_enum("programs", "all", ["all", "train"], "All programs of the run, or its train steps alone.")
PRICE = flags.DEFINE_float("price_per_chip_hour", None, "To print what training costs.", lower_bound=0)
JSON = flags.DEFINE_string("json", None, "A file for the plan.")
PLAIN = flags.DEFINE_bool("plain_attention", False, "Plan with XLA's own attention, for comparison.")
DUMP = flags.DEFINE_string("dump", None, "A folder for what the compiler writes of train steps.")


def main() -> None:
    config, chip, start = CONFIG.value, chip_of(TOPOLOGY.value), time.monotonic()
    check_fields(config)
    config = finetune.inherit(config, f"runs/{config.name}")
    devices = tpu_devices(TOPOLOGY.value, SLICES.value)
    check_config(config, len(devices), "tpu")
    mesh = make_mesh(mesh_shape(config.mesh, len(devices)), devices)
    program = Program(config, mesh, (attention.plain, "plain") if PLAIN.value else None)
    where = f"{SLICES.value} slices of {TOPOLOGY.value}" if SLICES.value > 1 else TOPOLOGY.value
    print(f"{config.name} on {where}, {len(devices)} x {devices[0].device_kind}\n{program.said()}", flush=True)
    if PROGRAMS.value == "all":
        compiling = programs_of_run(config, program)
    else:
        compiling = train_steps(config, program, DUMP.value)
    programs: list[Planned] = []
    for planned in compiling:
        programs.append(planned)
        print(f"  {planned.name:<36} {planned.needed / 2**30:7.2f} GiB  {time.monotonic() - start:5.0f} s", flush=True)
    plan = plan_of(config, program, programs, chip, SLICES.value, PRICE.value)
    print(summary(config, plan))
    if JSON.value:
        write_text(pathlib.Path(JSON.value), json.dumps(plan, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main, check_overrides)
