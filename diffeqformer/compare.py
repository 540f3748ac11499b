"""Compare runs: `python -m diffeqformer.compare runs/* [--output=comparison]`.

Draws their validation curves in one picture, and writes a table with mean and spread over the seeds of equal configs.
Reads curves and configs alone, so it works on any machine, even while runs are training.
"""

import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from absl import flags, logging
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import REPLACED
from diffeqformer.config import fields_of, place
from diffeqformer.config_fields import CHANGEABLE
from diffeqformer.console import command_line
from diffeqformer.console.figures import COLOURS, new_figure
from diffeqformer.console.progress import BITS_AT, read_curves
from diffeqformer.console.results import markdown_table, results_folder, spread, title, write_json, write_text
from diffeqformer.errors import UserError, printable

LINES = ("-", "--", ":", "-.")  # those of the first colours, of the next, and so on
COLUMNS = ("model", "runs", "seeds", "trained parameters")
COLUMNS += ("at step", "perplexity", "bits/byte", "best bits/byte", "at step of best", "tokens/s")


class Validated(NamedTuple):
    """What is known of one run in one number of steps of depth."""

    folder: str
    config: ConfigDict
    num_steps: int
    data_sha256: str
    validation_sha256: str
    parameters: int  # those that are trained
    curve: dict[int, float]  # bits per byte by step, in order
    perplexity: float | None  # the paper's, per token, at the end of the curve; None in other numbers of steps
    tokens_per_second: float | None  # the best of all lines
    earlier_rates: dict | None

    def setting(self) -> dict:
        """What decides its result but for the seed: fields of the config, and the text by the hashes of its splits."""
        kept = {name: value for name, value in fields_of(self.config).items() if name not in CHANGEABLE | {"seed"}}
        fields = kept | {"model.num_steps": self.num_steps}
        fields |= {"data": self.data_sha256[:8], "validation data": self.validation_sha256[:8]}
        rates = ", ".join(f"{rate:g} until step {step}" for step, rate in (self.earlier_rates or {}).items())
        return fields | ({"before": rates} if rates else {})

    def end(self) -> float:
        return self.curve[max(self.curve)]


def read_run(folder: str) -> list[Validated]:
    """Read a run's config and curves: in its own number of steps first, then in others in which it was trained."""
    opened = checkpoint.open_to_read(folder)
    shapes = checkpoint.saved_arrays(opened.folder, opened.step, REPLACED)
    curves = read_curves(folder)
    curve = {step: bits for step, bits in curves.get("validation/bits_per_byte", {}).items() if not math.isnan(bits)}
    if not curve:
        raise UserError(f"{folder}: there is no validation here yet, or its text has unknown ids and so no bits/byte")
    run = Validated(
        folder,
        opened.config,
        opened.config.model.num_steps,
        opened.about.data_sha256,
        opened.about.validation_sha256,
        sum(math.prod(leaf.shape) for leaf in shapes.values()),
        curve,
        curves["validation/perplexity"][max(curve)],
        max(curves.get("train/tokens_per_second", {}).values(), default=None),
        opened.about.earlier_rates,
    )
    at = {tag.removeprefix(f"validation/{BITS_AT}"): curve for tag, curve in curves.items()}
    others = {int(steps): curve for steps, curve in at.items() if steps.isdecimal()}
    return [run, *(run._replace(num_steps=n, curve=curve, perplexity=None) for n, curve in others.items())]


def grouped(runs: Sequence[Validated]) -> dict[str, list[Validated]]:
    """Runs of equal configs on equal data together, by a label that says what sets them apart."""
    groups = {}
    for run in runs:
        key = json.dumps(run.setting(), sort_keys=True, default=list)
        groups.setdefault(key, []).append(run)
    members = list(groups.values())
    labels = [f"{title(group[0].config)}: {group[0].config.model.kind}" for group in members]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [n for n, other in enumerate(labels) if other == label]
        settings = [members[n][0].setting() for n in alike]
        names = sorted(set().union(*settings))
        apart = [name for name in names if len({repr(fields.get(name)) for fields in settings}) > 1]
        for n, fields in zip(alike, settings):
            values = [f"{name.rpartition('.')[2]} {fields[name]}" for name in apart if name in fields]
            labels[n] = ", ".join([label, *values])
    return dict(zip(labels, members, strict=True))


def distinct(values: Iterable[int]) -> str:
    return ", ".join(f"{value:,}" for value in sorted(set(values)))


def table(groups: dict[str, list[Validated]]) -> str:
    """The groups as a Markdown table, the best first."""
    rows = []
    for label, runs in groups.items():
        rates = [run.tokens_per_second for run in runs if run.tokens_per_second]
        ends = {max(run.curve) for run in runs}
        unfinished = " (unfinished)" * any(max(run.curve) < run.config.steps for run in runs)
        cells = [label, str(len(runs)), distinct([run.config.seed for run in runs])]
        cells += [distinct([run.parameters for run in runs]), distinct(ends) + unfinished]
        cells += [spread([run.perplexity for run in runs], 2) if runs[0].perplexity else ""]
        cells += [spread([run.end() for run in runs], 4), spread([min(run.curve.values()) for run in runs], 4)]
        cells += [distinct([min(run.curve, key=run.curve.get) for run in runs]), f"{max(rates):,.0f}" if rates else ""]
        rows.append(cells)
    return markdown_table(list(COLUMNS), rows)


def plot(groups: dict[str, list[Validated]], path: pathlib.Path) -> None:
    """Plot the validation curves of all runs, and the mean of each group at the steps that all its runs have."""
    figure, [[panel]] = new_figure(1, 1, (11, 5))
    for (line, colour), (label, runs) in zip(itertools.cycle(itertools.product(LINES, COLOURS)), groups.items()):
        label += f"; seed{'s' * (len(runs) > 1)} {distinct([run.config.seed for run in runs])}"
        for run in runs:
            tokens = run.config.batch_size * run.config.sequence_length
            thin = {"linewidth": 0.8, "alpha": 0.5} if len(runs) > 1 else {"label": label}
            panel.plot([tokens * n for n in run.curve], list(run.curve.values()), f".{line}", color=colour, **thin)
        if len(runs) > 1:
            steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
            means = [statistics.mean(run.curve[n] for run in runs) for n in steps]
            panel.plot([tokens * n for n in steps], means, line, color=colour, linewidth=2, label=label)
    panel.set(xlabel="training tokens", ylabel="validation, bits per byte")
    curves = [list(run.curve.values()) for runs in groups.values() for run in runs]
    highest = max(max(curve[len(curve) // 4 :]) for curve in curves)  # the first values would flatten all others
    lowest = min(map(min, curves))
    panel.set_ylim(top=highest + 0.05 * (highest - lowest or highest))
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)


def compare(folders: Sequence[str], output: str | None) -> None:
    """Compare the runs in some folders, and write and print the results. Folders without a run are named and left out.
    A folder that is given twice counts once.
    """
    runs = []
    once = {place(folder): folder for folder in folders if not pathlib.Path(folder).is_file()}
    for folder in once.values():
        try:
            runs += read_run(folder)
        except UserError as error:
            print(f"left out: {printable(str(error))}")
    if not all(run.validation_sha256 for run in runs):  # an earlier version didn't record it
        runs = [run._replace(validation_sha256="") for run in runs]
    if not runs:
        raise UserError("the folders of runs that were validated are needed, for example runs/*")
    groups = grouped(sorted(runs, key=lambda run: run.config.seed))
    groups = dict(sorted(groups.items(), key=lambda item: statistics.mean(run.end() for run in item[1])))
    folder = results_folder(output, "comparisons")
    data = {label: [run._asdict() | {"config": run.config.to_dict()} for run in runs] for label, runs in groups.items()}
    write_json(folder / "results.json", data)
    write_text(folder / "results.md", table(groups) + "\n")
    plot(groups, folder / "validation.png")
    print(f"\n{printable(table(groups))}\n")
    if len({(run.data_sha256, run.validation_sha256) for run in runs}) > 1:
        print("WARNING: these runs read different tokens, so their figures can't be compared as they are")
    print(f"This table, results.json and validation.png are in {folder}")


if __name__ == "__main__":
    output = flags.DEFINE_string("output", None, "Folder for the results; by default comparisons/<date and time>.")

    def command(*folders: str) -> None:
        jax.config.update("jax_platforms", "cpu")  # a running training may hold the accelerator
        compare(folders, output.value)

    command_line.run(command, arguments=True, verbosity=logging.FATAL)
