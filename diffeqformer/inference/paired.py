"""Do two models differ on the same documents? Paired tests of downstream results.

The paper calls differences "statistically significant" (sections 6.1 and C.7) and doesn't name a test. Both models
answer the same questions, so what counts are the documents on which they differ. The standard errors of the two scores
say less: they also hold how much documents differ from one another.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diffeqformer.inference.published import PERCENT, TASKS, in_order, shown_metric


class Difference(NamedTuple):
    """A second model's mean less a first one's, over documents that both have scored.

    error: standard error of the mean of the documents' differences.
    p: probability of a difference at least as large if the models are equally good, two-sided.
    """

    value: float
    error: float
    p: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The paired difference of two models.

    If each document is right or wrong, p is that of McNemar's exact test: a sign test of the documents on which only
    one model is right. Otherwise it is that of the paired t-test. It is 1 if there is no difference at all.

    Raises:
        ValueError: if they don't have the same number of documents, or fewer than two.
    """
    from scipy import stats

    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} documents can't be paired")
    differences = second - first
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if not differences.any():
        p = 1.0
    elif np.isin([first, second], (0, 1)).all():
        p = stats.binomtest(int((differences > 0).sum()), int((differences != 0).sum())).pvalue
    else:
        p = stats.ttest_rel(second, first).pvalue
    return Difference(float(differences.mean()), error, float(p))


def scores_of_documents(results: dict, rows: dict[str, dict]) -> dict[str, list[float]]:
    """The shown metric of every document of each task, in the order of the documents, where the task's is their mean.

    It isn't for perplexities, where a document has its log-likelihood, nor for groups in which tasks of different sizes
    count the same.

    Args:
        results: lm-eval's, with `samples`.
        rows: the requested tasks and groups (`diffeqformer.downstream.summary`).
    """
    scores = {}
    for name, row in rows.items():
        metric, _, chosen = (key := shown_metric(row)).partition(",")
        samples = [
            sample
            for task in leaves(name, results["group_subtasks"])
            for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
            if sample["filter"] == chosen
        ]
        values = [sample.get(metric) for sample in samples]
        numbers = values and all(isinstance(value, (int, float)) for value in values)
        if numbers and math.isclose(np.mean(values), row[key], rel_tol=0, abs_tol=1e-6):
            scores[name] = [float(value) for value in values]
    return scores


def leaves(name: str, parts: dict[str, list[str]]) -> list[str]:
    """The tasks of a group, or the task itself."""
    return [leaf for part in parts[name] for leaf in leaves(part, parts)] if parts.get(name) else [name]


def describe_differences(runs: list[dict]) -> str:
    """A Markdown table of the differences of models from their `references`; empty if there is none.

    Args:
        runs: as `diffeqformer.downstream` keeps them; label, shots, seed, setting, tasks and documents are used.
    """
    others = references(runs)
    found = {(run["label"], run["shots"]): run for run in runs}
    shots = list(dict.fromkeys(run["shots"] for run in runs))
    places = [(label, number) for number in shots for label in others if (label, number) in found]
    if not places:
        return ""
    tasks = [task for task in runs[0]["tasks"] if any(task in found[place]["documents"] for place in places)]
    lines = [
        ["", *(f"**{label}, less {others[label]}, {number} shots**" for label, number in places)],
        ["---"] + ["---:"] * len(places),
    ]
    for task in in_order(tasks):
        cells = [_cell(task, found[others[label], number], found[label, number]) for label, number in places]
        lines.append([TASKS.get(task, task), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def references(runs: list[dict]) -> dict[str, str]:
    """By the label of a run: that of the one with which it is compared.

    It is the first of the same seed. For the first of a further seed it is the first of all, unless they differ in the
    seed alone.
    """
    found = {}
    for run in runs:
        alike = next(other for other in runs if other["seed"] == run["seed"])
        if alike["label"] == run["label"] and run["setting"] != runs[0]["setting"]:
            alike = runs[0]
        if alike["label"] != run["label"]:
            found[run["label"]] = alike["label"]
    return found


def _cell(task: str, first: dict, second: dict) -> str:
    ours, theirs = (run["documents"].get(task, []) for run in (first, second))
    if len(ours) != len(theirs) or len(ours) < 2:
        return "–"
    scale = 100 if shown_metric(first["tasks"][task]).partition(",")[0] in PERCENT else 1
    found = difference(ours, theirs)
    return f"{scale * found.value:+.2f} ± {scale * found.error:.2f}, p = {found.p:.2g}"
