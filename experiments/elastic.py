"""One checkpoint for many depths against a model for each depth, on two CPU cores.

    python experiments/elastic.py --stage=rates    # three learning rates for each kind of model, one seed
    python experiments/elastic.py --stage=times    # the time per token at each depth; with nothing else running
    python experiments/elastic.py --stage=final    # three seeds: specialists, GPTs, elastic models at two budgets

The shape and the text are those of configs/tiny.py. A row of the results is one run of diffeqformer.main in its own
folder, scored by diffeqformer.evaluate at the depths that it can take. Rows that --results holds aren't run again, so
the study can be run in pieces, and on several machines. Interrupted runs go on where they were. An elastic run of
5,000 training steps takes about ten minutes of one core of an AMD EPYC, and one of 28,261 an hour.

A specialist, like a GPT, is trained at one depth, with the published time frequency. The others walk one of the depths
`TRAINED` in each training step, and have a low frequency. The one called drawn is the plain one: weights W(t), fixed
grids, and Euler's steps like a specialist. `tiny.py:elastic` has W(t), mixed grids and Lie-Trotter steps, and the one
called fixed grids the same without moving them. Their first budget is the number of training steps of one specialist,
their second one the steps of depth of all specialists together; the deepest specialist and GPT get these as well.

Rates are chosen with the seed 0, which the final rows don't use: at depth 4 for specialists and GPTs, on average over
its depths for an elastic model. Longer runs take the same rates. Elastic ones read the text more than twice then,
specialists and GPTs not quite once.
"""

import collections
import itertools
import pathlib
import random
import runpy
import statistics
import sys
import time
from typing import NamedTuple

from absl import app, flags
from common import define_flags, folder_of, read_results, report, results_file, run_rows, table, train

from diffeqformer.console.results import spread, write_json

STAGE = flags.DEFINE_enum("stage", None, ["rates", "times", "final"], "What to run.", required=True)
STEPS = flags.DEFINE_integer("steps", 5000, "Training steps of a specialist.", lower_bound=1)
define_flags("elastic", at_once=2)

DEPTHS = (2, 4, 8, 12)  # of specialists
TRAINED = (2, 3, 4, 6, 8)  # depths among which tiny.py:elastic draws
SCORED = (2, 3, 4, 5, 6, 8, 12, 16)
RATES = (1.5e-3, 3e-3, 6e-3)
ROUNDS = 50  # of timing


class Kind(NamedTuple):
    """A kind of model in the study.

    model: the config's, after the colon.
    options: the other options of a run.
    walked: steps of depth in a training step, on average; 0: the model's depth. Shifted grids have one more.
    """

    model: str
    options: tuple[str, ...] = ()
    walked: float = 0


MEAN = statistics.mean(TRAINED)
KINDS = {
    "specialist": Kind("diffeqformer"),
    "gpt": Kind("gpt"),
    "drawn": Kind("elastic", ("--config.model.solver=euler", "--config.model.training_times=fixed"), MEAN),
    "fixed grids": Kind("elastic", ("--config.model.training_times=fixed",), MEAN),
    "elastic": Kind("elastic", walked=MEAN + sum(depth > 2 for depth in TRAINED) / len(TRAINED)),
}
ELASTIC = tuple(name for name, kind in KINDS.items() if kind.walked)


class Row(NamedTuple):
    """One run: a key of `KINDS`, its depth (0: elastic), training steps, peak learning rate and seed."""

    model: str
    depth: int
    steps: int
    rate: float
    seed: int

    def name(self) -> str:
        """Its key in the results, and its folder."""
        depth = f" at {self.depth}" if self.depth else ""
        return f"{self.model}{depth}, {self.steps} steps, rate {self.rate:g}, seed {self.seed}"

    def options(self) -> list[str]:
        """What `main` is told."""
        kind = KINDS[self.model]
        depth = [f"--config.model.num_steps={self.depth}"] if self.depth else []
        return [
            f"--config=configs/tiny.py:{kind.model}", *kind.options, *depth, f"--config.steps={self.steps}",
            f"--config.optimizer.learning_rate={self.rate:g}", f"--config.seed={self.seed}",
            f"--config.eval_every={self.steps}", "--config.checkpoints_kept=1",
        ]  # fmt: skip


def rows_of_rates() -> list[Row]:
    """Each kind at three rates, where one depth stands for all depths of specialists and GPTs."""
    return [
        Row(model, 0 if model in ELASTIC else 4, STEPS.value, rate, 0)
        for model, rate in itertools.product(KINDS, RATES)
    ]


def best_rates(results: dict[str, dict]) -> dict[str, float]:
    """The rate of each kind with the lowest bits/byte, on average over its trained depths, among `rows_of_rates`."""
    found = {}
    for row in rows_of_rates():
        if row.name() not in results:
            sys.exit(f"--stage=final: the rates are chosen by --stage=rates, which lacks the row {row.name()!r}")
        scores = results[row.name()]["bits_per_byte"]
        trained = TRAINED if row.model in ELASTIC else (row.depth,)
        found.setdefault(row.model, {})[row.rate] = statistics.mean(scores[str(depth)] for depth in trained)
    return {model: min(of_rates, key=of_rates.get) for model, of_rates in found.items()}


def final_rows(rates: dict[str, float]) -> list[Row]:
    """All models at the first budget, seed by seed, then at the second one."""
    steps, total, seeds = STEPS.value, STEPS.value * sum(DEPTHS), range(1, 1 + flags.FLAGS.seeds)
    rows = []
    for seed in seeds:
        rows += [Row(model, 0, steps, rates[model], seed) for model in ELASTIC]
        rows += [Row(model, depth, steps, rates[model], seed) for depth in DEPTHS for model in ("specialist", "gpt")]
    for seed in seeds:
        rows += [Row(model, 0, round(total / KINDS[model].walked), rates[model], seed) for model in ELASTIC]
        rows += [Row(model, DEPTHS[-1], total // DEPTHS[-1], rates[model], seed) for model in ("specialist", "gpt")]
    return rows


def run(row: Row, cores: list[int] | None) -> dict:
    """Train and score one row on some cores. Returns the row, with bits/byte by depth."""
    workdir = folder_of(row.name())
    train(workdir, row.options(), cores)
    scored = SCORED if row.model in ELASTIC else (row.depth,)
    options = f"--num_steps={','.join(map(str, scored))}", "--stride=128"
    found = report("evaluate", workdir, "scores", options, cores)["rows"]
    return {**row._asdict(), "bits_per_byte": {str(each["num_steps"]): each["bits_per_byte"] for each in found}}


def time_tokens() -> dict[str, dict[str, float]]:
    """Seconds to write one token, by kind of model and by depth: medians over rounds that take turns.

    They depend on shapes and the solver alone, so nothing is trained. Each round has another order, because a model
    that comes after a slow one is slower.
    """
    import jax

    from diffeqformer.inference.choice import Choice
    from diffeqformer.inference.sampling import write_tokens
    from diffeqformer.transformer import new_model

    get_config = runpy.run_path("configs/tiny.py")["get_config"]
    models, times = {}, collections.defaultdict(list)
    for (name, kind), depth in itertools.product(KINDS.items(), SCORED):
        config = get_config(kind.model)
        for option in kind.options:
            field, _, value = option.removeprefix("--config.model.").partition("=")
            config.model[field] = type(config.model[field])(value)
        config.model.num_steps = depth
        models[name, depth] = new_model(config)
    generator = random.Random(0)
    for _ in range(ROUNDS):
        for key, model in generator.sample(list(models.items()), len(models)):
            tokens = write_tokens(
                model, [0] * 8, count=101, key=jax.random.key(0), vocab_size=model.vocab_size, choice=Choice()
            )
            next(tokens)  # reads the prompt
            start = time.perf_counter()
            collections.deque(tokens, maxlen=0)
            times[key].append((time.perf_counter() - start) / 100)
    found = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}  # the first round compiles
    return {name: {str(depth): found[name, depth] for depth in SCORED} for name in KINDS}


def main(_) -> None:
    path = results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path_of_times = path.with_name(f"{path.stem}_times.json")
    results, times = read_results(path), read_results(path_of_times)
    if STAGE.value == "times":
        found = time_tokens()
        write_json(path_of_times, found)
        for model, seconds in found.items():
            print(f"{model}: " + ", ".join(f"{1e3 * value:.2f} ms at {depth}" for depth, value in seconds.items()))
        return
    if STAGE.value == "final" and times and set(times) != set(KINDS):
        sys.exit(f"{path_of_times}: must have times of {', '.join(KINDS)}; measure them by --stage=times, or delete it")
    rows = rows_of_rates() if STAGE.value == "rates" else final_rows(best_rates(results))
    results = run_rows(rows, Row.name, run)
    found = {row: results[row.name()] for row in rows}
    print(table(cells(found)))
    if STAGE.value == "final":
        plot(found, times, path.with_suffix(".png"))


def by_model(found: dict[Row, dict]) -> dict[tuple, list[dict]]:
    """The results of all seeds of each row."""
    groups = {}
    for row, result in found.items():
        groups.setdefault(row[:-1], []).append(result)
    return groups


def cells(found: dict[Row, dict]) -> list[dict[str, str]]:
    """The table: bits/byte by depth, means over seeds and their standard deviations."""
    lines = []
    for (model, depth, steps, rate), seeds in by_model(found).items():
        trained = str(depth or ", ".join(map(str, TRAINED)))
        line = {"model": model, "trained at": trained, "steps": f"{steps:,}", "rate": f"{rate:g}"}
        line["seeds"] = str(len(seeds))
        for number in map(str, SCORED):
            values = [seed["bits_per_byte"][number] for seed in seeds if number in seed["bits_per_byte"]]
            line[number] = spread(values, 3) if values else ""
        lines.append(line)
    return lines


def plot(found: dict[Row, dict], times: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """Plot bits/byte against depth, and against the time per token if that was measured: means, standard deviations."""
    from diffeqformer.console.figures import COLOURS, new_figure

    figure, [panels] = new_figure(1, 1 + bool(times), (7 + 5 * bool(times), 4.5), sharey=True)
    lines = {}
    for (model, _, steps, _), seeds in by_model(found).items():
        for number in seeds[0]["bits_per_byte"]:
            values = [seed["bits_per_byte"][number] for seed in seeds]
            error = statistics.stdev(values) if len(values) > 1 else 0.0
            lines.setdefault((model, steps), {})[int(number)] = statistics.mean(values), error
    for (model, steps), points in lines.items():
        depths, style = sorted(points), {"color": COLOURS[list(KINDS).index(model)], "marker": "o", "markersize": 4}
        style["linestyle"] = "--" if steps == STEPS.value else "-"
        for panel in panels:
            at = depths if panel is panels[0] else [1e3 * times[model][str(depth)] for depth in depths]
            means, errors = zip(*(points[depth] for depth in depths), strict=True)
            panel.errorbar(at, means, errors, label=f"{model}, {steps:,} steps", capsize=2, **style)
    panels[0].set(xlabel="steps of depth", ylabel="validation bits/byte", xscale="log", xticks=SCORED)
    panels[0].set_xticklabels(SCORED)
    panels[0].minorticks_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    if times:
        panels[1].set(xlabel="milliseconds per token")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    app.run(main)
