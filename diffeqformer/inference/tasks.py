"""Tasks of lm-evaluation-harness: each one is loaded and tried before anything is scored."""

import logging
import pathlib
import random
import sys
from typing import NamedTuple

import numpy as np

from diffeqformer.errors import UserError, did_you_mean, printable, reason_of

TASKS = {
    "arc_challenge": "ARC-Challenge",
    "arc_easy": "ARC-Easy",
    "hellaswag": "HellaSwag",
    "lambada_openai": "Lambada OpenAI",
    "lambada_standard": "Lambada Standard",
    "logiqa": "LogiQA",
    "mmlu": "MMLU",
    "piqa": "PIQA",
    "sciq": "SciQ",
    "winogrande": "Winogrande",
    "wsc273": "WSC273",
}
"""The tasks of the paper's Tables 4 and 5: their names in lm-evaluation-harness and in the paper, in its order."""
SEED = 1234  # for drawing the few-shot examples, as in lm-eval
OURS = pathlib.Path(__file__).parent / "task_files"  # tasks whose data lm-eval can't load, from local files


class Tasks(NamedTuple):
    """The tasks that can be run, and those that can't.

    rows: for each row of the tables, a group or a task, what `lm_eval.evaluator.evaluate` takes.
    own: by task, the number of examples that its file sets.
    failed: by requested name, why it can't be run.
    """

    rows: dict[str, dict]
    own: dict[str, int | None]
    failed: dict[str, str]


def load_tasks(names: list[str], include: str | None, shots: list[int], window: int) -> Tasks:
    """The tasks of some names, each tried with one example at every number of shots, for models with that window.

    Your own task files come before lm-eval's tasks of the same name. If no others are needed, lm-eval's aren't read.
    A task that fails is reported at once on the standard error, and left out.
    """
    manager, names = _find(names, include)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would report each of its attempts, twice
    tasks = Tasks({}, {}, {})
    for name in names:
        print(f"loading {name}", file=sys.stderr, flush=True)
        try:
            rows = _load(manager, name)
            every = {task: each for row in rows.values() for task, each in row["tasks"].items()}
            own = {task: each.get_config("num_fewshot") for task, each in every.items()}
            _try_examples(every, own, shots, window)
        except UserError as error:
            if len(names) == 1:
                raise UserError(f"--tasks: {error}") from error
            print(f"diffeqformer: --tasks: {error}; {name} is left out", file=sys.stderr, flush=True)
            tasks.failed[name] = str(error)
        else:
            tasks.rows.update(rows)
            tasks.own.update(own)
    if not tasks.rows:
        raise UserError(f"--tasks: none of {', '.join(names)} can be run; see the reasons above")
    return tasks


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


def _load(manager, name: str) -> dict[str, dict]:
    """The rows of a task, a group, or a tag, which has one for each of its tasks."""
    random.seed(SEED), np.random.seed(SEED)  # a few tasks shuffle their examples, the same whatever else is loaded
    try:
        found = manager.load([name])
        if name in found["groups"]:
            return {name: found}
        return {row: manager.load([task]) for row, task in found["tasks"].items()}
    except Exception as error:  # a task file, its templates or a download can raise anything
        ours = OURS / f"{name}.yaml"
        such = f", such as {ours}" if ours.exists() else ""
        raise UserError(
            f"{name} can't be loaded, {_reason(error)}; see that its data can be reached, or take --include with a "
            f"task file for local data{such}"
        ) from error


def _try_examples(tasks: dict, own: dict[str, int | None], shots: list[int], window: int) -> None:
    from diffeqformer.inference.lm_eval_model import generation

    for number in shots:
        set_shots(tasks, own, number)
        for name, task in tasks.items():
            try:
                task.build_all_requests(limit=1)
                for request in task.instances:
                    if request.request_type == "generate_until":
                        generation(request.args[1], window)
            except Exception as error:  # an error in a template, or too few examples to draw from
                raise UserError(
                    f"an example of {name} with {number} shots can't be made, {_reason(error)}; change its task file "
                    "or --shots"
                ) from error


def _reason(error: Exception) -> str:
    said = reason_of(error)
    return printable(said if isinstance(error, UserError) else f"{type(error).__name__}: {said}")


def set_shots(tasks: dict, own: dict[str, int | None], shots: int) -> None:
    """Put `shots` examples, drawn with a fixed seed, before every question. A task file that sets 0 keeps its 0."""
    for name, task in tasks.items():
        task.set_config(key="num_fewshot", value=0 if own[name] == 0 else shots)
        task.set_fewshot_seed(seed=SEED)
