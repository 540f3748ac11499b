"""What the experiments share: resumable runs in separate processes, and reading their results."""

import pathlib
import subprocess
import sys

import jax

from diffeqformer.checkpoint import NoCheckpoint
from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import write_text
from diffeqformer.inspect import inspect_run


def inspected(workdir: pathlib.Path) -> dict:
    """`inspect_run` without statistics, on the CPU, since the runs need the accelerator.

    Raises:
        NoCheckpoint: if the run hasn't saved one yet.
    """
    jax.config.update("jax_platforms", "cpu")
    return inspect_run(workdir, with_statistics=False)


def finished(workdir: pathlib.Path) -> bool:
    """Whether a run has saved its last step."""
    try:
        found = inspected(workdir)
    except NoCheckpoint:
        return False
    return found["step"] == found["config"]["steps"]


def on_cores(command: list[str], cores: list[int] | None) -> list[str]:
    """A command that uses only some processor cores (by Linux's taskset), or all if `cores` is None."""
    return command if cores is None else ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def train(workdir: pathlib.Path, options: list[str], cores: list[int] | None = None) -> None:
    """Run `diffeqformer.main` unless it has already finished. Its output is also written to `<workdir>.log`.

    Args:
        cores: see `on_cores`.
    """
    if finished(workdir):
        return
    workdir.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "diffeqformer.main", *options, f"--workdir={workdir}"]
    print(" ".join(command), flush=True)
    with workdir.with_name(f"{workdir.name}.log").open("a") as file:
        running = subprocess.Popen(
            on_cores(command, cores), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in running.stdout:
            file.write(line)
            file.flush()
            print(f"{workdir.name}: {line}" if cores else line, end="", flush=True)
    if running.wait():
        sys.exit(f"{workdir} ended with status {running.returncode}; see above, and run the same command again")


def perplexities(workdir: pathlib.Path) -> dict[int, float]:
    """The validation perplexities of a run, by step."""
    return dict(sorted(read_curves(workdir)["validation/perplexity"].items()))


def articles_of_wikitext(
    path: str | None, folder: pathlib.Path, name: str, train: slice, validation: slice
) -> list[str]:
    """Write some articles of a WikiText file for training and others for validation.

    Returns:
        the options of a run on them.

    Args:
        path: path of wiki.valid.tokens.
        name: name of the text and of its token store.
    """
    from diffeqformer.data.wikitext import articles

    if path is None or not pathlib.Path(path).is_file():
        sys.exit(f"--wikitext: must be WikiText-103's file wiki.valid.tokens, but there is no file {path}")
    parts = list(articles(pathlib.Path(path).read_text(encoding="utf-8")))
    options = [f"--config.data.task={name}"]
    for split, chosen in (("train", train), ("validation", validation)):
        write_text(folder / f"{name}-{split}.txt", "".join(parts[chosen]))
        options.append(f"--config.data.{split}_files={folder / f'{name}-{split}.txt'}")
    return options
