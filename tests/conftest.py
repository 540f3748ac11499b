"""Tests run on eight virtual CPU devices, with the types and shapes of annotations checked."""

import os
import pathlib
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0"  # most of the time is compilation; commands in processes of their own do without
)

import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jaxtyping.install_import_hook("diffeqformer", "beartype.beartype")


@pytest.fixture(scope="session")
def stdlib_stores(tmp_path_factory) -> pathlib.Path:
    """A folder with the token store of the standard library in bytes."""
    folder = tmp_path_factory.mktemp("token_stores")
    command = [sys.executable, "-m", "diffeqformer.prepare", "--config=configs/tiny.py", f"--config.data.dir={folder}"]
    subprocess.run(command, check=True, capture_output=True, cwd=pathlib.Path(__file__).parent.parent)
    return folder
