"""Folders of results that never overwrite one another, and files in them that are never half-written."""

import contextlib
import datetime
import itertools
import json
import os
import pathlib
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import IO

from ml_collections import ConfigDict

from diffeqformer.errors import UserError, reachable


def check_links(folder: pathlib.Path, option: str) -> None:
    """Check that a folder that is written into holds no links: if it is from elsewhere, they could point to anything.

    Inside of a checkpoint nothing is written, so the folders of a run's checkpoints are searched no deeper.
    """
    inside = [os.path.join(folder, name) for name in ("checkpoints", "frozen", "teacher", "damaged")]
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in (*folders, *files)):
            check_link(path, option)
        if parent in inside:
            folders.clear()


def check_link(path: os.PathLike | str, option: str) -> None:
    """Check that a path that is written to is no link."""
    if os.path.islink(path):
        raise UserError(f"{option}: {path} is a link, through which files elsewhere would be written; copy its target")


def home_folder(workdir: os.PathLike | str) -> pathlib.Path:
    """The folder on this machine that holds the results for a run: the run's own, or runs/name for gs://bucket/name."""
    path = os.fspath(workdir)
    return pathlib.Path("runs", pathlib.Path(path).name) if "://" in path else pathlib.Path(path)


def results_folder(output: str | None, workdir: str, *inside: str) -> pathlib.Path:
    """Create the folder for a command's results: `output`, or one named by date and time `inside` `home_folder`."""
    if "://" in (output or ""):
        raise UserError(f"--output: must be a folder of this machine, but it is {output}")
    home = home_folder(workdir)
    with reachable("--output", output or home):
        for number in range(0 if output else len(inside)):
            check_link(home.joinpath(*inside[: number + 1]), "--workdir")
        folder = pathlib.Path(output) if output else _new_folder(home.joinpath(*inside))
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / "results.json").exists():
        raise UserError(f"--output: {folder} holds results already; choose another folder")
    return folder


def title(config: ConfigDict) -> str:
    """What a heading calls a run: the config's name, and whether the run began with another's weights."""
    how = " (lora)" if config.model.lora_rank else ""
    return f"{config.name}, fine-tuned{how}" if config.base else config.name


def header(workdir: os.PathLike | str, opened) -> dict:
    """The beginning of every results file: the checkpoint, and how it was trained, before it was materialized."""
    config = opened.config
    trained = config.model.to_dict() | (opened.about.materialized_from or {}).get("model", {})
    return {
        "workdir": str(workdir),
        "config": config.name,
        "title": title(config),
        "kind": config.model.kind,
        "field": config.model.field,
        "checkpoint_step": opened.step,
        "trained_solver": trained["solver"],
        "trained_num_steps": trained["num_steps"],
        "training_depths": trained["training_depths"],
    }


def _new_folder(parent: pathlib.Path) -> pathlib.Path:
    """A folder named by date and time; a second one in the same second gets a number."""
    parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for number in itertools.count(1):
        folder = parent / (now if number == 1 else f"{now}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


@contextlib.contextmanager
def whole_file(path: pathlib.Path, mode: str = "x", **options) -> Iterator[IO]:
    """A file to write into that is whole or absent at `path`, also after a power cut; an error leaves a partial one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(partial, mode, **options) as file:  # never through a link
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a text into a `whole_file`. In JSON, names of any bytes can be read back."""
    with whole_file(path, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file of results as `write_whole` does, with a UserError if it can't be written."""
    with reachable("--output", path):
        write_whole(path, text)


def write_json(path: pathlib.Path, data, **options) -> None:
    """Write data as JSON atomically, by default indented, with null in place of numbers that JSON can't represent."""
    finite = json.loads(json.dumps(data, default=options.get("default")), parse_constant=lambda _: None)
    write_text(path, json.dumps(finite, **{"indent": 1, **options}, allow_nan=False) + "\n")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def spread(values: Sequence[float], digits: int) -> str:
    """The mean of some values, with their standard deviation if there are several."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def whole_numbers(option: str, texts: list[str], least: int) -> list[int]:
    """The whole numbers of an option, without repetitions."""
    for text in texts:
        if not re.fullmatch(r"\s*\d{1,100}\s*", text) or int(text) < least:  # int refuses thousands
            text = text if len(text) <= 100 else f"{text[:10]}..."
            raise UserError(f"{option}: must be comma-separated whole numbers of at least {least}, but it has {text!r}")
    return list(dict.fromkeys(map(int, texts)))
