"""A stack of layers as weights that are functions of t: equal to the layers at their times, and linear between them."""

import functools

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.huggingface.pretrained import ReadPart, shapes_of
from diffeqformer.transformer import Path

KINDS = ("interpolated", "diffeqformer")
"""The kinds of models in which layers can be knots."""

SHARPNESS = 32.0
"""How steep the hat functions' SiLUs are: at whole numbers, like ReLUs. Products with a power of two are exact."""

PROJECTIONS = {
    "kernel": ("projection", lambda read, part: read((part[1], part[0], part[2])).swapaxes(0, 1)),
    "bias": ("bias_projection", lambda read, part: read(part)),
    "scale": ("scale_projection", lambda read, part: read(part) - 1),
    "shift": ("shift_projection", lambda read, part: read(part)),
}
"""The parameter of a hypernetwork that gives each kind of weight if h(t) is a hat function, and what reads a part of it
by what reads a part of all layers' weights (`diffeqformer.depth.generated`)."""


def knots_config(config: ConfigDict, kind: str) -> ConfigDict:
    """The config of the model of a kind whose weights at t = (n + 1) / L are those of a baseline's layer n of L."""
    config = config.copy_and_resolve_references()
    steps = config.model.num_steps
    config.model.update(kind=kind, norm_of_norm=False, time_embed_dim=steps, span=float(steps))
    return config


def hat_functions(features: int, knots: int) -> dict[str, Float[np.ndarray, "..."]]:
    """The parameters of a `TimeMLP` whose h(t) is 1 in place n at t = (n + 1) / E, and linear between these times.

    Before the first of them it is constant. With u = E t, unit j of lin1 is a SiLU that bends where u is j + 1, and
    lin2 takes second differences. E is `knots`, and e(t) has so many `features`, the first of which is t.
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


def knots_parts(config: ConfigDict, parts: dict[Path, ReadPart]) -> dict[Path, ReadPart]:
    """What reads a part of each parameter of the model of `knots_config`, by path, from the same of the baseline."""
    made = {}
    for path, shape in shapes_of(config).items():  # shifts and constant terms, which no layer has, stay 0
        array = np.broadcast_to(np.float32(0), shape)
        if "mlp" in path:
            array = hat_functions(2 * config.model.sinusoidal_dim + 1, config.model.time_embed_dim)[path[-1]]
        made[path] = array.__getitem__
    for path, read in parts.items():
        if config.model.kind == "diffeqformer" and path[0] == "depth":
            name, of_layers = PROJECTIONS[path[-1]]
            path, read = (*path[:-1], name), functools.partial(of_layers, read)
        made[path] = read
    return made
