"""Downstream tasks with lm-evaluation-harness: `python -m diffeqformer.downstream --workdir=runs/a,runs/b --shots=0,5`.

By default: the eleven tasks of the paper's Tables 4 and 5, printed in the same layout.
"""

import contextlib
import functools
import importlib.metadata
import io
import logging
import os
import pathlib
import sys
import time

from absl import flags
from flax import nnx

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.checkpoints.folder import Step
from diffeqformer.console import command_line
from diffeqformer.console.results import header, results_folder, whole_numbers, write_json, write_text
from diffeqformer.console.terminal import duration
from diffeqformer.errors import UserError, counted
from diffeqformer.inference import harness_tasks
from diffeqformer.inference.scoring import lead, window_size
from diffeqformer.parallel import hosts
from diffeqformer.transformer import abstract_model

BOOTSTRAP = 1000  # resamples for the standard errors of metrics that have no formula, such as perplexity
Study = tuple[harness_tasks.Tasks, pathlib.Path, dict, list]
"""The tasks, the folder of results, the report of what models have scored so far, and their scores by document."""


def check_model(workdir: str, step: Step, num_steps: list[int | None], window: int | None) -> int:
    """The window of a checkpoint, which is checked to exist and to fit the options before any work."""
    config = checkpoint.load_config(workdir, step)
    model = abstract_model(config)
    window = window_size(window, config, model.max_length, "--window", f"of {workdir}")
    for steps in num_steps:
        try:
            nnx.eval_shape(lambda model: model.depth(model.grid(steps)), model)
        except UserError as error:
            raise UserError(f"{workdir}: {error}") from None
    return window


def run_harness(model, tasks: dict, limit: int | None) -> dict:
    """Run lm-eval on one model, without its printed output, and return the results, with those of each document."""
    from lm_eval import evaluator

    with contextlib.redirect_stdout(io.StringIO()):
        return evaluator.evaluate(lm=model, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP)


def open_study(options, shots: list[int], window: int) -> Study:
    """The tasks, for models of at least this window, and where results go, of which there are none yet."""
    if options.output:  # before the work whose results it will hold
        results_folder(options.output, options.workdir[0])
    tasks = harness_tasks.load_tasks(options.tasks, options.include, shots, window)
    for row in tasks.rows.values():
        for name, task in row["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                hosts.check_one(f"--tasks: {name} is a task of generation, which")
    report = {"lm_eval": importlib.metadata.version("lm_eval"), "seed": harness_tasks.SEED}
    report |= {name: getattr(options, name) for name in ("limit", "batch_size", "include")}
    report |= {"failed": tasks.failed, "runs": []}
    return tasks, results_folder(options.output, options.workdir[0], "downstream"), report, []


def run_tasks(study: Study, workdir: str, model, shots: int) -> None:
    """Run all tasks of `open_study` with one model, a `HarnessModel`, and write each one's results when it is done."""
    label, start, (tasks, folder, report, documents) = f"{workdir}, {model.num_steps} steps", time.monotonic(), study
    said = f"{counted(len(tasks.rows), 'task')}, {counted(shots, 'shot')}"
    print(f"{label} of depth, checkpoint {model.opened.step:,}: {said}", flush=True)
    run = {
        "label": label,
        **header(workdir, model.opened),
        "num_steps": model.num_steps,
        "window": model.max_length,
        "shots": shots,
        "seed": model.opened.config.seed,
        "tasks": {},
    }
    scored = {"label": label, "shots": shots, "documents": {}}
    report["runs"].append(run)
    documents.append(scored)
    for row, loaded in tasks.rows.items():
        model.counts.clear()
        harness_tasks.set_shots(loaded["tasks"], tasks.own, shots)
        results = run_harness(model, loaded, report["limit"])
        run["tasks"][row] = found = harness_tasks.summary(results, row, model)
        if scores := harness_tasks.scores_of_documents(results, found):
            scored["documents"][row] = scores
        run["seconds"] = round(time.monotonic() - start, 1)
        # all results so far, so that an interruption or an error in a later task loses little
        write_json(folder / "results.json", report, default=str)
        write_json(folder / "documents.json", documents, indent=None)
        write_text(folder / "results.md", harness_tasks.describe(report["runs"], report["failed"]))
    print(f"done in {duration(run['seconds'])}", flush=True)


def run_all(options) -> None:
    """Check everything, then evaluate every checkpoint at every number of steps and shots, and print the table."""
    for name in ("workdir", "shots"):
        if not getattr(options, name):
            raise UserError(f"--{name}: must name at least one, but it is empty")
    shots = whole_numbers("--shots", options.shots, 0)
    steps = whole_numbers("--num_steps", options.num_steps, 1) or [None]
    window = min(check_model(workdir, options.step, steps, options.window) for workdir in options.workdir)
    study = None  # on all processes but the first
    with hosts.all_succeed("the tasks"):
        if hosts.is_first():
            study = open_study(options, shots, window)

    from diffeqformer.inference.lm_eval_model import HarnessModel

    for workdir in options.workdir:
        opened = checkpoint.load_on_all(workdir, options.step)
        for num_steps in steps:
            model = HarnessModel(opened, num_steps, options.batch_size, options.window)
            if num_steps == steps[-1]:
                del opened  # frees the memory of a hypernetwork
            naming = logits_of(f"{workdir}, checkpoint {model.opened.step}")
            work = naming(functools.partial(run_tasks, study, workdir, model))
            lead([model.scorer], lambda: [work(number) for number in shots])
            del model, work
    with hosts.all_succeed("the results"):
        if study:
            (_, _, failed), folder, report, _ = study
            print(f"\n{harness_tasks.describe(report['runs'], failed)}")
            print(f"{', '.join(harness_tasks.PERCENT)} in per cent, other metrics as they are (standard error).")
            print(f"This table, all metrics and the scores of each document are in {folder}")
            if failed:
                raise UserError(f"--tasks: {', '.join(failed)} didn't run; the reasons are in {folder}/results.md")


def prepare_lm_eval() -> None:
    """Import lm-eval with the settings that this command needs."""
    if not sys.stderr.isatty():  # in a log file: one line every 15 s, and none for shorter work
        os.environ.setdefault("TQDM_DELAY", "15")
        os.environ.setdefault("TQDM_MININTERVAL", "15")
    try:
        import lm_eval.tasks
    except ImportError:
        raise UserError(
            "lm_eval: lm-evaluation-harness isn't installed; install it with pip install 'lm-eval>=0.4.13,<0.5'"
        ) from None
    for library in ("lm_eval", "datasets", "huggingface_hub", "httpx"):  # the hub's reports each of its attempts, twice
        logging.getLogger(library).setLevel(logging.ERROR)
    # lm-eval recompiles a template for every question and every example, which takes longer than scoring.
    lm_eval.utils.env.from_string = functools.lru_cache(256)(lm_eval.utils.env.from_string)


if __name__ == "__main__":
    flags.DEFINE_list("workdir", None, "Folders of runs or of materialized models, comma-separated.", required=True)
    command_line.define_step()
    flags.DEFINE_list("shots", ["0", "5"], "Numbers of examples in front of each question.")
    flags.DEFINE_list("tasks", [], "Tasks; by default those of --include, or else the paper's eleven (`paper`).")
    flags.DEFINE_string("include", None, "Folder of lm-eval task files (.yaml) of your own, for local data.")
    flags.DEFINE_list("num_steps", [], "Numbers of steps of depth; by default as in training.")
    flags.DEFINE_integer("batch_size", 32, "Sequences scored at once over all devices, or texts written.", 1, 2**16)
    flags.DEFINE_integer("window", None, "Tokens that the model sees at once; by default as in training.")
    flags.DEFINE_integer("limit", None, "Maximum number of examples of each task, for a trial.", lower_bound=1)
    help_text = "Folder for the results; by default a new one in <first workdir>/downstream, or runs/ for one on gs://."
    flags.DEFINE_string("output", None, help_text)
    hosts.define_flags()

    def command() -> None:
        prepare_lm_eval()
        with hosts.joined(flags.FLAGS):
            run_all(flags.FLAGS)

    command_line.run(command)
