"""Compile the train step of a config with the TPU compiler, without a TPU, to see whether it fits and what is left.

    pip install -e '.[tpu]' -c constraints.txt
    python benchmarks/compile_for_tpu.py --config=configs/large.py --topology=v5e:8x8

Prints the GiB per chip for the state and the batch (arguments; the new state reuses their memory) and for everything
else (temporaries), the time for lowering and compilation, and how long the compiler expects a step to take, by cause.
That leaves out collectives and splash attention, of which it expects nothing; the other kernels count as the bytes that
they move, at the memory's rate. If a step doesn't fit, the compiler's own error is shown. --dump=folder keeps all that
the compiler writes.
Topologies are named by chip and shape: v5e:8x8 has 64 chips, v5p:2x2x4 has 16, v5p:1x1x1 is a single one. --slices=2
joins two slices by the data centre's network. --plain_attention shows what splash attention saves.
"""

import os
import pathlib
import re
import tempfile
import time

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import flags  # noqa: E402
from cycles import CLOCK, by_cause  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from diffeqformer.config import (
    check_config,  # noqa: E402
    check_overrides,  # noqa: E402
)
from diffeqformer.console import command_line  # noqa: E402
from diffeqformer.errors import UserError  # noqa: E402
from diffeqformer.fields import attention  # noqa: E402
from diffeqformer.parallel.sharding import make_mesh, mesh_shape  # noqa: E402
from diffeqformer.training.step import Program  # noqa: E402

CONFIG = command_line.define_config()
TOPOLOGY = flags.DEFINE_string("topology", "v5e:8x8", "Kind and shape of the slice.")
PLAIN = flags.DEFINE_bool("plain_attention", False, "Use XLA's own attention, for comparison.")
DUMP = flags.DEFINE_string("dump", None, "Folder for what the compiler writes; by default a temporary one.")
SLICES = flags.DEFINE_integer("slices", 1, "Slices of that shape.", lower_bound=1)


def tpu_devices(topology: str, slices: int) -> list:
    """The devices of one or more slices, which need not exist.

    Raises:
        UserError: if the compiler doesn't know the topology.
    """
    more: dict = {"num_slices": slices} if slices > 1 else {}
    if set(re.findall(r"\d+", topology.partition(":")[2])) == {"1"}:  # a host usually has four
        more["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **more).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--topology: {topology} isn't available ({reason}); libtpu comes with pip install -e '.[tpu]'"
        ) from None


def main() -> None:
    config, devices, start = CONFIG.value, tpu_devices(TOPOLOGY.value, SLICES.value), time.perf_counter()
    if config.base:
        raise UserError("config.base: its model's shape isn't known here; use the config of the pretraining")
    check_config(config, len(devices), "tpu")
    shape = mesh_shape(config.mesh, len(devices))
    program = Program(config, make_mesh(shape, devices), (attention.plain, "plain") if PLAIN.value else None)
    print(
        f"{config.name} on {SLICES.value} x {TOPOLOGY.value}, mesh {' x '.join(map(str, shape))}, "
        f"attention: {program.attention}",
        flush=True,
    )
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32)
    lowered = program.train_step.lower(program.state_shapes, tokens, max(program.depths))
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(DUMP.value or temporary)
        memory = lowered.compile({"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}).memory_analysis()
        text = max(folder.glob("*_train_step*.after_codegen.txt"), key=os.path.getmtime).read_text()
    print(
        f"  arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB, temporaries "
        f"{memory.temp_size_in_bytes / 2**30:.2f} GiB per chip; compiled in {time.perf_counter() - start:.0f} s"
    )
    print(expected_time(text, TOPOLOGY.value.partition(":")[0]))


def expected_time(text: str, chip: str) -> str:
    """The expected time of a step by cause, as a line of milliseconds; of megacycles if the chip's clock is unknown."""
    cycles = by_cause(text, chip)
    scale, unit = (1e3 / CLOCK[chip], "ms") if chip in CLOCK else (1e-6, "million cycles")
    parts = ", ".join(f"{cause} {count * scale:.1f}" for cause, count in cycles.most_common())
    return f"  expected: {sum(cycles.values()) * scale:.0f} {unit} without collectives and splash attention: {parts}"


if __name__ == "__main__":
    command_line.run(main, check_overrides)
