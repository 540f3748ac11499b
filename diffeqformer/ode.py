"""Is a trained model a differential equation? `python -m diffeqformer.ode --workdir=runs/tiny`

Measures what happens between the trained times: how smooth W(t) is there, the perplexity on other grids, and whether
solvers converge to one solution as their steps get smaller. docs/ode.md explains the numbers.
"""

import jax
import numpy as np
from absl import flags

from diffeqformer.analysis.convergence import convergence, curves, perplexities, plot, smoothness, table, trained_times
from diffeqformer.checkpoints import checkpoint
from diffeqformer.console import command_line
from diffeqformer.console.results import header, results_folder, write_json, write_text
from diffeqformer.errors import UserError, counted
from diffeqformer.inference.perplexity_report import depths_of
from diffeqformer.inference.scoring import Stretch, window_size
from diffeqformer.inference.text_options import define_text_flags, open_text, text_of
from diffeqformer.parallel import hosts


def define_flags() -> None:
    """The options of the command."""
    define_text_flags("ode")
    flags.DEFINE_integer("windows", 64, "Windows of text that each grid scores.", lower_bound=1)
    flags.DEFINE_integer("refinements", 5, "How often the trained step is halved for convergence.", 2, 15)


def examine(options) -> dict:
    """Examine a checkpoint according to the options, then write and print the results."""
    opened = checkpoint.load_on_all(options.workdir, options.step)
    model, config = opened.model, opened.config.model
    if not model.depth.generated or model.num_steps < 2:
        raise UserError(
            "--workdir: must hold a model whose weights are functions of time, in at least 2 steps, but it is a model "
            f"of the kind {config.kind} with {counted(model.num_steps, 'step')}"
        )
    model.grid(model.num_steps * 2 ** (options.refinements + 1))  # the reference's, which may not be too fine
    window = window_size(options.window, opened.config, model.max_length, "--window")
    task, files, folder = None, None, None  # of process 0, which alone reads and writes
    ids, number = np.zeros((options.windows, window), np.int32), 0
    with hosts.all_succeed("the text"):
        if hosts.is_first():
            if options.output:  # before the work whose results it will hold
                results_folder(options.output, options.workdir)
            task, files, stored = text_of(options, opened)
            windows = open_text(options, opened, task, files, stored, window, window).windows[: options.windows]
            folder = results_folder(options.output, options.workdir, "ode")
            ids[: len(windows)] = windows
            number = len(windows)
    ids = hosts.from_first(ids)[: hosts.from_first(np.array(number))]
    results = {
        **header(options.workdir, opened),
        "time_frequency": config.time_frequency if model.depth.sinusoidal else None,
        "training_times": config.training_times,
        "task": task,
        "split": options.split,
        "files": files,
        "windows": len(ids),
        "window": window,
    }
    print("weights between their trained times", flush=True)
    with jax.default_matmul_precision("highest"):
        results["smoothness"], drawn, times = smoothness(model), curves(model), trained_times(model)
    print("other grids", flush=True)
    windows = [Stretch(row, 1) for row in ids.tolist()]
    results["perplexities"] = perplexities(model, depths_of(results), windows, options.batch_size)
    if not results["perplexities"]:
        raise UserError("--workdir: no grid of this model can be scored, see above; choose another checkpoint")
    if folder:
        write_json(folder / "results.json", results)
    print("convergence", flush=True)
    with jax.default_matmul_precision("highest"):
        results["convergence"] = convergence(model, ids[:4, :-1], options.refinements)
    if folder:
        write_json(folder / "results.json", results)
        write_text(folder / "results.md", table(results) + "\n")
        plot(results, drawn, times, folder / "ode.png")
        print(f"\n{table(results)}\n\nThis report, results.json and ode.png are in {folder}", flush=True)
    return results


def command() -> None:
    with hosts.joined(flags.FLAGS):
        examine(flags.FLAGS)


if __name__ == "__main__":
    define_flags()
    hosts.define_flags()
    command_line.run(command)
