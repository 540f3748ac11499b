"""The device mesh, and the one table that maps logical axes to it. Models only name axes.

All devices of the run form one axis, `data`: each takes its part of every batch and holds a whole
copy of the parameters.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES = {
    "batch": "data",  # examples are independent
    # Parameters are replicated:
    "vocab": None,
    "sequence": None,
    "time": None,
    "embed": None,
    "heads": None,
    "mlp": None,
    "time_embed": None,
}


def make_mesh() -> Mesh:
    """A mesh of every device of the run, for data parallelism."""
    return Mesh(np.array(jax.devices()), ("data",))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The sharding of an array whose dimensions have these logical axes (None: never split).

    Raises:
        KeyError: for an axis that `RULES` doesn't know.
    """
    return NamedSharding(mesh, PartitionSpec(*(axis and RULES[axis] for axis in axes)))
