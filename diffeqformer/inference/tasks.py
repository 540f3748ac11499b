"""Tasks of lm-evaluation-harness: each one is loaded and tried before anything is scored."""

import logging
import pathlib
import random
import sys
from typing import NamedTuple

import numpy as np

from diffeqformer.errors import UserError, did_you_mean, printable
from diffeqformer.inference.published import TASKS

SEED = 1234  # for drawing the few-shot examples, as in lm-eval
OURS = pathlib.Path(__file__).parent / "task_files"  # tasks whose data lm-eval can't load, from local files


class Tasks(NamedTuple):
    """The tasks that can be run, and those that can't.

    loaded: all of them, as `lm_eval.evaluator.evaluate` takes them.
    rows: the same for each row of the tables alone: a group, or a task.
    own: by task, the number of examples that its file sets.
    failed: by requested name, why it can't be run.
    """

    loaded: dict
    rows: dict[str, dict]
    own: dict[str, int | None]
    failed: dict[str, str]

    def set_shots(self, shots: int) -> None:
        """Put `shots` examples before every question."""
        _set_shots(self.loaded["tasks"], self.own, shots)


def load_tasks(names: list[str], include: str | None, shots: list[int], window: int) -> Tasks:
    """The tasks of some names, each tried with one example at every number of shots, for models with that window.

    Your own task files come before lm-eval's tasks of the same name. If no others are needed, lm-eval's aren't read.
    A task that fails is reported at once on the standard error, and left out.

    Raises:
        UserError: for a folder without task files, an unknown or repeated task, or if all of them fail.
    """
    manager, names = _find(names, include)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would report each of its attempts, twice
    built, rows, own, failed = [], [], {}, {}
    for name in names:
        print(f"loading {name}", file=sys.stderr, flush=True)
        try:
            tops, found = _load(manager, name)
            kept = {task: each.get_config("num_fewshot") for task, each in found["tasks"].items()}
            _try_examples(found["tasks"], kept, shots, window)
        except _Failure as failure:
            said = f"--tasks: {failure}; {failure.remedy}"
            if len(names) == 1:
                raise UserError(said) from failure
            print(f"diffeqformer: {said}; {name} is left out", file=sys.stderr, flush=True)
            failed[name] = str(failure)
            continue
        built += tops
        rows += [name] if name in found["groups"] else found["tasks"]  # the tasks of a tag
        own |= kept
    if not built:
        raise UserError(f"--tasks: none of {', '.join(names)} can be run; see the reasons above")
    try:
        return Tasks(manager.load(built), {row: manager.load([top]) for row, top in zip(rows, built)}, own, failed)
    except ValueError as error:
        raise UserError(f"--tasks: {error}; name each task once") from None


class _Failure(Exception):
    """Why a task can't be run, and what to do."""

    def __init__(self, what: str, error: Exception, remedy: str):
        reason = (str(error).strip().splitlines() or [""])[0]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        super().__init__(printable(f"{what}, {kind}{reason[:300]}"))
        self.remedy = remedy


def _find(names: list[str], include: str | None):
    """lm-eval's `TaskManager`, and the requested names without repetitions."""
    from lm_eval.tasks import TaskManager

    manager = None
    if include is not None:
        if not pathlib.Path(include).is_dir():
            raise UserError(f"--include: {include} isn't a folder; give one with lm-eval task files (.yaml)")
        manager = TaskManager(include_path=include, include_defaults=False)
        if not manager.all_subtasks:
            raise UserError(f"--include: {include} has no lm-eval task file (.yaml with task: and dataset_path:)")
    names = names or (manager.all_subtasks if manager else ["paper"])
    names = list(dict.fromkeys(name for given in names for name in (TASKS if given == "paper" else [given])))
    if manager is None or set(names) - set(manager.all_tasks):
        manager = TaskManager(include_path=include)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"--tasks: there is no task {name}{did_you_mean(name, manager.all_tasks)}")
    return manager, names


def _load(manager, name: str) -> tuple[list, dict]:
    """A task, a group or the tasks of a tag, as `manager.load` takes them, and as it returns them."""
    random.seed(SEED), np.random.seed(SEED)  # a few tasks shuffle their examples, the same whatever else is loaded
    try:
        found = manager.load([name])
    except Exception as error:  # a task file, its templates or a download can raise anything
        ours = OURS / f"{name}.yaml"
        such = f", such as {ours}" if ours.exists() else ""
        remedy = f"see that its data can be reached, or take --include with a task file for local data{such}"
        raise _Failure(f"{name} can't be loaded", error, remedy) from error
    return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values()), found


def _try_examples(tasks: dict, own: dict[str, int | None], shots: list[int], window: int) -> None:
    from diffeqformer.inference.harness import generation

    for number in shots:
        _set_shots(tasks, own, number)
        for name, task in tasks.items():
            try:
                task.build_all_requests(limit=1)
                for request in task.instances:
                    if request.request_type == "generate_until":
                        generation(request.args[1], window)
            except Exception as error:  # an error in a template, or too few examples to draw from
                what = f"an example of {name} with {number} shots can't be made"
                raise _Failure(what, error, "change its task file or --shots") from error


def _set_shots(tasks: dict, own: dict[str, int | None], shots: int) -> None:
    """Examples are drawn with a fixed seed. A task file that sets 0 keeps its 0."""
    for name, task in tasks.items():
        task.set_config(key="num_fewshot", value=0 if own[name] == 0 else shots)
        task.set_fewshot_seed(seed=SEED)
