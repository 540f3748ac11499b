"""What every analysis needs: a model in fp32, checks of its inputs, and a label for the axis of time."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.errors import UserError
from diffeqformer.transformer import Transformer


def in_float32(section: Callable) -> Callable:
    """Compute a section in fp32 throughout, regardless of the checkpoint's types and the backend's usual precision."""

    @functools.wraps(section)
    def run(opened: Checkpoint, *arguments, **options):
        float32 = jnp.dtype(jnp.float32)
        model = opened.model.replace(dtype=float32)
        with jax.default_matmul_precision("highest"):
            return section(dataclasses.replace(opened, model=model), *arguments, **options)

    return run


def check_text(model: Transformer, ids: list[int], name: str = "the text") -> None:
    """Check that a text has enough tokens for a section and fits into the model's positions.

    Args:
        name: the option that gave the text.

    Raises:
        UserError: if it is too short, or longer than the model has positions.
    """
    if not 2 <= len(ids) <= model.max_length:
        raise UserError(
            f"{name}: must have at least 2 tokens and at most {model.max_length:,}, the positions of this model, "
            f"but it has {len(ids):,}"
        )


def time_label(model: Transformer) -> str:
    """The label of the axis of depth: layers, or time from 0 to 1."""
    return "layer" if model.unit_steps else "t"
