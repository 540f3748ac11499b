"""Orbax's v1 interface, as `ocp`: in 1.0 it is the package itself."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Coroutine
from typing import Any

import orbax.checkpoint as ocp

if not hasattr(ocp, "save_checkpointables"):
    from orbax.checkpoint import v1 as ocp

__all__ = ["awaited", "ocp"]


def awaited(coroutine: Coroutine) -> Any:
    """The result of a coroutine, in a thread of its own: a notebook's has an event loop already.

    `asyncio.run` isn't safe beside Orbax's saves in the background.
    """
    with contextlib.closing(asyncio.new_event_loop()) as loop, concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(loop.run_until_complete, coroutine).result()
