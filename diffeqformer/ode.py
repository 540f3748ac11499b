"""Is a trained model a differential equation? `python -m diffeqformer.ode --workdir=runs/tiny`

Looks between the times at which the weights were trained: how smooth W(t) is there, what perplexity other grids give, and
whether solvers come nearer to one solution as their steps get smaller. docs/ode.md explains the numbers.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from diffeqformer import checkpoint
from diffeqformer.analysis.ode_report import plot, table
from diffeqformer.console import command_line
from diffeqformer.console.results import results_folder, write_text
from diffeqformer.depth.generated import time_features
from diffeqformer.depth.plain import StackedWeights, in_compute_type, stage_times, step_sizes
from diffeqformer.errors import UserError
from diffeqformer.evaluate import define_text_flags, open_text, text_of, window_of
from diffeqformer.fields.layers import Context
from diffeqformer.inference.scoring import Scorer, Stretch
from diffeqformer.solvers import SOLVERS, Solver, walk
from diffeqformer.transformer import MODELS, Transformer, split_model

METHODS = ("euler", "midpoint", "heun", "strang", "rk4")  # whose convergence is looked at


def define_flags() -> None:
    """The options of the command."""
    define_text_flags("ode")
    flags.DEFINE_integer("windows", 64, "Windows of text that each grid scores.", lower_bound=1)
    flags.DEFINE_integer(
        "refinements", 5, "How often the trained step is halved to see solvers converge.", lower_bound=2
    )


def trained_times(model: Transformer) -> np.ndarray:
    """When the weights were trained, if at fixed times: at the solver's nodes of the trained grid."""
    return np.unique(stage_times(model.times(), model.solver.nodes))


def smoothness(model: Transformer) -> dict[str, dict[str, float]]:
    """How far each layer's kernel, halfway between trained times, is from the mean of its two neighbours.

    Returns, as Frobenius norms relative to that mean's and averaged over the intervals: `gap`, of the kernel from the mean;
    `half_change`, half the difference of the neighbours; and `ratio`, of the two. Halving the intervals of a smooth function
    halves the ratio, and it is far below 1; for kernels that have nothing to do with one another it is sqrt(3).
    """
    times = trained_times(model)
    between = (times[1:] + times[:-1]) / 2
    norms = jax.tree.map(float, _norms(*split_model(model), tuple(times), tuple(between)))
    return {name: {**row, "ratio": row["gap"] / row["half_change"]} for name, row in norms.items()}


@functools.partial(jax.jit, static_argnames=("graph", "times", "between"))
def _norms(graph, params, times, between):
    model = nnx.merge(graph, params)
    trained, middle = model.depth(np.array(times)), model.depth(np.array(between))
    rows = {}
    for name, layer in trained.items():
        if "kernel" not in layer:
            continue
        before, after = layer["kernel"][:-1], layer["kernel"][1:]
        norm = lambda w: jnp.sqrt(jnp.sum(w * w, axis=(1, 2)))  # noqa: E731
        mean = (before + after) / 2
        rows[name] = {
            "gap": jnp.mean(norm(middle[name]["kernel"] - mean) / norm(mean)),
            "half_change": jnp.mean(norm(after - before) / 2 / norm(mean)),
        }
    return rows


def curves(model: Transformer, points: int = 1000, entries: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A few entries of the first layer's kernel, minus their constant terms, over time.

    Returns:
        times [points], the entries there [points, entries], and at `trained_times`.
    """
    depth = model.depth
    name = next(name for name, layer in depth.layers.items() if hasattr(layer, "projection"))
    layer = depth.layers[name]
    mlp = depth.mlp if depth.shared_mlp else layer.mlp
    rows, _, columns = layer.projection.shape
    chosen = [(rows * (2 * i + 1) // (2 * entries), columns * (2 * i + 1) // (2 * entries)) for i in range(entries)]
    projection = np.stack([layer.projection[...][i, :, j] for i, j in chosen], axis=1)  # [E, entries]
    values = lambda t: (  # noqa: E731
        np.asarray(mlp(jnp.asarray(time_features(t, depth.sinusoidal_dim, depth.time_frequency)))) @ projection
    )
    times = np.linspace(0, 1, points + 1)[1:]
    return times, values(times), values(trained_times(model))


def grids(model: Transformer) -> dict[str, tuple[Solver, int]]:
    """The grids that are scored, by name: a solver and a number of steps. The first is the trained one."""
    solver, trained = model.solver, model.num_steps
    numbers = [math.ceil(trained / 2), math.ceil(trained * 3 / 4), trained * 3 // 2, 2 * trained, 4 * trained]
    rows = {f"as trained: {trained} steps": (solver, trained)}
    rows |= {f"{number} steps": (solver, number) for number in dict.fromkeys(numbers) if number != trained}
    if solver.nodes == (1.0,):
        for share in (0.25, 0.5, 0.75, 1.0):
            rows[f"weights {share:g} of a step earlier"] = dataclasses.replace(solver, nodes=(1 - share,)), trained
    return rows | {f"rk4, {number} steps": (SOLVERS["rk4"], number) for number in (trained, 2 * trained)}


def perplexities(model: Transformer, windows: list[Stretch], batch_size: int) -> dict[str, float]:
    """The paper's perplexity of some windows on each of `grids`."""
    found = {}
    for name, (solver, num_steps) in grids(model).items():
        scores = Scorer(model.replace(solver=solver), num_steps, batch_size)(windows)
        log_probs = np.concatenate([score.log_probs for score in scores]).astype(np.float64)
        found[name] = math.exp(min(-log_probs.mean(), 700.0))
        print(f"  {name}: perplexity {found[name]:,.2f}", flush=True)
    return found


@functools.partial(jax.jit, static_argnames=("graph",))
def _advance(graph, params, features, sizes, x):
    model = nnx.merge(graph, params)
    layers = in_compute_type(model.depth.from_features(features), jnp.float32)
    return walk(model.solver, model.field, StackedWeights(layers, sizes), x, Context())


def last_state(model: Transformer, num_steps: int, x: jax.Array) -> np.ndarray:
    """x(1) in fp32 by a multiple of the trained number of steps, of which the weights exist for so many at a time."""
    depth, chunk = model.depth, model.num_steps
    times, (graph, params) = model.times(num_steps), split_model(model)
    stages = stage_times(times, model.solver.nodes).reshape(-1, chunk * len(model.solver.nodes))
    for stage, sizes in zip(stages, step_sizes(times).reshape(-1, chunk)):
        features = time_features(stage, depth.sinusoidal_dim, depth.time_frequency)
        x = _advance(graph, params, features, sizes, x)
    return np.asarray(x, np.float64)


def convergence(model: Transformer, tokens: jax.Array, refinements: int) -> dict:
    """The error of each of `METHODS` at the trained number of steps, twice as many, and so on.

    The error is the distance of x(1) from that of RK4 at twice the finest grid, as a share of x(1)'s length; `order` is the
    slope of its logarithm over the three finest grids whose errors are above fp32's rounding. All in fp32.
    """
    model = model.replace(dtype=jnp.dtype(jnp.float32))
    x = model.embed(tokens, Context()).astype(jnp.float32)
    numbers = [model.num_steps * 2**k for k in range(refinements + 1)]
    exact = last_state(model.replace(solver=SOLVERS["rk4"]), 2 * numbers[-1], x)
    found = {"num_steps": numbers, "errors": {}, "orders": {}}
    for method in METHODS:
        walker = model.replace(solver=SOLVERS[method])
        errors = [
            float(np.linalg.norm(last_state(walker, number, x) - exact) / np.linalg.norm(exact)) for number in numbers
        ]
        usable = [(n, e) for n, e in zip(numbers, errors) if 1e-5 < e < math.inf][-3:]
        order = -np.polyfit(*np.log(usable).T, 1)[0] if len(usable) > 1 else None
        found["errors"][method], found["orders"][method] = errors, order
        print(f"  {method}: observed order {'none' if order is None else f'{order:.2f}'}", flush=True)
    return found


def examine(options) -> dict:
    """Examine a checkpoint as the options say, and write and print the results.

    Raises:
        UserError: for whatever the user can put right.
    """
    opened = checkpoint.load(options.workdir)
    model, config = opened.model, opened.config.model
    if MODELS[config.kind].weights != "generated" or model.num_steps < 2:
        raise UserError(
            "--workdir: must hold a model whose weights are generated for at least 2 times, but it is a model of the kind "
            f"{config.kind} with {model.num_steps} steps"
        )
    window = window_of(options, opened)
    task, files = text_of(options, opened)
    windows = open_text(options, opened, task, files, window, window).first_windows(options.windows)
    folder = results_folder(options.output, options.workdir, "ode")
    results = {
        "workdir": str(options.workdir),
        "config": opened.config.name,
        "checkpoint_step": opened.step,
        "solver": config.solver,
        "num_steps": model.num_steps,
        "time_frequency": config.time_frequency,
        "training_times": config.training_times,
        "task": task,
        "split": options.split,
        "files": files,
        "windows": len(windows),
        "window": window,
    }
    print("weights between their trained times", flush=True)
    with jax.default_matmul_precision("highest"):
        results["smoothness"], drawn, times = smoothness(model), curves(model), trained_times(model)
    print("other grids", flush=True)
    results["perplexities"] = perplexities(model, windows, options.batch_size)
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    print("convergence", flush=True)
    tokens = jnp.asarray([window.ids[:-1] for window in windows[:4]])
    with jax.default_matmul_precision("highest"):
        results["convergence"] = convergence(model, tokens, options.refinements)
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(folder / "results.md", table(results) + "\n")
    plot(results, drawn, times, folder / "ode.png")
    print(f"\n{table(results)}\n\nThis report, results.json and ode.png are in {folder}", flush=True)
    return results


if __name__ == "__main__":
    define_flags()
    command_line.run(lambda: examine(flags.FLAGS))
