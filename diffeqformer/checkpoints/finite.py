"""A model is used only as long as its parameters and its logits are finite numbers, neither NaN nor infinite."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from diffeqformer.checkpoints.checksums import named
from diffeqformer.errors import UserError


class NotFinite(UserError):
    """Logits aren't finite, although parameters are."""

    def __init__(self):
        super().__init__("the logits aren't finite numbers here; choose another checkpoint, solver or number of steps")


@contextlib.contextmanager
def logits_of(checkpoint: str) -> Iterator[None]:
    """Let a `NotFinite` say which checkpoint the model was opened from."""
    try:
        yield
    except NotFinite as error:
        raise UserError(f"{checkpoint}: {error}") from None


@jax.jit
def _all_finite(params: dict) -> dict:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)


def check_parameters(params: dict, checkpoint: str) -> None:
    """Check parameters in one pass; raises a UserError for the first array that isn't finite."""
    for name, finite in named(jax.device_get(_all_finite(params))).items():
        if not finite:
            raise UserError(
                f"{checkpoint}: all parameters must be finite numbers, but {name} has others; choose an earlier "
                "checkpoint, or train again (python -m diffeqformer.inspect shows more)"
            )
