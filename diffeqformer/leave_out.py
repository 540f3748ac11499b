"""Which layers does a model need least? `python -m diffeqformer.leave_out --workdir=runs/smollm2 --files=text.txt`

Layers are left out one by one: always the one whose removal raises the loss of the text least. The order is a value of
`config.model.left_out`, with which one model runs, and trains, in several numbers of layers (docs/any-depth.md). With
--to, the layers that are left become a model of their own, in which those near a gap learn to make up for it.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.checkpoints.folder import new_checkpoints
from diffeqformer.console import command_line
from diffeqformer.console.figures import new_figure
from diffeqformer.console.results import header, results_folder, write_json
from diffeqformer.depth.depths import left_out_layers
from diffeqformer.errors import UserError, counted
from diffeqformer.inference.gaps import BATCH, FITTING, fitted_layers
from diffeqformer.inference.scoring import Scorer, Stretch, window_size
from diffeqformer.inference.text_options import define_text_flags, name_of_text, open_text, text_of
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import check_free
from diffeqformer.transformer import Transformer, split_model


def losses_by_removal(
    model: Transformer, windows: list[Stretch], fewest: int, batch_size: int
) -> Iterator[tuple[int | None, float]]:
    """The layers in the order in which they are left out, and the loss without them, in nats per token.

    The first is that of the whole model, without a layer.
    """
    scorer = Scorer(model, batch_size=min(batch_size, len(windows)))
    whole = scorer.reader

    def loss(kept):
        scorer.reader, rows = whole, np.array(kept)  # without the weights of the last call
        layers = jax.tree.map(lambda leaf: leaf[rows], whole.weights.layers)
        weights = dataclasses.replace(whole.weights, layers=layers, step_sizes=whole.weights.step_sizes[rows])
        scorer.reader = dataclasses.replace(whole, weights=weights)
        return -float(np.concatenate([scores.log_probs for scores in scorer(windows)]).mean())

    kept = list(range(model.num_steps))
    yield None, loss(kept)
    while len(kept) > fewest:
        losses = {layer: loss([other for other in kept if other != layer]) for layer in kept}
        least = min(losses, key=losses.get)
        kept.remove(least)
        yield least, losses[least]


def plot(removed: list[int], losses: list[float], layers: int, path: pathlib.Path) -> None:
    """Plot the loss against the number of layers, with the layer that each step leaves out."""
    figure, [[panel]] = new_figure(1, 1, (7, 4.5))
    numbers = [layers - number for number in range(len(losses))]
    panel.plot(numbers, losses, "o-")
    for layer, number, loss in zip(removed, numbers[1:], losses[1:]):
        panel.annotate(f"{layer}", (number, loss), xytext=(4, 4), textcoords="offset points")
    panel.set(xlabel="layers (at each point, the one that is left out there)", ylabel="loss, nats per token")
    panel.set_xticks(numbers, labels=list(map(str, numbers)))
    panel.invert_xaxis()
    figure.savefig(path, dpi=110)


def find_order(options, opened: checkpoint.Checkpoint, windows: list[Stretch], name: str, fewest: int) -> list[int]:
    """The layers to leave out, in order; printed and written as the list grows."""
    layers, removed = opened.model.num_steps, []
    folder = results_folder(options.output, options.workdir, "leave_out", name)
    results = {**header(options.workdir, opened), "text": name, "windows": len(windows), "window": len(windows[0].ids)}
    results |= {"left_out": "", "losses": []}
    for layer, loss in losses_by_removal(opened.model, windows, fewest, options.batch_size):
        removed += [layer] * (layer is not None)
        without = f", without {layer}" * (layer is not None)
        print(f"{counted(layers - len(removed), 'layer')}{without}: {loss:.3f} nats per token", flush=True)
        results["losses"].append(loss)
        results["left_out"] = ",".join(map(str, removed))
        write_json(folder / "results.json", results)
    plot(removed, results["losses"], layers, folder / "losses.png")
    print(f"\n--config.model.left_out={results['left_out']}\n\nresults.json and losses.png are in {folder}")
    return removed


def write_fitted(options, opened: checkpoint.Checkpoint, left_out: list[int], batches: list[np.ndarray]) -> None:
    """Write the layers that are left, fitted to the batches, as a run of one checkpoint, into an empty folder."""
    config, about, to = opened.config.copy_and_resolve_references(), opened.about, epath.Path(options.to)
    kept = [layer for layer in range(config.model.num_steps) if layer not in left_out]
    trained = (about.materialized_from or {}).get("model", config.model.to_dict())
    config.model.update(num_steps=len(kept), left_out="", training_depths="")
    config.name = to.name or config.name
    origin = {"workdir": options.workdir, "step": opened.step, "model": trained}
    about = dataclasses.replace(about, config=config.to_dict(), materialized_from=origin, time_spent=None)
    layers = fitted_layers(opened.model, batches, kept, options.epochs)
    checkpoint.save_alone(to, opened.step, split_model(opened.model)[1] | {"depth": {"layers": layers}}, about)
    tokens = sum(batch.size for batch in batches)
    print(f"{to}: {counted(len(kept), 'layer')}, fitted to {tokens:,} tokens; use it with --workdir={to}")


def check_options(options, opened: checkpoint.Checkpoint) -> tuple[list[int], int]:
    """The layers of --order, if it is given, and the layers that are left at the end of a search."""
    layers, config = opened.model.num_steps, opened.config.model
    if not opened.model.depth.fixed_depth or config.span or config.lora_rank:
        kind = f"{config.kind}, with adapters (materialize merges them)" if config.lora_rank else config.kind
        raise UserError(
            "--workdir: must hold a model with weights per layer whose steps have the length 1, such as a Llama, but "
            f"it is a model of the kind {kind}"
        )
    fewest = -(-layers // 2) if options.fewest is None else options.fewest
    if fewest >= layers:
        raise UserError(f"--fewest: must be below the {counted(layers, 'layer')}, but it is {fewest}")
    try:
        order = [*left_out_layers(options.order)]
    except ValueError:
        order = [layers]
    if max(order, default=0) >= layers or len(order) == layers:
        one = f"must be some of the layers 0 to {layers - 1}, such as 16,17,14"
        raise UserError(f"--order: {one}, but it is {options.order!r}")
    if order and (not options.to or options.fewest is not None):
        raise UserError("--order: must go with --to and without --fewest, as it takes the place of the search")
    if order and sorted(order) == [*range(len(order))]:
        raise UserError(f"--order: must keep a layer before one of those it leaves out, but it is {options.order!r}")
    if options.to and config.solver not in FITTING:
        raise UserError(f"--to: needs a model with the solver {' or '.join(FITTING)}, but it has {config.solver}")
    if options.to and not options.files and options.split != "train":
        raise UserError(
            "--to: must go with --split=train or --files, so that no layer is fitted to the validation text"
        )
    return order, fewest


def leave_out(options) -> None:
    """Find the order according to the options, or take a given one, and write the model without these layers."""
    hosts.check_one("leave_out: this command")
    opened = checkpoint.load(options.workdir, step=options.step)
    order, fewest = check_options(options, opened)
    window = window_size(options.window, opened.config, opened.model.max_length, "--window")
    if options.to:
        states = jax.ShapeDtypeStruct((options.fit_windows, window, opened.model.field.width), jnp.float32)
        check_free(f"--fit_windows: the states of {counted(options.fit_windows, 'window')}", states, 5)
    with new_checkpoints(epath.Path(options.to), "--to") if options.to else contextlib.nullcontext():
        task, files, stored = text_of(options, opened)
        windows = open_text(options, opened, task, files, stored, window, window).windows
        with logits_of(f"{options.workdir}, checkpoint {opened.step}"):
            if not order:
                stretches = [Stretch(row, 1) for row in windows[: options.windows].tolist()]
                order = find_order(options, opened, stretches, name_of_text(options, task, files), fewest)
            if options.to:
                windows = windows[: options.fit_windows]
                batches = [windows[first : first + BATCH] for first in range(0, len(windows), BATCH)]
                write_fitted(options, opened, order, batches)


if __name__ == "__main__":
    define_text_flags("leave_out")
    flags.DEFINE_integer("windows", 8, "Windows of text that are scored without each layer.", lower_bound=1)
    flags.DEFINE_integer("fewest", None, "Layers that are left at the end; by default half.", lower_bound=1)
    flags.DEFINE_string("order", "", "Layers to leave out, such as 16,17,14, in place of the search.")
    flags.DEFINE_string("to", None, "Folder of a run to write: the layers that are left, fitted to the text.")
    flags.DEFINE_integer("fit_windows", 192, "Windows of text to which those layers are fitted.", lower_bound=1)
    help_text = "Times that the layers near a gap learn from that text; 0: only the one before it is fitted."
    flags.DEFINE_integer("epochs", 4, help_text, lower_bound=0)
    command_line.run(lambda: leave_out(flags.FLAGS))
