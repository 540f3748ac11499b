"""Print what a run holds: `python -m diffeqformer.inspect --workdir=runs/tiny [--step=1000] [--all] [--nostatistics]`.

Builds no model and uses no accelerator, so it works on any machine, even while the run is training.
"""

import math
import os
from collections.abc import Iterable

import jax
import numpy as np
from absl import flags, logging
from etils import epath

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import REPLACED, Damaged, Step, best_step, once_more, steps_of
from diffeqformer.config import base_config, fields_of
from diffeqformer.console import command_line
from diffeqformer.console.progress import BITS_AT, read_curves
from diffeqformer.console.results import title
from diffeqformer.errors import counted
from diffeqformer.training import goodput

ORDER = ("token_embedding", "position_embedding", "depth", "final_norm", "lm_head")  # through the model
ORIGINS = {"base": "began with the weights of", "teacher": "learns from", "materialized_from": "made from"}
RECORDED = ("data_sha256", "validation_sha256", *ORIGINS, "earlier_rates", "time_spent")  # in a checkpoint's `About`
STATISTICS = ("mean", "deviation", "largest", "zeros")


def statistics(blocks: Iterable[np.ndarray]) -> dict:
    """Mean, standard deviation and largest absolute value of an array's finite elements, the share of exact zeros, and
    the number of elements that aren't finite.

    The first three are computed in float64. They are None if no element is finite.
    """
    size, count, mean, squares, largest, zeros = 0, 0, 0.0, 0.0, 0.0, 0
    for block in blocks:
        values = block.astype(np.float64)
        finite = values[np.isfinite(values)]
        size += block.size
        if finite.size:
            here = float(finite.mean())
            delta, count = here - mean, count + finite.size
            squares += float(np.square(finite - here).sum()) + delta**2 * finite.size * (count - finite.size) / count
            mean += delta * finite.size / count
            largest = max(largest, float(np.abs(finite).max()))
            zeros += finite.size - int(np.count_nonzero(finite))
    found = {"mean": mean, "deviation": math.sqrt(squares / max(count, 1)), "largest": largest}
    found = found if count else dict.fromkeys(found)
    return found | {"zeros": zeros / size, "not_finite": size - count}


def parameters(
    folder: epath.Path, step: int, recorded: dict[str, str] | None, trains: bool, with_statistics: bool, remedy: str
) -> list[dict]:
    """One row for each parameter of a checkpoint, in the order of the model."""
    if with_statistics:
        saved = checkpoint.open_arrays(folder, step, recorded, remedy)
    else:
        saved = checkpoint.saved_arrays(folder, step, remedy)
    rows = []
    for path, array in sorted(saved.items(), key=lambda item: (ORDER.index(item[0][0]), item[0])):
        count = math.prod(array.shape)
        row = {"name": "/".join(path), "shape": list(array.shape), "dtype": array.dtype.name, "count": count}
        row |= {"bytes": count * array.dtype.itemsize, "trains": trains}
        rows.append(row | (statistics(array.checked_blocks()) if with_statistics else {}))
    return rows


def history(curves: dict[str, dict[int, float]], group: str) -> list[dict]:
    """The scalars of a group, train or validation, one row for each step."""
    series = {tag.partition("/")[2]: values for tag, values in curves.items() if tag.startswith(f"{group}/")}
    steps = sorted({step for values in series.values() for step in values})
    return [{"step": n} | {name: values[n] for name, values in series.items() if n in values} for n in steps]


def inspect_run(workdir: os.PathLike, step: Step = None, with_statistics: bool = True) -> dict:
    """Describe a run or a materialized model as plain data, without building the model.

    Statistics need all parameters, which are read in parts.

    Returns:
        workdir, step, name, kind, field, solver, num_steps
        steps: of all checkpoints; best_step: the one that validated best, or None
        damage: a damaged validation, for which the best isn't known; or None
        data_sha256, validation_sha256: of the two splits; the second is empty in a checkpoint of an earlier version
        base, materialized_from: where its weights come from, as recorded in the checkpoint, or None
        earlier_rates: higher peak rates that the run had, by the last step of each, or None
        time_spent: where the run's time went until this checkpoint, in seconds by cause, or None; goodput: as shares
        tokenizer: its name, and saved_characters: the length of its data in the checkpoint
        config: every field's value by its dotted name; changed: the names of fields that differ from the default
        parameters: rows of name, shape, dtype, count, bytes, trains, and the fields of `statistics`
        validation, train: rows of step and the scalars that were written at that step
    """
    folder, step, about, config = checkpoint.open_to_read(workdir, step=step)
    steps, best, damage = steps_of(folder), None, None
    try:
        best = best_step(folder)
    except Damaged as error:
        damage = error.found
    rows = parameters(folder, step, about.checksums, True, with_statistics, REPLACED)
    if config.model.lora_rank:
        frozen, recorded, remedy = checkpoint.open_frozen(workdir, about.base)
        rows += parameters(frozen, 0, recorded, False, with_statistics, remedy)
    curves, model = read_curves(workdir), config.model
    fields, default = fields_of(config), fields_of(base_config("", model.kind))
    return {
        "workdir": str(workdir),
        "step": step,
        "steps": steps,
        "best_step": best,
        "damage": damage,
        "name": title(config),
        **{name: model[name] for name in ("kind", "field", "solver", "num_steps")},
        **{name: getattr(about, name) for name in RECORDED},
        "goodput": goodput.goodput(about.time_spent) if about.time_spent else None,
        "tokenizer": {"name": about.tokenizer, "saved_characters": len(about.tokenizer_data)},
        "config": fields,
        "changed": [name for name, value in fields.items() if name != "name" and default.get(name) != value],
        "parameters": rows,
        "validation": history(curves, "validation"),
        "train": history(curves, "train"),
    }


def columns(rows: list[list[str]]) -> list[str]:
    """Format rows as lines. The first cell of each is aligned on the left, the others on the right."""
    width, *widths = (max(map(len, cells)) for cells in zip(*rows))
    return [
        "".join([f"  {first:{width}}", *(f"  {cell:>{wide}}" for cell, wide in zip(others, widths))]).rstrip()
        for first, *others in rows
    ]


def heading(found: dict) -> list[str]:
    """Lines that describe the model, its checkpoints and its origin."""
    tokenizer, total = found["tokenizer"], found["config"]["steps"]
    inside = f", {tokenizer['saved_characters']:,} characters of data inside" if tokenizer["saved_characters"] else ""
    checkpoints = [f"{step:,}" + " (best validation)" * (step == found["best_step"]) for step in found["steps"]]
    lines = [
        f"{found['name']}: {found['kind']}, field {found['field']}, {counted(found['num_steps'], 'step')} of depth by "
        f"{found['solver']}",
        f"step {found['step']:,} of {total:,}; checkpoints: {', '.join(checkpoints)}",
        f"training data: {found['config']['data.task']}, sha256 {found['data_sha256']}",
        f"tokenizer: {tokenizer['name']}{inside}",
    ]
    if found["damage"]:
        lines.append(found["damage"])
    for key, began in ORIGINS.items():
        if found[key]:
            lines.append(f"{began} {found[key]['workdir']} at step {found[key]['step']:,}")
    for last, rate in (found["earlier_rates"] or {}).items():
        lines.append(f"until step {int(last):,} the peak learning rate was {rate:g}")
    if found["time_spent"]:
        lines.append(goodput.describe(found["time_spent"]))
    return lines


def parameter_table(rows: list[dict]) -> list[str]:
    """Lines that list parameters."""
    there = [name for name in STATISTICS if name in rows[0]]
    cells = [["", "shape", "count", *there]]
    for row in rows:
        name = row["name"].removeprefix("depth/").removeprefix("layers/")
        values = ["none" if row[name] is None else f"{row[name]:.4g}" for name in there]
        cells.append([name, " x ".join(map(str, row["shape"])), f"{row['count']:,}", *values])
    return columns(cells)


def parameter_lines(found: dict) -> list[str]:
    """The tables of trained and of frozen parameters, with totals, and a warning if any are not finite."""
    rows = found["parameters"]
    total = sum(row["count"] for row in rows)
    lines = [f"parameters: {total:,}, {sum(row['bytes'] for row in rows) / 1e6:,.1f} MB in memory"]
    for trains, where in ((True, f"checkpoints/{found['step']}"), (False, "frozen/0")):
        part = [row for row in rows if row["trains"] == trains]
        if part:
            word = "" if len(part) == len(rows) else "which train, " if trains else "frozen, "
            dtypes = " and ".join(sorted({row["dtype"] for row in part}))
            lines += ["", f"{sum(row['count'] for row in part):,} {word}in {where}, {dtypes}", *parameter_table(part)]
    bad = [f"{row['name']} ({row['not_finite']:,} of {row['count']:,})" for row in rows if row.get("not_finite")]
    if bad:
        lines += ["", f"WARNING: not finite (NaN or infinite), and left out of the other statistics: {', '.join(bad)}"]
    return lines


def history_lines(found: dict) -> list[str]:
    """The results of every validation, and the last training scalars that were written."""
    if not found["validation"] and not found["train"]:
        return ["history: none, there are no curves in this folder"]
    lines, names = ["history"], {"step": "{:,}", "loss": "{:.4f}", "perplexity": "{:.2f}", "bits_per_byte": "{:.4f}"}
    if found["validation"]:
        at = [name for name in found["validation"][0] if name.startswith(BITS_AT)]  # the last may be half written
        names |= dict.fromkeys(at, "{:.4f}")
        titles = ["step", "loss", "perplexity", "bits/byte", *(f"at {name.removeprefix(BITS_AT)}" for name in at)]
        rows = [[form.format(row[n]) if n in row else "" for n, form in names.items()] for row in found["validation"]]
        lines += columns([titles, *rows])
    if found["train"]:
        last = found["train"][-1]
        scalars = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in last.items() if name != "step"]
        lines.append(f"  last line of training: step {last['step']:,}, {', '.join(scalars)}")
    return lines


def text(found: dict, all_fields: bool = False) -> str:
    """The result of `inspect_run` as readable text, with all fields of the config or only the changed ones."""
    names = list(found["config"]) if all_fields else found["changed"]
    title = "config" if all_fields else "config, where it isn't the default (--all shows every field)"
    fields = [f"  {name} = {found['config'][name]!r}" for name in names]
    parts = heading(found), [title, *fields], parameter_lines(found), history_lines(found)
    return "\n\n".join("\n".join(lines) for lines in parts)


if __name__ == "__main__":
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    step = command_line.define_step()
    everything = flags.DEFINE_boolean("all", False, "Show every field of the config.")
    with_statistics = flags.DEFINE_boolean("statistics", True, "Statistics of parameters; reads all of them.")

    def command() -> None:
        jax.config.update("jax_platforms", "cpu")  # a running training may hold the accelerator
        found = once_more(lambda: inspect_run(workdir.value, step.value, with_statistics.value))
        print(text(found, everything.value))

    command_line.run(command, verbosity=logging.FATAL)
