"""Tables of downstream scores: the command's, and those of experiments/downstream.py beside the paper's."""

import json

import numpy as np
import pytest

ROW = {"shots": 0, "examples": 4, "contexts": 8, "contexts_cut": 0, "unknown_tokens": 0, "altered_texts": 0}


def run_of(model, seed, shots, score):
    label = f"runs/{model}-seed-{seed}, 4 steps"
    row = ROW | {"shots": shots, "acc,none": score}
    run = {"label": label, "seed": seed, "shots": shots, "field": "gpt", "tasks": {"piqa": row}}
    return run, {"label": label, "shots": shots, "documents": {"piqa": [0.0, 1.0, 1.0, score]}}


def test_scores_are_shown_beside_the_papers_with_means_over_seeds_and_pairs(tmp_path, script, capsys):
    scores = {("gpt", 1): 0.0, ("gpt", 2): 1.0, ("ours", 1): 1.0, ("ours", 2): 0.0}
    found = [run_of(*of, shots, score) for of, score in scores.items() for shots in (1, 5)]
    runs, documents = zip(*found)
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    script("downstream", f"--results={tmp_path}").main(None)
    printed = capsys.readouterr().out
    assert (tmp_path / "tables.md").read_text() in printed
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]
    ours = [f"**runs/{model}-seed-{seed}, 4 steps**" for model in ("gpt", "ours") for seed in (1, 2)]
    assert lines[2][2:] == ours + ours + ["**GPT-large (published)**", "**DiffEqFormer-large (published)**"]
    assert lines[3][-2:] == ["55.82 (1.16)", "56.69 (1.16)"] and lines[3][2] == "0.00"
    assert lines[6][2] == "**runs/gpt-seed-*, 4 steps: mean**" and lines[7] == ["PIQA", "4", *4 * ["50.00 (70.71)"]]
    assert lines[8][1] == "**runs/ours-seed-1, 4 steps, less runs/gpt-seed-1, 4 steps, 1 shots**"
    assert lines[10] == ["PIQA", *2 * ["+25.00 ± 25.00, p = 1"], *2 * ["-25.00 ± 25.00, p = 1"]]
    assert (tmp_path / "downstream.png").stat().st_size > 10_000


def test_the_same_documents_are_compared_in_pairs(script):
    difference = script("downstream", "--results=").difference
    first = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    value, error, p = difference(first, 7 * [1.0] + 3 * [0.0])  # 4 better and 1 worse
    assert value == pytest.approx(0.3) and p == pytest.approx(2 * (1 + 5) / 2**5)
    assert error == pytest.approx(np.std([4 * [1] + [-1] + 5 * [0]], ddof=1) / 10**0.5)
    value, error, p = difference([1.0, 2.5, 0.5, 4.0], [1.1, 2.8, 0.7, 4.2])
    assert value == pytest.approx(0.2) and value / error == pytest.approx(4.899, abs=1e-3)
    assert p == pytest.approx(0.0163, abs=1e-4)  # of Student's t with 3 degrees of freedom
