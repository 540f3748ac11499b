"""What the experiments share: rows side by side, files of results, reports."""

import concurrent.futures
import contextlib
import json
import pathlib
import sys
import threading
import types

import jax
import pytest

from helpers import drawn, toy_config


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


def test_two_that_add_results_at_once_wait_for_one_another(shared, monkeypatch):
    write, both = shared.write_json, threading.Barrier(2)

    def slowly(path, results):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)  # in vain, unless both have read the file before either writes
        write(path, results)

    monkeypatch.setattr(shared, "write_json", slowly)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda row: shared.add_results(shared.results_file(), {row: {}}), "ab"))
    assert json.loads(shared.results_file().read_text()) == {"a": {}, "b": {}}


def test_runs_side_by_side_divide_the_cores(shared, monkeypatch):
    at_once, found = threading.Barrier(2, timeout=60), {}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/taskset")
    shared.side_by_side("ab", lambda item, cores: (at_once.wait(), cores)[1], found.__setitem__, 2)
    assert sorted(found.values()) == [[3, 6], [5]]
    assert shared.on_cores(["train"], [3, 6]) == ["taskset", "--cpu-list", "3,6", "train"]
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SystemExit, match="^--at_once: must be 1 here, because only Linux with taskset"):
        shared.parts_of_cores(2)


def test_the_output_of_a_training_is_kept_and_its_failure_is_said(shared, monkeypatch, tmp_path):
    commands, popen = [], shared.subprocess.Popen

    def start(command, **options):
        commands.append(command)
        return popen([sys.executable, "-c", f"print('step 1'); raise SystemExit({'fails' in command[-1]})"], **options)

    monkeypatch.setattr(shared.subprocess, "Popen", start)
    for _ in range(2):
        shared.train(tmp_path / "new" / "run", ["--config=tiny"])
    assert commands[0][1:] == ["-m", "diffeqformer.main", "--config=tiny", f"--workdir={tmp_path}/new/run"]
    assert (tmp_path / "new" / "run.log").read_text() == "step 1\n" * 2
    with pytest.raises(SystemExit, match="fails ended with status 1; see above, and run the same command again"):
        shared.train(tmp_path / "fails", [])


def test_the_parameters_of_a_run_are_counted(shared, run):
    params = drawn(toy_config(model__max_length=64).model)[1]
    assert shared.number_of_parameters(run) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_a_report_is_written_anew_and_its_failure_is_said(shared, monkeypatch, tmp_path):
    def run(command, **_):
        output = pathlib.Path(command[-2].removeprefix("--output="))
        output.mkdir()
        (output / "results.json").write_text(json.dumps(command[1:3] + command[-1:]))
        return types.SimpleNamespace(returncode="--fails" in command, stderr="no run\n")

    monkeypatch.setattr(shared, "subprocess", types.SimpleNamespace(run=run, DEVNULL=None, PIPE=None))
    (tmp_path / "scores").mkdir()  # of an interrupted report
    assert shared.report("evaluate", tmp_path, "scores", ["--long"]) == ["-m", "diffeqformer.evaluate", "--long"]
    with pytest.raises(SystemExit, match="diffeqformer.evaluate failed: no run$"):
        shared.report("evaluate", tmp_path, "scores", ["--fails"])
