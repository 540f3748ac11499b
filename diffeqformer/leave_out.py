"""Which layers does a model need least? `python -m diffeqformer.leave_out --workdir=runs/smollm2 --files=text.txt`

Layers are left out one by one: always the one whose removal raises the loss of the text least. The order is a value of
`config.model.left_out`, with which one model runs, and trains, in several numbers of layers (docs/any-depth.md).
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.figures import new_figure
from diffeqformer.console.results import header, results_folder, write_json
from diffeqformer.errors import UserError, counted
from diffeqformer.inference.scoring import Scorer, Stretch, window_size
from diffeqformer.inference.text_options import define_text_flags, name_of_text, open_text, text_of
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Transformer


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
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def leave_out(options) -> dict:
    """Find the order according to the options, and print and write it as it grows."""
    hosts.check_one("leave_out: this command")
    opened = checkpoint.load(options.workdir, step=options.step)
    model, config = opened.model, opened.config.model
    if not model.depth.fixed_depth or config.span:
        raise UserError(
            "--workdir: must hold a model with weights per layer whose steps have the length 1, such as a Llama, but "
            f"it is a model of the kind {config.kind}"
        )
    fewest = -(-model.num_steps // 2) if options.fewest is None else options.fewest
    if fewest >= model.num_steps:
        raise UserError(f"--fewest: must be below the {counted(model.num_steps, 'layer')}, but it is {fewest}")
    window = window_size(options.window, opened.config, model.max_length, "--window")
    task, files, stored = text_of(options, opened)
    windows = open_text(options, opened, task, files, stored, window, window).windows[: options.windows]
    name = name_of_text(options, task, files)
    folder = results_folder(options.output, options.workdir, "leave_out", name)
    results = {**header(options.workdir, opened), "text": name, "windows": len(windows), "window": window}
    results |= {"left_out": "", "losses": []}
    removed = []
    with logits_of(f"{options.workdir}, checkpoint {opened.step}"):
        stretches = [Stretch(row, 1) for row in windows.tolist()]
        for layer, loss in losses_by_removal(model, stretches, fewest, options.batch_size):
            removed += [layer] * (layer is not None)
            without = f", without {layer}" * (layer is not None)
            print(f"{counted(model.num_steps - len(removed), 'layer')}{without}: {loss:.3f} nats per token", flush=True)
            results["losses"].append(loss)
            results["left_out"] = ",".join(map(str, removed))
            write_json(folder / "results.json", results)
    plot(removed, results["losses"], model.num_steps, folder / "losses.png")
    print(f"\n--config.model.left_out={results['left_out']}\n\nresults.json and losses.png are in {folder}")
    return results


if __name__ == "__main__":
    define_text_flags("leave_out")
    flags.DEFINE_integer("windows", 8, "Windows of text that are scored without each layer.", lower_bound=1)
    flags.DEFINE_integer("fewest", None, "Layers that are left at the end; by default half.", lower_bound=1)
    command_line.run(lambda: leave_out(flags.FLAGS))
