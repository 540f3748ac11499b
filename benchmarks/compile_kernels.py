"""Compile the Pallas kernels of generated layers with the TPU compiler, without a TPU.

    pip install -e '.[tpu]' -c constraints.txt
    python benchmarks/compile_kernels.py --topology=v5e:2x2

Prints what the device gives to blocks. Then it prints a line for each kernel and layer: the layers of GPT-large, whole
and cut over devices, and one with the most times and the widest E that fit. A line has the program's temporary memory,
how often it copies an array of P's size, which it should never do, and what it reads and writes, in sizes of P.
--precision=highest compiles them for fp32 products. --dump=folder keeps all that the
compiler writes, with the kernels' instructions (`*final_bundles.txt`).
"""

import functools
import os
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the compiler uses no TPU that another process could have
for argument in sys.argv:
    if argument.startswith("--dump="):  # the compiler reads it when it is loaded
        folder = argument.partition("=")[2]
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from diffeqformer.fields.layers import PRECISIONS  # noqa: E402
from diffeqformer.kernels import blocks  # noqa: E402
from diffeqformer.kernels.generator import gradients, project, update  # noqa: E402

TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "Kind and shape of a slice. One of its devices is used.")
PRECISION = flags.DEFINE_enum("precision", "default", PRECISIONS, "That of the products.")
flags.DEFINE_string("dump", None, "Folder for what the compiler writes.")

WHOLE = [(1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280)]  # inputs and outputs of GPT-large's layers
CUT = [(160, 3840), (80, 3840), (40, 3840), (40, 1280), (640, 1280)]
LAYERS = [  # T, E, inputs, outputs, the types of the weights and of their gradient dW
    *[(36, 96, *layer, "bfloat16", "bfloat16") for layer in WHOLE],
    *[(36, 96, *layer, "bfloat16", "float32") for layer in CUT],
    (108, 96, 1280, 5120, "bfloat16", "bfloat16"),
    (108, 144, 1280, 5120, "float32", "float32"),
    (36, 144, 40, 1280, "bfloat16", "bfloat16"),
    (256, 144, 640, 1280, "float32", "float32"),  # large strips and stacks
    (256, 16, 640, 768, "bfloat16", "bfloat16"),
    (200, 48, 640, 768, "bfloat16", "bfloat16"),
    (7, 8, 24, 640, "bfloat16", "bfloat16"),  # an odd number of strips
]
ADAMW = functools.partial(update, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)


def main(_) -> None:
    jax.config.update("jax_default_matmul_precision", PRECISION.value)
    topology = topologies.get_topology_desc(topology_name=TOPOLOGY.value, platform="tpu")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    chip = blocks.chip_of(topology.devices[0])
    print(f"{topology.devices[0].device_kind}: blocks of {chip.budget / 2**20:g} MiB, cores per device {chip.cores}")
    widest = next(
        width for width in range(2048, 0, -8) if not blocks.reason_against(blocks.MOST_TIMES, width, 16, 256, chip)
    )
    largest = (blocks.MOST_TIMES, widest, 16, 256, "float32", "float32")
    for *layer, weights, gradient in [*LAYERS, largest]:
        times, width, inputs, outputs = layer
        if reason := blocks.reason_against(*layer, chip):
            raise ValueError(reason)
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        h, constant = shape((times, width), jnp.float32), shape((inputs, outputs), jnp.float32)
        projection = shape((inputs, width, outputs), jnp.float32)
        d_weights, scalars = shape((times, inputs, outputs), gradient), shape((4,), jnp.float32)
        project_in_type = jax.jit(functools.partial(project, dtype=weights, chip=chip))
        report("project", layer, project_in_type.lower(h, projection, constant))
        report("gradients", layer, jax.jit(functools.partial(gradients, chip=chip)).lower(h, projection, d_weights))
        in_place = jax.jit(functools.partial(ADAMW, chip=chip), donate_argnums=(2, 3, 4))
        report("update", layer, in_place.lower(h, d_weights, projection, projection, projection, scalars))


def report(name: str, layer: list[int], lowered: jax.stages.Lowered) -> None:
    """Compile a kernel and print its line. Each block of an array is moved once (tests/test_kernels.py)."""
    times, width, inputs, outputs = layer
    compiled = lowered.compile()
    memory, size = compiled.memory_analysis(), f"[{inputs},{width},{outputs}]"
    copies = sum(size in line and " copy(" in line for line in compiled.as_text().splitlines())
    moved = (memory.argument_size_in_bytes + memory.output_size_in_bytes) / (4 * inputs * width * outputs)
    print(
        f"{name} T={times} E={width} {inputs}x{outputs}: temporaries {memory.temp_size_in_bytes} bytes, "
        f"in place {memory.alias_size_in_bytes} bytes, copies {copies}, moves {moved:.2f} P",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
