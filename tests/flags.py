"""XLA flags for tests. Compilation takes most of their time, so optimize nothing and use the older, quicker emitters.

A module isn't split into parts to be compiled in parallel: that costs more than it gains.
"""

FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
