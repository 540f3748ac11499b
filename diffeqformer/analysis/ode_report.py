"""What `diffeqformer.ode` found, in Markdown and as a picture."""

import pathlib

import numpy as np


def table(results: dict) -> str:
    """The findings in Markdown."""
    times = "" if results["training_times"] == "fixed" else f", {results['training_times']} times"
    lines = [
        f"{results['config']} at step {results['checkpoint_step']:,}, trained in {results['num_steps']} steps of {results['solver']}, time "
        f"frequency {results['time_frequency']:g}{times}",
        "",
        "| kernel | distance from its neighbours' mean | half its neighbours' difference | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in results["smoothness"].items():
        lines.append(f"| {name} | {row['gap']:.3f} | {row['half_change']:.3f} | {row['ratio']:.2f} |")
    text = ", ".join(results["files"] or [results["task"], results["split"]])
    lines += ["", f"| grid | perplexity of {results['windows']} windows of {results['window']} ({text}) |", "|---|---|"]
    lines += [f"| {name} | {value:,.2f} |" for name, value in results["perplexities"].items()]
    found = results["convergence"]
    lines += ["", "| solver | " + " | ".join(f"error at {n} steps" for n in found["num_steps"]) + " | observed order |"]
    lines.append("|" + "---|" * (len(found["num_steps"]) + 2))
    for method, errors in found["errors"].items():
        order = found["orders"][method]
        cells = [f"{error:.1e}" for error in errors] + ["" if order is None else f"{order:.2f}"]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict, curves: tuple, trained: np.ndarray, path: pathlib.Path) -> None:
    """Draw entries of a kernel over time, the smoothness of every layer, perplexities, and errors against steps."""
    from matplotlib import ticker

    from diffeqformer.console.figures import COLOURS, new_figure

    figure, ((over_time, smooth), (grids, errors)) = new_figure(2, 2, (13, 9))
    times, values, at_trained = curves
    for entry in range(values.shape[1]):
        over_time.plot(times, values[:, entry], linewidth=0.8, color=COLOURS[entry])
        over_time.plot(trained, at_trained[:, entry], "o", color=COLOURS[entry])
    over_time.set(xlabel="t", title="a few weights over time (without constant term; dots: trained times)")

    names = list(results["smoothness"])
    smooth.bar(names, [results["smoothness"][name]["ratio"] for name in names])
    smooth.axhline(3**0.5, color="grey", linestyle=":", label="kernels that have nothing to do with one another")
    smooth.set(
        title="between trained times: distance of kernels from their neighbours' mean,\nas a share of half the neighbours' difference"
    )
    smooth.tick_params(axis="x", rotation=20)
    smooth.legend()

    rows = results["perplexities"]
    grids.barh(list(rows)[::-1], list(rows.values())[::-1])
    for number, value in enumerate(list(rows.values())[::-1]):
        grids.annotate(f"{value:,.4g}", (value, number), xytext=(4, 0), textcoords="offset points", va="center")
    grids.set(
        title="perplexity on other grids", xscale="log" if max(rows.values()) > 10 * min(rows.values()) else "linear"
    )
    grids.xaxis.set_minor_formatter(ticker.NullFormatter())
    grids.margins(x=0.15)

    found = results["convergence"]
    for method, series in found["errors"].items():
        order = found["orders"][method]
        errors.loglog(
            found["num_steps"], series, "o-", label=method + ("" if order is None else f", order {order:.2f}")
        )
    errors.set(xlabel="steps", title="relative error of the last state", xticks=found["num_steps"])
    errors.set_xticklabels(found["num_steps"])
    errors.minorticks_off()
    errors.legend()
    for axis in (over_time, smooth, errors):
        axis.grid(alpha=0.3)
    figure.suptitle(table(results).splitlines()[0])
    figure.savefig(path, dpi=120)
