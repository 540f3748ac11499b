"""Runs whose settings differ in the seed alone, and means of downstream scores over them."""

import json
import statistics

from ml_collections import ConfigDict

from diffeqformer.config import CHANGEABLE, field_names, get_field
from diffeqformer.inference.published import Column, Value, shown_metric, shown_value, table


def setting(config: ConfigDict, data_sha256: str, validation_sha256: str, earlier_rates: dict | None = None) -> dict:
    """What decides a run's result but for its seed: fields of the config, and the text by the hashes of its splits.

    Args:
        earlier_rates: `About.earlier_rates`.
    """
    names = [name for name in field_names(config) if name != "seed" and not name.startswith(CHANGEABLE)]
    texts = {"data": data_sha256[:8], "validation data": validation_sha256[:8]}
    before = ", ".join(f"{rate:g} until step {step}" for step, rate in (earlier_rates or {}).items())
    before = {"before": before} if before else {}
    return {name: get_field(config, name) for name in names} | texts | before


def describe_means(runs: list[dict]) -> str:
    """A Markdown table of means and standard deviations over the seeds of each setting; empty if none has several.

    Args:
        runs: as `diffeqformer.downstream` keeps them; setting, seed, num_steps, title, kind, shots and tasks are used.
    """
    groups = {}
    for run in runs:
        key = json.dumps([run["setting"], run["num_steps"]], sort_keys=True, default=list)
        groups.setdefault(key, {}).setdefault(run["shots"], []).append(run)
    columns = [_means(by_shots) for by_shots in groups.values() if len(next(iter(by_shots.values()))) > 1]
    if not columns:
        return ""
    rows = runs[0]["tasks"]
    metrics = {task: shown_metric(results).partition(",")[0] for task, results in rows.items()}
    return table(columns, [], metrics, {task: results["examples"] for task, results in rows.items()})


def _means(by_shots: dict[int, list[dict]]) -> Column:
    first = next(iter(by_shots.values()))
    seeds = ", ".join(str(run["seed"]) for run in first)
    heading = f"{first[0]['title']}: {first[0]['kind']}, {first[0]['num_steps']} steps, seeds {seeds}"
    values = {}
    for shots, members in by_shots.items():
        of_task = {task: [shown_value(run["tasks"][task], shots) for run in members] for task in members[0]["tasks"]}
        values[shots] = {task: _mean(found) for task, found in of_task.items()}
    return Column(heading, values)


def _mean(values: list[Value]) -> Value:
    numbers = [value.value for value in values]
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Value(statistics.mean(numbers), deviation, values[0].note)
