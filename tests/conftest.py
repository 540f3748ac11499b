"""Tests run on eight virtual CPU devices, with the types and shapes of annotations checked."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jaxtyping  # noqa: E402

jaxtyping.install_import_hook("diffeqformer", "beartype.beartype")
