"""A stack of layers as weights that are functions of t: equal to the layers at their times, and linear between them."""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.huggingface.pretrained import shapes_of
from diffeqformer.transformer import Path

KINDS = ("interpolated", "diffeqformer")
"""The kinds of models in which layers can be knots."""

SHARPNESS = 32.0
"""How steep the hat functions' SiLUs are: at whole numbers, like ReLUs. Products with a power of two are exact."""

PROJECTIONS = {
    "kernel": ("projection", lambda layers: layers.swapaxes(0, 1)),
    "bias": ("bias_projection", lambda layers: layers),
    "scale": ("scale_projection", lambda layers: layers - 1),
    "shift": ("shift_projection", lambda layers: layers),
}
"""The parameter of a hypernetwork that gives each kind of weight if h(t) is a hat function, and that parameter itself,
from the weights of all layers (`diffeqformer.depth.generated`)."""


def knots_config(config: ConfigDict, kind: str) -> ConfigDict:
    """The config of the model of a kind whose weights at t = (n + 1) / L are those of a baseline's layer n of L."""
    config = config.copy_and_resolve_references()
    steps = config.model.num_steps
    config.model.update(kind=kind, norm_of_norm=False, time_embed_dim=steps, span=float(steps))
    return config


def hat_functions(features: int, knots: int) -> dict[str, Float[np.ndarray, "..."]]:
    """The parameters of a `TimeMLP` whose h(t) is 1 in place n at t = (n + 1) / E, and linear between these times.

    Before the first of them it is constant. With u = E t, unit j of lin1 is a SiLU that bends where u is j + 1, and
    lin2 takes second differences.

    Args:
        features: the width of e(t), the first of which is t.
        knots: E.
    """
    lin1, bend = np.zeros((features, knots), np.float32), np.arange(1, knots + 1, dtype=np.float32)
    lin1[0] = SHARPNESS * knots
    lin2 = np.eye(knots, k=1) - 2 * np.eye(knots) + np.eye(knots, k=-1)
    lin2[0, 0] = -1  # the first falls from 1
    return {
        "lin1": lin1,
        "lin1_bias": -SHARPNESS * bend,
        "lin2": np.float32(lin2 / SHARPNESS),
        "lin2_bias": np.eye(knots, dtype=np.float32)[0],
    }


def knots_arrays(
    config: ConfigDict, arrays: Iterable[tuple[Path, np.ndarray]]
) -> Iterator[tuple[Path, Float[np.ndarray, "..."]]]:
    """The parameters of the model of `knots_config`, with their paths.

    Args:
        config: from `knots_config`.
        arrays: the parameters of the baseline, with their paths.
    """
    rest, generated = shapes_of(config), config.model.kind == "diffeqformer"
    for path, array in arrays:
        if generated and path[0] == "depth":
            name, of_layers = PROJECTIONS[path[-1]]
            path, array = (*path[:-1], name), of_layers(array)
        del rest[path]
        yield path, array
    for path, shape in rest.items():  # shifts and constant terms, which no layer has, and the MLPs of time
        if "mlp" in path:
            yield path, hat_functions(2 * config.model.sinusoidal_dim + 1, config.model.time_embed_dim)[path[-1]]
        else:
            yield path, np.zeros(shape, np.float32)
