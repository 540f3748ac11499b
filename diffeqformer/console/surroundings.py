"""What every command does about its surroundings: JAX's variables, the output's encoding, and ~ in paths."""

import codecs
import json
import os
import re
import signal
import sys

import jax
from ml_collections import ConfigDict

PATHS = re.compile(r"workdir|from|to|output|include|json|dump|base|use_cache|(\w+_)?(dir|files?|path)")
"""The names of options and of config fields whose values are paths."""


def set_up() -> None:
    """Compute as if no variable had told JAX otherwise, and escape what the output's encoding lacks, as JSON does.

    Models have the types of their configs. With other rules of types, dropout and samples would be others, too.
    """
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    sys.stdout, sys.stderr = (out or open(os.devnull, "w") for out in (sys.stdout, sys.stderr))  # None: it is closed
    codecs.register_error("escaped", _escaped)
    if hasattr(sys.stdout, "reconfigure"):  # not of a notebook
        sys.stdout.reconfigure(errors="escaped")


def heed_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, as Python does, from here on (`diffeqformer/__init__.py`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Characters as in JSON, so that lines of JSON stay exact."""
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def at_home(paths: str) -> str:
    """A path, or several with commas between them, with home folders in place of ~ and ~user."""
    return ",".join(os.path.expanduser(path.strip()) if path.lstrip()[:1] == "~" else path for path in paths.split(","))


def options_at_home(options: dict[str, str | list | ConfigDict]) -> dict[str, str | list]:
    """Those of some options or fields that are paths, with home folders (`at_home`). Configs are changed themselves."""
    changed = {}
    for name, value in options.items():
        if isinstance(value, ConfigDict):
            value.update(options_at_home(dict(value.items())))
        elif PATHS.fullmatch(name) and isinstance(value, str):
            changed[name] = at_home(value)
        elif PATHS.fullmatch(name) and isinstance(value, list):
            changed[name] = [at_home(path) for path in value]
    return changed
