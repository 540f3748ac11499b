"""Flags of XLA for tests, whose time is mostly compilation: optimize nothing, and use the older, quicker emitters.

A module's code is not split for threads that would compile its parts: that costs more than it gains.
"""

FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
