"""Import a pretrained model from a folder in Hugging Face's format, exactly.

    python -m diffeqformer.import_model --from=smollm2 --workdir=runs/smollm2

It becomes a run that every command opens, as a GPT, a Llama or a GPT-NeoX. With --kind=interpolated or
--kind=diffeqformer, its layers are values of functions of t (docs/huggingface.md). It is divided over all devices, and
a process reads only what belongs to its own.
"""

import functools
import math
import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from etils import epath
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import new_checkpoints, size_on_disk, work_folder
from diffeqformer.console import command_line
from diffeqformer.huggingface.pretrained import (
    SENTENCE,
    Pretrained,
    ReadPart,
    difference,
    logits_of,
    open_pretrained,
    placed_model,
    shapes_of,
)
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Path, Transformer, split_model, weights_at

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
    """What reads a part of each parameter of a model of one of `KINDS`, by path, from the same of the baseline."""
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


class Check(NamedTuple):
    """What an imported model says of `SENTENCE`, and how far it is from what was imported.

    loss: in nats per token.
    likeliest: the texts of the likeliest next tokens, and their probabilities.
    of_weights, of_logits: the largest error, as a part of the largest one; None for a baseline, which has the weights.
    """

    loss: float
    likeliest: list[tuple[str, float]]
    of_weights: float | None = None
    of_logits: float | None = None


def import_model(folder: pathlib.Path, workdir: epath.PathLike, kind: str | None = None) -> tuple[Pretrained, Check]:
    """Write a pretrained model as a run of one of `KINDS`, or as the baseline, whose only checkpoint has the step 0.

    A UserError says if it can't be imported exactly, or the folder can't be written.
    """
    with hosts.all_succeed("the pretrained model"):
        found, workdir = open_pretrained(folder), work_folder(workdir)
    config, steps = found.config, found.config.model.num_steps
    if kind:  # at t = (n + 1) / steps, its weights are those of the baseline's layer n
        config = config.copy_and_resolve_references()
        config.model.update(kind=kind, norm_of_norm=False, time_embed_dim=steps, span=float(steps))
    config.name = workdir.name or config.name
    origin, tokenizer = {"workdir": str(folder), "step": 0}, found.tokenizer
    about = checkpoint.About(config.to_dict(), tokenizer.name, tokenizer.save(), materialized_from=origin)
    with new_checkpoints(workdir, "--workdir"):
        hosts.check_shared(workdir)
        with hosts.all_succeed("the weights"):
            model = placed_model(config, knots_parts(config, found.parts()) if kind else found.parts())
        checkpoint.save_alone(workdir, 0, split_model(model)[1], about)
        said = check(model, found, kind)
    return found, said


def check(model: Transformer, found: Pretrained, kind: str | None) -> Check:
    """Compare an imported model with the baseline that it was made from, and let it continue `SENTENCE`."""
    ids = found.tokenizer.encode(SENTENCE)[: model.max_length]
    logits = logits_of(model, ids)
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    loss = -np.mean([row[i] for row, i in zip(log_probs, ids[1:])])
    best = np.argsort(-log_probs[-1], kind="stable")[:5]
    said = Check(float(loss), [(found.tokenizer.decode([i]), math.exp(log_probs[-1, i])) for i in best.tolist()])
    if kind is None:
        return said
    baseline, made, of_weights = found.model(), weights_at(model).layers, 0.0
    for layer, arrays in weights_at(baseline).layers.items():
        for name, array in arrays.items():
            error = jnp.abs(made[layer][name] - array).max()
            of_weights = max(of_weights, float(error) / (float(jnp.abs(array).max()) or 1))
    return said._replace(of_weights=of_weights, of_logits=difference(logits, logits_of(baseline, ids)))


def describe(found: Pretrained, check: Check) -> str:
    text = f"{found.folder}: {found.describe()}\n"
    if check.of_weights is not None:
        text += f"largest error of a weight: {check.of_weights:.1e} of the largest one of its layers; "
        text += f"of a logit: {check.of_logits:.1e} of the largest\n"
    likeliest = ", ".join(f"{text!r} {probability:.1%}" for text, probability in check.likeliest)
    return f"{text}{SENTENCE!r}: {check.loss:.4f} nats per token; next: {likeliest}"


if __name__ == "__main__":
    folder = flags.DEFINE_string("from", None, "Folder of the pretrained model.", required=True)
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run to write.", required=True)
    kind = flags.DEFINE_enum("kind", None, KINDS, "Weights as functions of t; by default one set per layer.")
    hosts.define_flags()

    @hosts.joined(flags.FLAGS)
    def command() -> None:
        found, check = import_model(pathlib.Path(folder.value), workdir.value, kind.value)
        size = size_on_disk(work_folder(workdir.value)) / 1e6
        print(f"{describe(found, check)}\n{workdir.value}: {size:,.1f} MB; use it with --workdir={workdir.value}")

    command_line.run(command, verbosity=logging.FATAL)
