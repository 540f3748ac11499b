"""What the experiments share: rows side by side, files of results, reports."""

import json
import sys

import pytest


@pytest.fixture
def shared(script, tmp_path):
    """The module common.py, with the options of a study."""
    script("training_times", f"--results={tmp_path / 'new' / 'results.json'}", "--at_once=1")
    return sys.modules["common"]


def test_nothing_is_begun_after_a_failure(shared, capsys):
    begun, done = [], []

    def work(item, cores):
        begun.append((item, cores))
        return 1 / item if item else sys.exit("no such item")

    with pytest.raises(SystemExit):
        shared.side_by_side([2, 4, 0, 5], work, lambda *found: done.append(found), 1)
    assert begun == [(2, None), (4, None), (0, None)] and done == [(2, 0.5), (4, 0.25)]
    assert capsys.readouterr().err == "no such item\n"
    with pytest.raises(ZeroDivisionError):
        shared.side_by_side([2, 0, 5], work, lambda item, _: 1 / (item - 2), 1)
    assert begun[3:] == [(2, None)]


def test_processes_that_share_a_file_of_results_lose_none(shared):
    path, begun = shared.results_file(), []

    def work(row, cores):
        begun.append(row)
        if row == "a":  # while another process works on the others
            shared.add_results(path, {"b": {"by": "another"}, "d": {"by": "another"}})
        return {"by": "this"}

    found = shared.run_rows(["a", "b", "c"], str, work)
    assert begun == ["a", "c"] and found == json.loads(path.read_text())
    assert {row: found[row]["by"] for row in "abcd"} == dict(a="this", b="another", c="this", d="another")
