"""What XLA is told in tests, whose time is mostly compilation: optimize nothing, and generate code the older, quicker way."""

FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
