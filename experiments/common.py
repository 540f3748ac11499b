"""What the experiments share: resumable runs in separate processes, some at once, and reading their results."""

import concurrent.futures
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax

from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import write_json, write_text
from diffeqformer.inspect import inspect_run

Item, Result = TypeVar("Item"), TypeVar("Result")


def inspected(workdir: pathlib.Path) -> dict:
    """`inspect_run` without statistics, on the CPU, since the runs need the accelerator."""
    jax.config.update("jax_platforms", "cpu")
    return inspect_run(workdir, with_statistics=False)


def on_cores(command: list[str], cores: list[int] | None) -> list[str]:
    """A command that uses only some processor cores (by Linux's taskset), or all if `cores` is None."""
    return command if cores is None else ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def train(workdir: pathlib.Path, options: list[str], cores: list[int] | None = None) -> None:
    """Run `diffeqformer.main`. Its output is also written to `<workdir>.log`.

    It resumes an interrupted run, trains a finished one no further, and refuses a folder with other settings or text.

    Args:
        cores: see `on_cores`.
    """
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


def parts_of_cores(number: int) -> list[list[int] | None]:
    """The cores of each of some runs side by side; None for all. There are at most as many runs as cores."""
    if number == 1:
        return [None]
    if not (hasattr(os, "sched_getaffinity") and shutil.which("taskset")):
        sys.exit("--at_once: must be 1 here, because only Linux with taskset can divide the cores")
    cores = sorted(os.sched_getaffinity(0))
    return [cores[part::number] for part in range(min(number, len(cores)))]


def side_by_side(
    items: Iterable[Item],
    work: Callable[[Item, list[int] | None], Result],
    done: Callable[[Item, Result], None],
    number: int,
) -> None:
    """Work on some items at once. After a failure, those under way are finished and no others begun.

    Args:
        work: (item, cores) -> result. For `cores` see `on_cores`. A SystemExit fails with its message alone.
        done: (item, result) -> None. Only one is called at a time.
        number: how many at once.
    """
    waiting, lock, failed = iter(items), threading.Lock(), threading.Event()

    def work_on(cores):
        while not failed.is_set():
            with lock:
                item = next(waiting, failed)
            if item is failed:
                return
            try:
                result = work(item, cores)
                with lock:
                    done(item, result)
            except SystemExit as error:
                failed.set()
                print(error, file=sys.stderr, flush=True)
            except BaseException:
                failed.set()
                raise

    parts = parts_of_cores(number)
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work_on, parts))
    if failed.is_set():
        sys.exit(1)


def add_results(
    path: pathlib.Path, new: dict[str, dict], write: Callable[[pathlib.Path, dict], None] = write_json
) -> dict[str, dict]:
    """Add results to a file, or replace them, while other processes of this machine may do so, too.

    Returns:
        all that it holds then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = read_results(path) | new
        write(path, results)
    finally:
        os.close(folder)  # which unlocks it
    return results


def read_results(path: pathlib.Path) -> dict[str, dict]:
    """The results in a file; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def run_rows(
    rows: Iterable[Item],
    name: Callable[[Item], str],
    work: Callable[[Item, list[int] | None], dict],
    path: pathlib.Path,
    number: int,
    then: Callable[[dict[str, dict]], None] = lambda results: None,
    write: Callable[[pathlib.Path, dict], None] = write_json,
) -> dict[str, dict]:
    """Work on the rows that a file of results lacks, `number` at once. Each is saved when it is done.

    So a study can be run in pieces, and by several processes of one machine.

    Returns:
        all results of the file, by name.

    Args:
        name: the key of a row's result.
        work: (row, cores) -> result; see `side_by_side`.
        path: the file of results, which is JSON.
        then: called with all results after each row.
        write: (path, results) -> None; writes the file.
    """
    results = read_results(path)

    def work_if_missing(row, cores):
        return read_results(path).get(name(row)) or work(row, cores)  # another process may have been faster

    def save(row, result):
        results.update(add_results(path, {name(row): result}, write))
        then(results)

    side_by_side([row for row in rows if name(row) not in results], work_if_missing, save, number)
    return results


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
