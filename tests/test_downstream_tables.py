"""What `downstream` shows of scores: tables, means over seeds, pairs, and the figure."""

import math

import numpy as np
import pytest

from diffeqformer.inference import bars, paired, published, seeds


def test_seeds_are_averaged_and_compared_with_their_own():
    """Two seeds of two models, and a third seed of a third one."""

    def run(kind, seed, score):
        tasks = {"piqa": {"acc,none": score, "shots": 0, "examples": 4, "contexts_cut": 0}}
        about = {"label": f"{kind} {seed}", "setting": kind, "seed": seed, "shots": 0, "num_steps": 4, "title": "tiny"}
        return {**about, "kind": kind, "tasks": tasks, "documents": {"piqa": [0.0, 1.0, 1.0, score]}}

    runs = [run(kind, seed, seed / 4) for kind in ("gpt", "ours") for seed in (1, 2)] + [run("third", 3, 0.5)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in seeds.describe_means(runs).splitlines()]
    assert lines[2][2:] == [f"**tiny: {kind}, 4 steps, seeds 1, 2**" for kind in ("gpt", "ours")]
    assert lines[3] == ["PIQA", "4", *2 * ["37.50 (17.68)"]]
    assert seeds.describe_means(runs[1:3]) == ""
    assert paired.references(runs) == {"ours 1": "gpt 1", "ours 2": "gpt 2", "third 3": "gpt 1"}
    assert "**ours 2, less gpt 2, 0 shots**" in paired.describe_differences(runs)


def test_what_the_tokenizer_loses_is_shown():
    row = {"bits_per_byte,none": math.nan, "shots": 0, "examples": 4, "contexts_cut": 0}
    run = {"label": "a", "shots": 0, "field": "gpt"}
    lossy = {"pages": row | {"unknown_tokens": 1234, "altered_texts": 3}}
    shown = published.describe([{**run, "tasks": lossy}], {})
    assert "| nan [1,234 unknown, 3 altered] |" in shown and "\n[n unknown, m altered]: the tokenizer has" in shown
    whole = {"pages": row | {"unknown_tokens": 0, "altered_texts": 0}}
    assert "altered" not in published.describe([{**run, "tasks": whole}], {})


def test_the_same_documents_are_compared_in_pairs():
    first = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    found = paired.difference(first, 7 * [1.0] + 3 * [0.0])  # 4 better and 1 worse
    assert found.value == pytest.approx(0.3) and found.p == pytest.approx(2 * (1 + 5) / 2**5)
    assert found.error == pytest.approx(np.std([4 * [1] + [-1] + 5 * [0]], ddof=1) / 10**0.5)
    assert paired.difference(first, first) == (0, 0, 1)
    values = [1.0, 2.5, 0.5, 4.0]
    found = paired.difference(values, [1.1, 2.8, 0.7, 4.2])
    assert found.value == pytest.approx(0.2) and found.value / found.error == pytest.approx(4.899, abs=1e-3)
    assert found.p == pytest.approx(0.0163, abs=1e-4)  # of Student's t with 3 degrees of freedom
    with pytest.raises(ValueError, match="^10 and 4 documents can't be paired$"):
        paired.difference(first, values)


def test_a_group_has_the_documents_of_its_tasks_in_their_order():
    def samples(*numbers):
        return [{"doc_id": number, "filter": "none", "acc": number % 2} for number in numbers]

    results = {
        "samples": {"a": samples(2, 1), "b": samples(0)},
        "group_subtasks": {"all": ["b", "part"], "part": ["a"]},
    }
    results["samples"]["a"].append({"doc_id": 0, "filter": "other", "acc": 1})
    rows = {"all": {"examples": 3, "shots": 0, "acc,none": 1 / 3}}
    assert paired.scores_of_documents(results, rows) == {"all": [0, 1, 0]}
    assert paired.scores_of_documents(results, {"all": {"acc,none": 1 / 4}}) == {}  # the mean of the tasks' means
    results["samples"]["pages"] = [{"doc_id": 0, "filter": "none", "perplexity": -3.25}]  # a log-likelihood
    assert paired.scores_of_documents(results, {"pages": {"perplexity,none": 25.8}}) == {}


def test_every_model_is_in_the_legend_whatever_the_shots(monkeypatch, tmp_path):
    """The paper has scores at 0 and 5 shots alone."""
    figures, new_figure = [], bars.new_figure
    monkeypatch.setattr(bars, "new_figure", lambda *of, **how: figures.append(new_figure(*of, **how)) or figures[-1])
    tasks = {"piqa": {"acc,none": 0.6, "shots": 1, "contexts_cut": 0}}
    runs = [{"label": "ours", "shots": shots, "field": "gpt", "tasks": tasks} for shots in (1, 5)]
    bars.plot(runs, tmp_path / "bars.png")
    [legend] = figures[0][0].legends
    headings = [column.heading for column in published.published_columns(runs)]
    assert [text.get_text() for text in legend.get_texts()] == ["ours", *headings] and len(headings) == 2


def test_panels_keep_their_height_beside_many_models_with_long_names(monkeypatch, tmp_path):
    figures, new_figure = [], bars.new_figure
    monkeypatch.setattr(bars, "new_figure", lambda *of, **how: figures.append(new_figure(*of, **how)) or figures[-1])
    tasks = {"piqa": {"acc,none": 0.6, "shots": 1, "contexts_cut": 0}}
    run = {"field": "gpt", "tasks": tasks}
    for models in (1, 12):
        labels = [f"runs/a_folder_with_a_long_name/and-another-within-it-{model}, 4 steps" for model in range(models)]
        runs = [{**run, "label": label, "shots": shots} for shots in (0, 1) for label in labels]
        bars.plot(runs, tmp_path / "bars.png")
    few, many = (axes[0, 0].get_window_extent().height for _, axes in figures)
    assert many == pytest.approx(few, rel=0.15)


def test_published_figures():
    """Spot checks against the paper, and the standard error that each accuracy and number of examples implies."""
    gpt, ours = published.PUBLISHED["gpt"]
    llama, _ = published.PUBLISHED["llama"]
    assert str(gpt.values[0]["arc_challenge"]) == "20.65 (1.18)" and str(ours.values[5]["wsc273"]) == "53.11 (3.03)"
    assert str(llama.values[5]["mmlu"]) == "26.43 (0.37)" and str(ours.values[0]["lambada_openai"]) == "38.39 (0.68)"
    examples = dict(zip(published.TASKS, (1172, 2376, 10042, 5153, 5153, 651, 14042, 1838, 1000, 1267, 273)))
    for columns in published.PUBLISHED.values():
        for column in columns:
            for values in column.values.values():
                for task, (percent, error, _) in values.items():
                    implied = math.sqrt(percent * (100 - percent) / (examples[task] - 1))
                    assert error == pytest.approx(implied, abs=0.011 + 0.15 * (task == "piqa"))
