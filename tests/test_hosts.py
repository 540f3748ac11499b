"""Several processes train like one, stop together, and resume with a different number of processes."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from unittest import mock

import jax
import numpy as np
import pytest
from huggingface import CONFIGS, arrays_of, write_folder

from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.seals import sealed, unsealed
from diffeqformer.errors import UserError
from diffeqformer.parallel import hosts
from runs import curves, finish, start, start_command

FORTY = ("--config.steps=40", "--config.eval_every=40", "--config.model.training_depths=1,2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, short_stores):
    """The folder of a run of one process."""
    workdir = tmp_path_factory.mktemp("alone")
    finish(start(1, 1, [workdir], short_stores, *FORTY))
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops, processes, devices, mesh, says",
    [
        ((1,), 2, 2, ("--config.mesh.fsdp=2", "--config.mesh.tensor=2"), "data 1, fsdp 2, tensor 2"),
        ((5, 1), 4, 1, ("--config.mesh.data=-1",), "data 4 (generator in 4 parts), fsdp 1, tensor 1"),
    ],
)
def test_two_processes_stop_together_and_others_go_on(
    stops, processes, devices, mesh, says, alone, tmp_path, short_stores
):
    """With the losses of one process. The notice reaches only the second of two, at the first step, or twice."""
    many, stopped = [tmp_path / "many"] * processes, 0
    for told in stops:  # steps after the start
        running = start(2, 2, many[:2], short_stores, "--config.mesh.fsdp=4", *FORTY)
        for line in running[0].stdout:
            if line.startswith(f"step {stopped + told}/"):
                running[1].send_signal(signal.SIGTERM)
                break
        (_, errors), (second, _) = finish(running, 143)
        assert "told to stop, and saved at step" in errors and second == ""
        before, stopped = stopped, int(errors.split("saved at step ")[1].split()[0])
        assert before + told <= stopped < 40

    said = finish(start(processes, devices, many, short_stores, *mesh, *FORTY))
    assert f"from its checkpoint at step {stopped}" in said[0][0] and f"mesh: {says}" in said[0][0]
    assert "--- sample ---" in said[0][0] and all(output == "" for output, _ in said[1:])
    one, several = curves(alone), curves(tmp_path / "many")
    for tag, count in (("train/loss", 40), ("validation/loss", 1)):
        assert one[tag].keys() == several[tag].keys() and len(one[tag]) == count
        np.testing.assert_allclose([several[tag][step] for step in one[tag]], list(one[tag].values()), rtol=2e-4)


@pytest.mark.slow
def test_two_processes_fine_tune_adapters_as_one_does(tmp_path, short_stores):
    """Beside a teacher, and after both were killed between the frozen weights and the first checkpoint."""
    base, many = tmp_path / "base", [tmp_path / "many"] * 2
    finish(start(1, 1, [base], short_stores, "--config.steps=2"))
    options = [f"--config.base={base}", "--config.steps=6", "--config.eval_every=6", "--config.model.lora_rank=2"]
    options += ["--config.teacher_weight=0.5"]
    finish(start(1, 1, [tmp_path / "alone"], short_stores, *options))
    endless = ["--config.checkpoint_every=9999", "--config.steps=9999"]
    running = start(2, 1, many, short_stores, "--config.mesh.fsdp=2", *options, *endless)
    for line in running[0].stdout:
        if line.startswith("step 1/"):
            for process in running:
                process.kill()
            break
    finish(running, -signal.SIGKILL)
    assert (many[0] / "frozen" / "0").is_dir() and not list((many[0] / "checkpoints").iterdir())
    [(output, _), _] = finish(start(2, 1, many, short_stores, "--config.mesh.fsdp=2", *options))
    assert f"beginning with {base} at step 2" in output and " train), 2 layers, on 2 x cpu" in output
    one, several = curves(tmp_path / "alone"), curves(many[0])
    assert set(one["train/loss"]) == set(range(1, 7)) and set(one["validation/loss"]) == {0, 6}
    for tag in ("train/loss", "validation/loss"):
        np.testing.assert_allclose([several[tag][step] for step in one[tag]], list(one[tag].values()), rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, options",
    [
        ("evaluate", ["--num_steps=2,3", "--solver=euler,heun", "--batch_size=8"]),
        ("generate", ["--prompt=def f", "--tokens=12", "--samples=3"]),
        ("downstream", ["--include=tests/data/tasks", "--tasks=piqa,last_word,pages", "--shots=0,1"]),
    ],
)
def test_two_processes_score_and_write_as_one(module, options, tmp_path, run):
    """On two devices each, which divide the hypernetwork. Only process 0 has the text, and only it prints."""
    options = [*options, f"--workdir={run}"]
    if module == "evaluate":
        (tmp_path / "text.txt").write_text("def a(b):\n    return b\n" * 20)
        options.append(f"--files={tmp_path / 'text.txt'}")
    outputs = [[] if module == "generate" else [f"--output={tmp_path / name}"] for name in ("one", "two")]
    [(alone, _)] = finish(start_command(module, 1, 1, [options + outputs[0]]))
    (both, _), (second, errors) = finish(start_command(module, 2, 2, [options + outputs[1]] * 2))
    assert second == errors == ""
    if module == "generate":
        assert both == alone
        return
    one, two = (parts(json.loads((tmp_path / name / "results.json").read_text())) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for place, value in one.items():
        assert value == (pytest.approx(two[place], rel=1e-5) if isinstance(value, float) else two[place]), place


def parts(results: dict) -> dict[str, object]:
    """All values of results by their places, but for what depends on the time or the machine."""
    found = {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(results)}
    return {place: value for place, value in found.items() if not re.search("'(seconds|device|millisec.*)'", place)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--kind=diffeqformer"]])
def test_two_processes_import_as_one_and_each_reads_its_own_rows(kind, tmp_path):
    """A number that isn't finite is found by the process that reads it alone."""
    arrays, *_ = arrays_of("llama3")
    folder, one, two = (tmp_path / name for name in ("folder", "one", "two"))
    write_folder(folder, arrays, CONFIGS["llama3"])
    options = [f"--from={folder}", *kind]
    [(alone, _)] = finish(start_command("import_model", 1, 1, [[*options, f"--workdir={one}"]]))
    (both, _), (second, errors) = finish(start_command("import_model", 2, 2, [[*options, f"--workdir={two}"]] * 2))
    assert second == errors == "" and both.splitlines()[:3] == alone.splitlines()[:3]
    assert checkpoint.open_to_read(one).about.checksums == checkpoint.open_to_read(two).about.checksums
    arrays["model.layers.1.mlp.up_proj.weight"][:, -1] = np.nan  # the last row of ours
    write_folder(folder, arrays, CONFIGS["llama3"])
    shutil.rmtree(two)
    (_, first), (_, second) = finish(start_command("import_model", 2, 2, [[*options, f"--workdir={two}"]] * 2), 1)
    assert "model.layers.1.mlp.up_proj.weight has numbers that are NaN" in second and not two.exists()
    assert first == "diffeqformer: the weights: process 1 failed; see its message\n"


@pytest.mark.long
def test_a_work_folder_that_is_not_shared_is_refused(tmp_path, short_stores):
    for _, errors in finish(start(2, 1, [tmp_path / "a", tmp_path / "b"], short_stores), 1):
        assert "not the same on process 1 as on process 0; use a folder on a disk that all hosts share" in errors


@pytest.mark.long
def test_what_one_process_can_not_do_ends_all(tmp_path, short_stores):
    damaged = shutil.copytree(short_stores, tmp_path / "damaged")
    os.truncate(damaged / "python_stdlib-bytes" / "validation-00000.bin", 100)
    last = [f"--config.data.dir={damaged}"]
    (_, first), (_, second) = finish(start(2, 1, [tmp_path / "run"] * 2, short_stores, last=last), 1)
    assert first == "diffeqformer: the token store: process 1 failed; see its message\n"
    assert second.startswith(f"diffeqformer: {damaged}") and second.count("\n") == 1


@pytest.mark.long
def test_processes_with_other_options_are_refused(tmp_path, short_stores):
    last = ["--config.seed=3", f"--config.data.dir={shutil.copytree(short_stores, tmp_path / 'stores')}"]
    for _, errors in finish(start(2, 1, [tmp_path / "run"] * 2, short_stores, last=last), 1):
        assert errors.startswith("diffeqformer: config.seed: not the same on process 1 as") and errors.count("\n") == 1


@pytest.mark.long
def test_a_process_that_never_arrives_is_said(tmp_path, short_stores):
    [(_, errors)] = finish(start(2, 1, [tmp_path], short_stores, "--join_timeout=3"), 1)
    assert "waited 3 s, and not all of the 2 processes arrived" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("options", [("host:1", None, None), ("host:1", 2, 2), ("host", 2, 0)])
def test_options_that_do_not_fit_together_are_refused(options):
    with pytest.raises(UserError, match="^--coordinator, --"):
        hosts.connect(*options, timeout=1)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_asks_for_a_checkpoint_unless_it_is_ignored(name, capfd):
    """Again and again, as a closed terminal sends two; but a second Ctrl-C interrupts."""
    number = signal.Signals[name]
    before = signal.signal(number, signal.default_int_handler)
    try:
        with hosts.Notice() as notice:
            signal.raise_signal(number)
            assert notice.now(False) and notice.status == 128 + number
            with pytest.raises(KeyboardInterrupt) if name == "SIGINT" else nullcontext():
                signal.raise_signal(number)
        assert signal.getsignal(number) == signal.default_int_handler
        assert ("Ctrl-C again stops without one" in capfd.readouterr().err) == (name == "SIGINT")
        signal.signal(number, signal.SIG_IGN)  # by nohup, or a shell's background job
        with hosts.Notice() as notice:
            signal.raise_signal(number)
            assert not notice.now(False)
    finally:
        signal.signal(number, before)


def test_an_output_that_is_lost_asks_for_a_checkpoint(monkeypatch):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    with hosts.Notice() as notice:
        print("is only kept for later")
        assert not notice.now(False)
        for _ in range(2):
            print("is written", flush=True)
        assert notice.now(False) and notice.status == 141
        assert notice.why == "the output can't be written: No space left on device"
    monkeypatch.setattr(sys, "stdout", None)  # as after >&-
    with hosts.Notice() as notice:
        print("nowhere", flush=True)
        assert not notice.now(False)


@pytest.mark.parametrize("wait, heard", [(False, [False, True]), (True, [True, True])])
def test_hosts_agree_on_a_notice_one_step_late_unless_they_wait_anyway(wait, heard, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with hosts.Notice() as notice:
        assert not notice.now(True)
        signal.raise_signal(signal.SIGTERM)
        assert [notice.now(wait), notice.now(wait)] == heard


def test_a_process_that_lost_another_one_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "connect", mock.Mock())
    monkeypatch.setattr(hosts, "leave", lambda *of: said.append(of))
    with hosts.joined(mock.Mock()):
        raise RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    assert said == [(1, "process 0 of 2 failed: it lost another one; start all of them again")]


@pytest.mark.slow
def test_two_processes_go_back_together_from_a_damaged_checkpoint(tmp_path, short_stores):
    finish(start(2, 1, [tmp_path] * 2, short_stores))
    [file] = (tmp_path / "checkpoints" / "24" / "about").glob("data.json")
    record = unsealed(json.loads(file.read_text()))
    [moment] = (name for name in record["checksums"] if name.endswith("/mu/token_embedding"))
    record["checksums"][moment] = 16 * "0"  # as if these had been others
    file.write_text(json.dumps(sealed(record)))
    expected = curves(tmp_path)["train/loss"][24]
    [(output, _), _] = finish(start(2, 1, [tmp_path] * 2, short_stores))
    assert f"24: this checkpoint can't be read: {moment} isn't what was saved" in output
    assert f"by its checksum; it is now {tmp_path}/damaged/24, and the one before it is taken" in output
    assert "from its checkpoint at step 20" in output and curves(tmp_path)["train/loss"][24] == expected

    for path in (tmp_path / "checkpoints" / "24" / "params" / "d").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    unread = "24: this checkpoint can't be read: .*; it is now .*; start again to go on from the one before it"
    running = start(2, 1, [tmp_path] * 2, short_stores)
    messages = [process.communicate(timeout=300)[1] for process in running]
    assert all(process.returncode for process in running) and (tmp_path / "damaged" / "24-2").is_dir()
    assert any(re.search(unread, errors) for errors in messages)
    [(output, _), _] = finish(start(2, 1, [tmp_path] * 2, short_stores))
    assert "from its checkpoint at step 20" in output and curves(tmp_path)["train/loss"][24] == expected
