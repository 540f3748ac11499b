"""The platforms that tests run on, and XLA's flags there.

On CPUs, compilation takes most of the tests' time. So optimize nothing and use the older, quicker emitters. A module
isn't split into parts to be compiled in parallel: that costs more than it gains.
"""

import importlib.metadata
import os
import threading

PLATFORMS = os.environ.get("TEST_PLATFORMS", "cpu")  # "cuda,cpu" in `make test-gpu`
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have only the newer emitters
    FAST_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
# The first is for cuDNN's attention, too, and kernels aren't chosen by timing them. Untimed, XLA takes a Triton kernel
# for products, which it can't compile in fp32 for A100 and RTX 4090 (jax 0.10.2): the second leaves them to cuBLAS.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"


CONTEXTS = threading.local()
"""Has the MLIR context of a thread, which keeps all that it has seen. Cleared, the next program begins another."""


def lower_in_one_context() -> None:
    """Let JAX 0.10 lower the programs of a thread in one MLIR context.

    It makes one for each, which takes longer than to lower a small program. JAX 0.12 does so for each ten.
    """
    if importlib.metadata.version("jax").startswith("0.10."):
        from jax._src.interpreters import mlir

        new_context = mlir.make_ir_context

        def context_of_thread():
            if not vars(CONTEXTS):
                CONTEXTS.context = new_context()
            return CONTEXTS.context

        mlir.make_ir_context = context_of_thread


def for_a_process(devices: int) -> str:
    """The flags of a process under test: for that many CPU devices, or in addition to the user's own for GPUs."""
    if PLATFORMS == "cpu":
        return f"--xla_force_host_platform_device_count={devices} {FAST_COMPILATION}"
    return f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
