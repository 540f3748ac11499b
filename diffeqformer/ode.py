"""Is a trained model a differential equation? `python -m diffeqformer.ode --workdir=runs/tiny`

Measures what happens between the trained times: how smooth W(t) is there, the perplexity on other grids, and whether
solvers converge to one solution as their steps get smaller. docs/ode.md explains the numbers.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Int

from diffeqformer.checkpoints import checkpoint
from diffeqformer.console import command_line
from diffeqformer.console.figures import COLOURS, log_if_wide, new_figure
from diffeqformer.console.results import header, markdown_table, results_folder, write_json, write_text
from diffeqformer.depth.weights import StackedWeights, in_type
from diffeqformer.errors import UserError, counted
from diffeqformer.fields.layers import Context, Linear
from diffeqformer.inference.perplexity import as_trained, depths_of, plain
from diffeqformer.inference.scoring import Scorer, Stretch, window_size
from diffeqformer.inference.text_options import define_text_flags, open_text, text_of
from diffeqformer.parallel import hosts
from diffeqformer.solvers import SOLVERS, Solver, walk
from diffeqformer.transformer import Transformer, split_model

METHODS = ("euler", "midpoint", "heun", "strang", "rk4")  # the solvers compared in `convergence`


def trained_times(model: Transformer) -> np.ndarray:
    """The times of the trained weights, if these are fixed: the solver's nodes on the trained grid."""
    return np.unique(model.grid().times)


def smoothness(model: Transformer) -> dict[str, dict[str, float]]:
    """How far each layer's kernel, halfway between trained times, is from the mean of its two neighbours.

    Returns Frobenius norms, relative to the norm of that mean and averaged over the intervals. `gap` is the distance of
    the kernel from the mean, `half_change` is half the difference of the neighbours, and `ratio` is `gap` divided by
    `half_change`. For a smooth function the ratio is far below 1, and halving the intervals halves it. For unrelated
    kernels it is sqrt(3).
    """
    times = trained_times(model)
    features = map(model.depth.features, (times, (times[1:] + times[:-1]) / 2))
    norms = jax.tree.map(float, _norms(*split_model(model), *features))
    for row in norms.values():
        row["ratio"] = row["gap"] / row["half_change"] if row["half_change"] else math.nan
    return norms


@functools.partial(jax.jit, static_argnames="graph")
def _norms(graph, params, features, features_between):
    depth, norm = nnx.merge(graph, params).depth, functools.partial(jnp.linalg.norm, axis=(1, 2))
    trained, middle = map(depth.from_features, (features, features_between))
    rows = {}
    for name, layer in trained.items():
        if "kernel" in layer:
            before, after = layer["kernel"][:-1], layer["kernel"][1:]
            mean = (before + after) / 2
            rows[name] = {
                "gap": jnp.mean(norm(middle[name]["kernel"] - mean) / norm(mean)),
                "half_change": jnp.mean(norm(after - before) / 2 / norm(mean)),
            }
    return rows


def curves(model: Transformer, points: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A few entries of the first layer's kernel over time, minus their means over the trained times.

    Returns:
        times [points], the entries there [points, entries], and at `trained_times`.
    """
    name, layer = next((name, layer) for name, layer in model.field.layers().items() if isinstance(layer, Linear))
    rows, columns = (tuple(size * part // 8 for part in (1, 3, 5, 7)) for size in (layer.inputs, layer.outputs))

    def entries_at(times):
        return np.asarray(_entries(*split_model(model), model.depth.features(times), name, rows, columns))

    times, trained = np.linspace(0, 1, points + 1)[1:], entries_at(trained_times(model))
    return times, entries_at(times) - trained.mean(0), trained - trained.mean(0)


@functools.partial(jax.jit, static_argnames=("graph", "name", "rows", "columns"))
def _entries(graph, params, features, name, rows, columns):
    """Entries of one kernel at several times. A few kernels are in memory at a time, and no other layer's."""
    depth = nnx.merge(graph, params).depth

    def at(feature):
        return depth.from_features(feature[None])[name]["kernel"][0][jnp.array(rows), jnp.array(columns)]

    return jax.lax.map(at, features, batch_size=20)


def grids(model: Transformer, depths: Collection[int]) -> dict[str, tuple[Solver, int]]:
    """The grids to score, by name: a solver and a number of steps, first the model's own. `depths` were trained."""
    solver, own = model.solver, model.num_steps
    numbers = [own, math.ceil(own / 2), math.ceil(own * 3 / 4), own * 3 // 2, 2 * own, 4 * own]
    rows = {
        f"{'as trained: ' if number in depths else ''}{number} steps": (solver, number)
        for number in dict.fromkeys(numbers)
    }
    if solver.nodes == (1.0,):
        for share in (0.25, 0.5, 0.75, 1.0):
            rows[f"weights {share:g} of a step earlier"] = dataclasses.replace(solver, nodes=(1 - share,)), own
    return rows | {f"rk4, {number} steps": (SOLVERS["rk4"], number) for number in (own, 2 * own)}


def perplexities(
    model: Transformer, depths: Collection[int], windows: list[Stretch], batch_size: int
) -> dict[str, float]:
    """The paper's perplexity of some windows on each of `grids` that fits into memory and has finite logits."""
    found = {}
    for name, (solver, num_steps) in grids(model, depths).items():
        try:
            scores = Scorer(model.replace(solver=solver), num_steps, batch_size)(windows)  # whose weights go at once
            log_probs = np.concatenate([score.log_probs for score in scores]).astype(np.float64)
            found[name] = math.exp(min(-log_probs.mean(), 700.0))
            print(f"  {name}: perplexity {plain(found[name])}", flush=True)
        except UserError as error:
            print(f"  {name}: left out, as {error}", flush=True)
    return found


@functools.partial(jax.jit, static_argnames="graph")
def _advance(graph, params, features, sizes, x):
    model = nnx.merge(graph, params)
    layers = in_type(model.depth.from_features(features), jnp.float32)
    return walk(model.solver, model.field, StackedWeights(layers, sizes), x, Context())


def last_state(model: Transformer, num_steps: int, x: jax.Array) -> np.ndarray:
    """x(1) from x(0), both in fp32, in a multiple of the trained number of steps.

    Only the weights of that many steps are in memory at a time, at each node of the solver, in fp32.
    """
    grid, (graph, params) = model.grid(num_steps), split_model(model)
    features, chunks = model.depth.features(grid.times), num_steps // model.num_steps
    for here, step_sizes in zip(np.split(features, chunks), np.split(grid.step_sizes, chunks)):
        x = _advance(graph, params, here, step_sizes, x)
    return np.asarray(x, np.float64)


def convergence(model: Transformer, tokens: Int[np.ndarray, "B S"], refinements: int) -> dict:
    """The error of each of `METHODS` at the trained number of steps, twice as many, and so on.

    The error is the distance of x(1) from RK4's x(1) on a grid twice as fine as the finest one, divided by the length
    of x(1). All in fp32. For `orders` see `observed_order`; that of RK4, the method of the reference, leaves out the
    finest grid, which is hardly coarser than the reference's.
    """
    model = model.replace(dtype=jnp.dtype(jnp.float32))
    x = model.embed(jnp.asarray(tokens), Context())
    numbers = [model.num_steps * 2**k for k in range(refinements + 1)]
    exact = last_state(model.replace(solver=SOLVERS["rk4"]), 2 * numbers[-1], x)
    found = {"num_steps": numbers, "errors": {}, "orders": {}}
    for method in METHODS:
        walker = model.replace(solver=SOLVERS[method])
        distances = [np.linalg.norm(last_state(walker, number, x) - exact) for number in numbers]
        errors = [float(distance / np.linalg.norm(exact)) for distance in distances]
        last = -1 if method == "rk4" else None
        found["errors"][method], found["orders"][method] = errors, observed_order(numbers[:last], errors[:last])
        print(f"  {method}: observed order {shown(found['orders'][method])}", flush=True)
    return found


def observed_order(numbers: list[int], errors: list[float]) -> float | None:
    """The order that a solver shows by its errors in some numbers of steps.

    It is minus the slope of the error's logarithm over the three finest grids whose errors are above fp32's rounding;
    None if there are fewer.
    """
    usable = [(n, error) for n, error in zip(numbers, errors) if 1e-5 < error < math.inf]
    if len(usable) < 3:
        return None
    steps, errors = np.log(usable[-3:]).T
    return float(-np.polyfit(steps, errors, 1)[0])


def shown(order: float | None) -> str:
    """An observed order."""
    return "none" if order is None else f"{order:.2f}"


def table(results: dict) -> str:
    """The findings in Markdown."""
    frequency = results["time_frequency"]
    features = "" if frequency is None else f", time frequency {frequency:g}"
    times = "" if results["training_times"] == "fixed" else f", {results['training_times']} times"
    title = f"{results['title']} at step {results['checkpoint_step']:,}, {as_trained(results)}{features}{times}"
    ratios = [
        [name, f"{row['gap']:.3f}", f"{row['half_change']:.3f}", f"{row['ratio']:.2f}"]
        for name, row in results["smoothness"].items()
    ]
    text = ", ".join(results["files"] or [results["task"], results["split"]])
    perplexities = [[name, plain(value)] for name, value in results["perplexities"].items()]
    found = results["convergence"]
    errors = [
        [method, *(f"{error:.1e}" for error in errors), shown(found["orders"][method])]
        for method, errors in found["errors"].items()
    ]
    tables = [
        (["kernel", "distance from its neighbours' mean", "half its neighbours' difference", "ratio"], ratios),
        (["grid", f"perplexity of {results['windows']} windows of {results['window']} ({text})"], perplexities),
        (["solver", *(f"error at {n} steps" for n in found["num_steps"]), "observed order"], errors),
    ]
    return "\n\n".join([title, *(markdown_table(*parts) for parts in tables)])


def plot(results: dict, curves: tuple, trained: np.ndarray, path: pathlib.Path) -> None:
    """Plot entries of a kernel over time, and errors against steps."""
    figure, [[over_time, errors]] = new_figure(1, 2, (13, 4.5))
    times, values, at_trained = curves
    for entry in range(values.shape[1]):
        over_time.plot(times, values[:, entry], linewidth=0.8, color=COLOURS[entry])
        over_time.plot(trained, at_trained[:, entry], "o", color=COLOURS[entry])
    over_time.set(title="a few weights over time; dots: trained", xlabel="t", ylabel="weight, less the dots' mean")
    found = results["convergence"]
    for method, series in found["errors"].items():
        errors.loglog(found["num_steps"], series, "o-", label=f"{method}, order {shown(found['orders'][method])}")
    errors.set(title="error of the last state", xlabel="steps of depth", ylabel="error, relative to the length of x(1)")
    errors.set_xticks(found["num_steps"], found["num_steps"])
    errors.minorticks_off()
    log_if_wide(errors)
    errors.legend()
    figure.suptitle(table(results).splitlines()[0])
    figure.savefig(path, dpi=120)


def examine(options) -> dict:
    """Examine a checkpoint according to the options, then write and print the results."""
    hosts.check_one("ode: this command")
    opened = checkpoint.load(options.workdir, step=options.step)
    model, config = opened.model, opened.config.model
    if not model.depth.continuous or model.num_steps < 2:
        raise UserError(
            "--workdir: must hold a model whose weights are functions of time, in at least 2 steps, but it is a model "
            f"of the kind {config.kind} with {counted(model.num_steps, 'step')}"
        )
    model.grid(model.num_steps * 2 ** (options.refinements + 1))  # the reference's, which may not be too fine
    window = window_size(options.window, opened.config, model.max_length, "--window")
    task, files, stored = text_of(options, opened)
    ids = open_text(options, opened, task, files, stored, window, window).windows[: options.windows]
    folder = results_folder(options.output, options.workdir, "ode")
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
    write_json(folder / "results.json", results)
    print("convergence", flush=True)
    with jax.default_matmul_precision("highest"):
        results["convergence"] = convergence(model, ids[:4, :-1], options.refinements)
    write_json(folder / "results.json", results)
    write_text(folder / "results.md", table(results) + "\n")
    plot(results, drawn, times, folder / "ode.png")
    print(f"\n{table(results)}\n\nThis report, results.json and ode.png are in {folder}", flush=True)
    return results


if __name__ == "__main__":
    define_text_flags("ode")
    flags.DEFINE_integer("windows", 64, "Windows of text that each grid scores.", lower_bound=1)
    flags.DEFINE_integer("refinements", 5, "How often the trained step is halved for convergence.", 2, 15)
    command_line.run(lambda: examine(flags.FLAGS))
