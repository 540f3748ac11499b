"""Downstream tasks with lm-evaluation-harness: `python -m diffeqformer.downstream --workdir=runs/a,runs/b --shots=0,5`.

By default: the eleven tasks of the paper's Tables 4 and 5, printed in the same layout beside the published figures, and
drawn like Figures 9 to 12. Further models are compared with the first one, document by document.
"""

import contextlib
import functools
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import sys
import time

import jax
from absl import flags
from flax import nnx

from diffeqformer import checkpoint
from diffeqformer.checkpoint_folder import Step
from diffeqformer.console import command_line
from diffeqformer.console.results import check_output, header, results_folder, whole_numbers, write_json, write_text
from diffeqformer.console.terminal import duration
from diffeqformer.errors import UserError, counted
from diffeqformer.finite import logits_of
from diffeqformer.inference.bars import plot
from diffeqformer.inference.paired import describe_differences, leaves, scores_of_documents
from diffeqformer.inference.published import PERCENT, describe
from diffeqformer.inference.scoring import lead, window_size
from diffeqformer.inference.seeds import describe_means, setting
from diffeqformer.inference.tasks import SEED, load_tasks
from diffeqformer.parallel import hosts
from diffeqformer.transformer import abstract_model, split_model

BOOTSTRAP = 1000  # resamples for the standard errors of metrics that have no formula, such as perplexity


def define_flags() -> None:
    """The options of the command."""
    flags.DEFINE_list("workdir", None, "Folders of runs or of materialized models, comma-separated.", required=True)
    command_line.define_step()
    flags.DEFINE_list("shots", ["0", "5"], "Numbers of examples in front of each question.")
    flags.DEFINE_list("tasks", [], "Tasks; by default those of --include, or else the paper's eleven (`paper`).")
    flags.DEFINE_string("include", None, "Folder of lm-eval task files (.yaml) of your own, for local data.")
    flags.DEFINE_list("num_steps", [], "Numbers of steps of depth; by default as in training.")
    flags.DEFINE_integer(
        "batch_size", 32, "Sequences scored at once over all devices, or texts written by each.", 1, 2**16
    )
    flags.DEFINE_integer("window", None, "Tokens that the model sees at once; by default as in training.")
    flags.DEFINE_bool("log_samples", False, "Also write each document's requests and answers, as lm-eval does.")
    flags.DEFINE_integer("limit", None, "Maximum number of examples of each task, for a trial.", lower_bound=1)
    flags.DEFINE_string(
        "output",
        None,
        "Folder for the results; by default <first workdir>/downstream/<date and time>, or within runs/ for one on "
        "gs://.",
    )


def check_model(workdir: str, step: Step, num_steps: list[int | None], window: int | None) -> int:
    """Check, before any work, that a checkpoint exists and fits the options.

    Returns:
        its window.

    Raises:
        UserError: if it doesn't.
    """
    config = checkpoint.load_config(workdir, step)
    model = abstract_model(config)
    window = window_size(window, config, model.max_length, "--window", f"of {workdir}")
    graph, params = split_model(model)
    for steps in num_steps:
        try:
            jax.eval_shape(lambda params: nnx.merge(graph, params).depth(model.grid(steps)), params)
        except UserError as error:
            raise UserError(f"{workdir}: {error}") from None
    return window


def run_harness(model, tasks: dict, limit: int | None) -> dict:
    """Run lm-eval on one model, without its printed output, and return the results, with those of each document."""
    from lm_eval import evaluator

    with contextlib.redirect_stdout(io.StringIO()):
        return evaluator.evaluate(
            lm=model, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=True, verbosity="ERROR"
        )


def summary(results: dict, names: list[str], model) -> dict[str, dict]:
    """The metrics (under lm-eval's names), examples, contexts (`HarnessModel`) and version of each requested task.

    A group without a value of its own is replaced by its tasks.
    """
    rows, names = {}, list(names)
    while names:
        name = names.pop(0)
        values, parts = results["results"].get(name, {}), results["group_subtasks"].get(name, [])
        if "sample_len" not in values:
            names = [*parts, *names]
            continue
        tasks = leaves(name, results["group_subtasks"])
        rows[name] = {
            "examples": values["sample_len"],
            "contexts": sum(model.contexts[leaf] for leaf in tasks),
            "contexts_cut": sum(model.cut[leaf] for leaf in tasks),
            "unknown_tokens": sum(model.unknown[leaf] for leaf in tasks),
            "altered_texts": sum(model.altered[leaf] for leaf in tasks),
            "shots": max(results["n-shot"].get(leaf, 0) for leaf in tasks),
            "version": results["versions"].get(name),
            **{key: value for key, value in values.items() if "," in key},
        }
    return rows


def write(folder: pathlib.Path, report: dict) -> None:
    """Write all results. This is done after each task, so that an interruption or error loses little.

    results.json has the metrics, documents.json the scores of each document; results.md and downstream.png show them.
    """
    runs = [{name: value for name, value in run.items() if name != "documents"} for run in report["runs"]]
    write_json(folder / "results.json", {**report, "runs": runs}, default=str)
    documents = [{name: run[name] for name in ("label", "shots", "documents")} for run in report["runs"]]
    write_json(folder / "documents.json", documents, indent=None)
    write_text(folder / "results.md", "\n".join(filter(None, tables(report))))
    plot(report["runs"], folder / "downstream.png")


def tables(report: dict) -> tuple[str, str, str]:
    """The scores, their means over seeds, and the differences of models, as Markdown. The last two can be empty."""
    runs = report["runs"]
    return describe(runs, report["failed"]), describe_means(runs), describe_differences(runs)


def write_samples(folder: pathlib.Path, run: dict, samples: dict[str, list[dict]]) -> None:
    """Write each document's requests and answers in lm-eval's own form: for each task, a file of JSON lines.

    Args:
        samples: from lm-eval's results.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    where = folder / "samples" / run["label"].replace("/", "_")
    where.mkdir(parents=True, exist_ok=True)
    for task, documents in samples.items():
        lines = []
        for document in documents:
            arguments = {
                f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(values)}
                for number, values in enumerate(document["arguments"])
            }
            line = {**document, "arguments": arguments, "target": str(document["target"])}
            line |= {name: sanitize_list(document[name]) for name in ("resps", "filtered_resps")}
            lines.append(json.dumps(line, default=handle_non_serializable, ensure_ascii=False) + "\n")
        write_text(where / f"{task}_{run['shots']}_shots.jsonl", "".join(lines))


def write_curves(folder: pathlib.Path, run: dict) -> None:
    """Write the metrics of one run for TensorBoard, at the step of its checkpoint."""
    import tensorboardX

    where = folder / "tensorboard" / run["label"].replace("/", "_")
    suffix = f".{run['shots']}"  # without it, files written within one second share a name
    with tensorboardX.SummaryWriter(str(where), filename_suffix=suffix) as writer:
        for task, results in run["tasks"].items():
            for key, value in results.items():
                if "," in key and isinstance(value, float):
                    writer.add_scalar(
                        f"{task}_{run['shots']}_shots/{key.replace(',', '_')}", value, run["checkpoint_step"]
                    )


def run_all(options) -> None:
    """Check everything, then evaluate every checkpoint at every number of steps and shots, and print the table."""
    for name in ("workdir", "shots"):
        if not getattr(options, name):
            raise UserError(f"--{name}: must name at least one, but it is empty")
    shots = whole_numbers("--shots", options.shots, 0)
    steps = whole_numbers("--num_steps", options.num_steps, 1) or [None]
    window = min(check_model(workdir, options.step, steps, options.window) for workdir in options.workdir)
    study = None
    with hosts.all_succeed("the tasks"):
        if hosts.is_first():
            study = Study(options, shots, window)

    from diffeqformer.inference.harness import HarnessModel

    for workdir in options.workdir:
        opened = checkpoint.load_on_all(workdir, options.step)
        for num_steps in steps:
            model = HarnessModel(opened, num_steps, options.batch_size, options.window)
            if num_steps == steps[-1]:
                del opened  # frees the memory of a hypernetwork
            naming = logits_of(f"{workdir}, checkpoint {model.opened.step}")
            lead([model.scorer], naming(lambda: study.run(workdir, model)))
            del model
    with hosts.all_succeed("the results"):
        if study:
            study.say()
            study.check_all_ran()


class Study:
    """The tasks, and what models score on them, as process 0 runs them.

    Args:
        window: the shortest of the models.

    Raises:
        UserError: if none of the tasks can be run, or the folder of the results can't be made.
    """

    def __init__(self, options, shots: list[int], window: int):
        check_output(options.output, options.workdir[0])
        self.shots, self.log_samples = shots, options.log_samples
        self.tasks = load_tasks(options.tasks, options.include, shots, window)
        for name, task in self.tasks.loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                hosts.check_one(f"--tasks: {name} is a task of generation, which")
        self.folder = results_folder(options.output, options.workdir[0], "downstream")
        self.report = {
            "lm_eval": importlib.metadata.version("lm_eval"),
            "seed": SEED,
            "limit": options.limit,
            "batch_size": options.batch_size,
            "include": options.include,
            "failed": self.tasks.failed,
            "runs": [],
        }

    def run(self, workdir: str, model) -> None:
        """Run all tasks with one model, a `HarnessModel`, with each number of shots, and write each one's results."""
        label = f"{workdir}, {model.num_steps} steps"
        config, about = model.opened.config, model.opened.about
        texts = about.data_sha256, about.validation_sha256
        for number in self.shots:
            said = f"{counted(len(self.tasks.rows), 'task')}, {counted(number, 'shot')}"
            print(f"{label} of depth, checkpoint {model.opened.step:,}: {said}", flush=True)
            self.tasks.set_shots(number)
            start = time.monotonic()
            for counts in (model.contexts, model.cut, model.unknown, model.altered):
                counts.clear()
            run = {
                "label": label,
                **header(workdir, model.opened),
                "num_steps": model.num_steps,
                "window": model.max_length,
                "shots": number,
                "seed": config.seed,
                "setting": setting(config, *texts, about.earlier_rates),
                "tasks": {},
                "documents": {},
            }
            self.report["runs"].append(run)
            for row, tasks in self.tasks.rows.items():
                results = run_harness(model, tasks, self.report["limit"])
                found = summary(results, [row], model)
                run["tasks"] |= found
                run["documents"] |= scores_of_documents(results, found)
                run["seconds"] = round(time.monotonic() - start, 1)
                write(self.folder, self.report)
                if self.log_samples:
                    write_samples(self.folder, run, results["samples"])
            write_curves(self.folder, run)
            print(f"done in {duration(run['seconds'])}", flush=True)

    def say(self) -> None:
        """Print the tables."""
        scores, means, differences = tables(self.report)
        print(f"\n{scores}\n{', '.join(PERCENT)} in per cent, other metrics as they are (standard error).")
        if means:
            print(f"\n{means}Means over seeds (standard deviation).")
        if differences:
            print(
                f"\n{differences}\nDifferences on the same documents, with their standard error. p is two-sided, by "
                "McNemar's exact test or a paired t-test, and not corrected for the number of tasks."
            )
        picture = " and downstream.png" if (self.folder / "downstream.png").exists() else ""
        print(f"\nThese tables, all metrics, the scores of each document{picture} are in {self.folder}")

    def check_all_ran(self) -> None:
        """Check that no task was left out.

        Raises:
            UserError: if one was.
        """
        if failed := self.tasks.failed:
            raise UserError(f"--tasks: {', '.join(failed)} didn't run; the reasons are in {self.folder}/results.md")


def prepare_lm_eval() -> None:
    """Import lm-eval with the settings that this command needs.

    Raises:
        UserError: if it isn't installed.
    """
    if not sys.stderr.isatty():  # in a log file: one line every 15 s, and none for shorter work
        os.environ.setdefault("TQDM_DELAY", "15")
        os.environ.setdefault("TQDM_MININTERVAL", "15")
    try:
        from lm_eval import utils
    except ImportError:
        raise UserError(
            "lm_eval: lm-evaluation-harness isn't installed; install it with pip install 'lm-eval>=0.4.13,<0.5'"
        ) from None
    for library in ("lm_eval", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # lm-eval recompiles a template for every question and every example, which takes longer than scoring.
    utils.env.from_string = functools.lru_cache(256)(utils.env.from_string)


def main() -> None:
    define_flags()
    hosts.define_flags()

    def command() -> None:
        prepare_lm_eval()
        with hosts.joined(flags.FLAGS):
            run_all(flags.FLAGS)

    command_line.run(command)


if __name__ == "__main__":
    main()
