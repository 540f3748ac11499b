"""Import a pretrained model from a folder in Hugging Face's format, exactly.

    python -m diffeqformer.import_model --from=smollm2 --workdir=runs/smollm2

It becomes a run that every command opens, as a GPT, a Llama or a GPT-NeoX. With --kind=interpolated or
--kind=diffeqformer, its layers are values of functions of t (docs/huggingface.md).
"""

import functools
import math
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from etils import epath
from flax import nnx, traverse_util
from jaxtyping import Array, Float, Int

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import work_folder
from diffeqformer.checkpoints.one_by_one import new_checkpoints, save_one_by_one, size_on_disk
from diffeqformer.console import command_line
from diffeqformer.errors import counted
from diffeqformer.huggingface.knots import KINDS, knots_arrays, knots_config
from diffeqformer.huggingface.pretrained import Pretrained, open_pretrained
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Transformer, abstract_model, split_model, weights_at

SENTENCE = "The capital of France is Paris, and the capital of Italy is"
"""What every imported model is tried with."""


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
    """Write a pretrained model as a run whose only checkpoint has the step 0.

    Args:
        folder: of the pretrained model.
        workdir: of the run, which must not hold a checkpoint yet.
        kind: one of `KINDS`; None: the baseline that computes the same.

    Raises:
        UserError: if it can't be imported exactly, or the folder can't be written.
    """
    found, workdir = open_pretrained(folder), work_folder(workdir)
    config = knots_config(found.config, kind) if kind else found.config
    config.name = workdir.name or config.name
    origin, tokenizer = {"workdir": str(folder), "step": 0}, found.tokenizer
    about = checkpoint.About(config.to_dict(), tokenizer.name, tokenizer.save(), materialized_from=origin)
    with new_checkpoints(workdir, "--workdir"):
        save_one_by_one(workdir, 0, knots_arrays(config, found.arrays()) if kind else found.arrays(), about)
    return found, check(checkpoint.load(workdir).model, found, kind)


@functools.partial(jax.jit, static_argnames="graph")
def _logits(graph: nnx.GraphDef, params: dict, weights, tokens: Int[Array, "1 S"]) -> Float[Array, "S V"]:
    return nnx.merge(graph, params)(tokens, weights)[0]


def check(model: Transformer, found: Pretrained, kind: str | None) -> Check:
    """Compare an imported model with the baseline that it was made from, and let it continue `SENTENCE`."""
    ids = found.tokenizer.encode(SENTENCE)[: model.max_length]
    logits = np.asarray(_logits(*split_model(model), weights_at(model), jnp.array([ids])), np.float64)
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    loss = -np.mean([row[i] for row, i in zip(log_probs, ids[1:])])
    best = np.argsort(-log_probs[-1], kind="stable")[:5]
    said = Check(float(loss), [(found.tokenizer.decode([i]), math.exp(log_probs[-1, i])) for i in best.tolist()])
    if kind is None:
        return said
    made, params, of_weights = model.depth(model.grid()), {}, 0.0
    for path, array in found.arrays():
        params[path] = array
        if path[0] == "depth":
            error = np.abs(np.asarray(made[path[-2]][path[-1]]) - array).max()
            of_weights = max(of_weights, float(error / (np.abs(array).max() or 1)))
    baseline = nnx.merge(split_model(abstract_model(found.config))[0], traverse_util.unflatten_dict(params))
    exact = np.asarray(_logits(*split_model(baseline), weights_at(baseline), jnp.array([ids])))
    of_logits = np.abs(logits - exact)[exact > -np.inf].max() / np.abs(exact).max()
    return said._replace(of_weights=of_weights, of_logits=float(of_logits))


def describe(found: Pretrained, check: Check) -> str:
    """What was read, and the check, in lines."""
    files, types, shapes = zip(*(found.tensors.describe(name) for _, _, name, _ in found.places()))
    lines = [
        f"{found.folder}: {found.architecture}, {counted(sum(map(math.prod, shapes)), 'weight')} in {len(shapes):,} "
        f"tensors of {' and '.join(sorted({*types}))} and {counted(len({*files}), 'file')}",
        f"tokenizer: {found.tokenizer.vocab_size:,} ids of the model's {found.config.model.vocab_size:,}, end of text "
        f"{found.tokenizer.end_of_text}",
    ]
    if check.of_weights is not None:
        lines.append(
            f"largest error of a weight: {check.of_weights:.1e} of the largest one of its layers; of a logit: "
            f"{check.of_logits:.1e} of the largest"
        )
    likeliest = ", ".join(f"{text!r} {probability:.1%}" for text, probability in check.likeliest)
    return "\n".join([*lines, f"{SENTENCE!r}: {check.loss:.4f} nats per token; next: {likeliest}"])


def main() -> None:
    folder = flags.DEFINE_string("from", None, "Folder of the pretrained model.", required=True)
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run to write.", required=True)
    kind = flags.DEFINE_enum("kind", None, KINDS, "Weights as functions of t; by default one set per layer.")

    def command() -> None:
        hosts.check_one("import: this command")
        found, check = import_model(pathlib.Path(folder.value), workdir.value, kind.value)
        size = size_on_disk(work_folder(workdir.value)) / 1e6
        print(f"{describe(found, check)}\n{workdir.value}: {size:,.1f} MB; use it with --workdir={workdir.value}")

    command_line.run(command, verbosity=logging.FATAL)


if __name__ == "__main__":
    main()
