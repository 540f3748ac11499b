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
from absl import flags, logging

from diffeqformer.console.progress import read_curves
from diffeqformer.console.results import write_json, write_text
from diffeqformer.inspect import inspect_run

Item, Result = TypeVar("Item"), TypeVar("Result")


def define_flags(name: str, at_once: int = 1) -> None:
    """Define --folder, --results, --seeds and --at_once for the study of that name."""
    flags.DEFINE_string("folder", f"runs/{name}", "Folder of the runs, and of what is drawn of them.")
    flags.DEFINE_string("results", f"experiments/{name}.json", "The rows so far; new ones are added.")
    flags.DEFINE_integer("seeds", 3, "Seeds of what is shown.", lower_bound=1)
    text = "Runs side by side, each on its part of the cores (Linux)."
    flags.DEFINE_integer("at_once", at_once, text, lower_bound=1)


def folder_of(row: str) -> pathlib.Path:
    """The folder of a row's run, by the row's name."""
    return pathlib.Path(flags.FLAGS.folder) / row.replace(", ", "-").replace("'s ", "s_").replace(" ", "_")


def results_file() -> pathlib.Path:
    """The file of --results."""
    return pathlib.Path(flags.FLAGS.results)


def number_of_parameters(workdir: pathlib.Path) -> int:
    """The parameters of a run, counted on the CPU, since the runs need the accelerator."""
    jax.config.update("jax_platforms", "cpu")
    logging.set_verbosity(logging.ERROR)  # Orbax logs a lot
    return sum(row["count"] for row in inspect_run(workdir, with_statistics=False)["parameters"])


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


def add_results(path: pathlib.Path, new: dict[str, dict]) -> dict[str, dict]:
    """Add results to a file, or replace them, while other processes of this machine may do so, too.

    Returns:
        all that it holds then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = read_results(path) | new
        write_json(path, results)
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
    then: Callable[[dict[str, dict]], None] = lambda results: None,
) -> dict[str, dict]:
    """Work on the rows that --results lacks, --at_once at a time. Each is saved when it is done.

    So a study can be run in pieces, and by several processes of one machine.

    Returns:
        all results of the file, by name.

    Args:
        name: the key of a row's result.
        work: (row, cores) -> result; see `side_by_side`.
        then: called with all results after each row.
    """
    path = results_file()
    results = read_results(path)

    def work_if_missing(row, cores):
        return read_results(path).get(name(row)) or work(row, cores)  # another process may have been faster

    def save(row, result):
        results.update(add_results(path, {name(row): result}))
        then(results)

    missing = [row for row in rows if name(row) not in results]
    side_by_side(missing, work_if_missing, save, flags.FLAGS.at_once)
    return results


def curve(workdir: pathlib.Path, tag: str) -> dict[str, float]:
    """The values of a run's scalar by step, the keys as JSON has them."""
    return {str(step): value for step, value in read_curves(workdir)[tag].items()}


def report(
    module: str, workdir: pathlib.Path, name: str, options: Iterable[str] = (), cores: list[int] | None = None
) -> dict:
    """Have a command of the package write its report on a run into the folder `name` inside the run's.

    Returns:
        the report's results.json.

    Args:
        cores: see `on_cores`.
    """
    output = workdir / name
    shutil.rmtree(output, ignore_errors=True)  # of an interrupted report
    command = [sys.executable, "-m", f"diffeqformer.{module}", f"--workdir={workdir}", f"--output={output}", *options]
    done = subprocess.run(on_cores(command, cores), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{workdir}: diffeqformer.{module} failed: {done.stderr.strip()}")
    return json.loads((output / "results.json").read_text())


def table(rows: list[dict[str, str]]) -> str:
    """Rows as Markdown, by column."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    folder.mkdir(parents=True, exist_ok=True)
    with open(path, encoding="utf-8") as file:
        parts = list(articles(file))
    options = [f"--config.data.task={name}"]
    for split, chosen in (("train", train), ("validation", validation)):
        write_text(folder / f"{name}-{split}.txt", "".join(parts[chosen]))
        options.append(f"--config.data.{split}_files={folder / f'{name}-{split}.txt'}")
    return options
