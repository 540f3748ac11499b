"""The doctor's verdicts on given numbers, what it leaves behind, and the whole command. Nothing here is timed."""

import errno
import os

import jax
import pytest
from etils import epath

from diffeqformer import doctor
from diffeqformer.doctor import Needs, Row
from diffeqformer.errors import UserError
from diffeqformer.parallel.memory import bytes_of
from diffeqformer.training import utilisation
from diffeqformer.training.step import Program
from flags import for_a_process
from helpers import ONE_DEVICE, toy_config
from runs import command, finish, start_command

TINY = ("--config=tiny", "--config.mesh.fsdp=2", "--config.model.vocab_multiple=8")


def verdicts(rows):
    return [row.verdict for row in rows]


def test_packages_are_what_others_require(monkeypatch):
    assert verdicts(doctor.packages()) == ["ok"]
    found = doctor.version_of
    for name, version, asked in (
        ("jaxlib", "0.9.1", ", by jax"),
        ("libtpu", "0.0.1", ", by jax"),  # of an extra, so it may be absent
        ("numpy", "1.26.4", ">=2.0, by diffeqformer"),
    ):
        monkeypatch.setattr(doctor, "version_of", lambda of: version if of == name else found(of))
        rows = doctor.packages()
        assert {(row.what, row.found, row.verdict) for row in rows} == {(name, version, "wrong")}
        assert any(row.needed.endswith(asked) for row in rows) and f"pip install '{name}" in str(rows[0])


def test_a_process_that_is_unlike_process_0_is_named():
    one = {"Python": "3.11.7", "the code": "abc"}
    assert doctor.alike([one, one], "same") == ("same", "the same on all", "ok")
    found, _, verdict = doctor.alike([one, one, {**one, "the code": "abd"}], "same")
    assert verdict == "wrong" and found == "the code: abc on 0, abd on 2"


def test_a_clock_that_is_off_is_named_and_a_late_process_is_not():
    assert doctor.clocks([[100.0, 200.0], [103.0, 200.2]])[2] == "ok"  # it left one barrier late
    found, _, verdict = doctor.clocks([[100.0, 200.0], [90.0, 190.0], [100.1, 200.0]])
    assert verdict == "wrong" and found == "10.00 s apart, process 1 the furthest"


def test_rates_are_compared_with_what_is_known():
    peak = 197e12
    for slowest, verdict in ((0.61, "ok"), (0.59, "slow")):
        found = doctor.products([peak, slowest * peak], peak)
        assert found[2] == verdict and found[0].endswith("TFLOP/s on process 1")
    assert doctor.products([1e9], None)[2] == "unknown"
    assert [doctor.memory([9, 8], needed)[2] for needed in (8, 9, None)] == ["ok", "wrong", "unknown"]
    assert doctor.all_reduce([4e-3], 10_000_000, 4, 50e9)[2] == "slow"  # 15 MB through a link of 50 GB/s
    half, whole = {"write": 5e8, "read": 1e9}, {"write": 1e9, "read": 1e9}
    for way, needed, verdict in (("write", 1e9, "ok"), ("write", 1.1e9, "slow"), ("read", 2e9, "ok")):
        assert doctor.disk([half, whole], way, needed)[2] == verdict


def test_a_config_needs_room_for_all_checkpoints_that_are_there_at_once(monkeypatch):
    config = toy_config(checkpoints_kept=3, mesh__data=8, model__dtype="bfloat16")
    needs = doctor.needs_of(config, "new")
    params = bytes_of(jax.eval_shape(lambda: Program(config, needs.mesh).init(None))["params"])
    assert 3 * params <= needs.checkpoint < 3 * params + 100 and needs.checkpoints == 5 * needs.checkpoint
    assert needs.on_device <= needs.checkpoint and needs.read_rate is needs.write_rate is None
    monkeypatch.setattr(utilisation, "PEAKS", {"cpu": 1e12})
    needs, seconds = doctor.needs_of(config, "new"), utilisation.step_flops(config) / 8e12
    assert needs.read_rate == pytest.approx(2 * 8 * 16 / seconds)
    assert needs.write_rate == pytest.approx(needs.checkpoint / (100 * seconds))
    full = needs.checkpoints
    for free, there, verdict in ((full, 0, "ok"), (full - 1, 0, "wrong"), (full - 9, 9, "ok"), (2**63, 0, "ok")):
        assert doctor.room([[free, there]], needs)[2] == verdict


def test_a_disk_that_is_full_is_wrong_and_nothing_stays_on_it(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "FILE", 1000)
    assert doctor.disk_rates(tmp_path / "not" / "there").keys() == {"write", "read"} and not os.listdir(tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os, "fsync", lambda file: (_ for _ in ()).throw(full))
        rows = list(doctor.folders(str(tmp_path), str(tmp_path), Needs(ONE_DEVICE)))
    assert verdicts(rows) == ["wrong", "unknown", "unknown"] and "No space left on device" in rows[0].found
    with pytest.raises(UserError, match="^disk of --workdir: wrong; do what the table above says$"):
        doctor.report(rows)
    monkeypatch.setattr(doctor, "work_folder", lambda folder: epath.Path(tmp_path))  # in place of a bucket
    assert doctor.disk_rates("gs://bucket/run").keys() == {"write", "read"}
    monkeypatch.setattr(type(epath.Path(tmp_path)), "read_bytes", lambda self: b"other bytes")
    with pytest.raises(OSError, match="what was read isn't what was written"):
        doctor.disk_rates("gs://bucket/run")
    assert not os.listdir(tmp_path)


def test_the_store_that_a_config_names_must_be_there(tmp_path):
    config = toy_config(data__dir=str(tmp_path / "here"), data__remote=f"file://{tmp_path}/there")
    assert doctor.store(config, str(tmp_path)).verdict == "wrong"
    (tmp_path / "there" / "python_stdlib-bytes").mkdir(parents=True)
    assert doctor.store(config, str(tmp_path)).verdict == "wrong"
    (tmp_path / "there" / "python_stdlib-bytes" / "store.json").touch()
    assert doctor.store(config, str(tmp_path)).verdict == "ok"


def test_rows_are_printed_as_they_come_and_what_is_wrong_ends_with_a_sentence(capsys):
    def rows():
        yield Row("clocks", "0.1 s apart", "within 1 s", "ok", "not said")
        assert "clocks" in capsys.readouterr().out
        yield Row("slowest matmul", "1 TFLOP/s", "100", "slow", "look at the chip")

    doctor.report(rows())
    said = capsys.readouterr().out
    assert "look at the chip\nNothing is wrong, but this is slow: slowest matmul\n" in said and "not said" not in said
    with pytest.raises(UserError, match="^devices: wrong; do what the table above says$"):
        doctor.report([Row("devices", "", "", "wrong", "use others")])


@pytest.mark.long
@pytest.mark.parametrize("options", [(), (*TINY, "--undefok=verify", "--noverify")], ids=["alone", "config"])
def test_the_command_examines_a_machine(options, tmp_path):
    given = [*options, f"--workdir={tmp_path / 'run'}", *[f"--config.data.dir={tmp_path}"] * bool(options)]
    done = command("doctor", *given, environment={"XLA_FLAGS": for_a_process(4)})
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    checks = ["check", "packages", "devices", "memory of devices", "slowest matmul", "all-reduce over "]
    checks += ["all-reduce over fsdp"] * bool(options) + ["disk of --workdir", "room for checkpoints"]
    checks += ["disk of config.data.dir"] * bool(options)
    assert [line[9:].startswith(check) for line, check in zip(lines, checks, strict=False)] == [True] * len(checks)
    assert lines[len(checks)] == "Nothing is wrong" and not os.listdir(tmp_path)


def test_an_error_of_the_config_is_a_sentence(tmp_path):
    done = command("doctor", "--config=tiny", "--config.mesh.fsdp=3", f"--workdir={tmp_path}")
    assert done.returncode == 1 and done.stderr.startswith("diffeqformer: config.mesh: data x fsdp x tensor must make")


@pytest.mark.slow
def test_two_processes_are_compared(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    options = [*TINY, f"--config.data.dir={tmp_path}"]
    (said, errors), (second, _) = finish(start_command("doctor", 2, 2, [[*options, f"--workdir={tmp_path}"]] * 2))
    assert "\nok       versions of processes" in said and "\nok       clocks of processes" in said
    assert "ok       devices                    4 x cpu" in said
    assert said.endswith("Nothing is wrong\n") and second == errors == ""
    apart = [[*options, f"--workdir={tmp_path / name}"] for name in "ab"]
    for _, errors in finish(start_command("doctor", 2, 2, apart), 1):
        assert errors == "diffeqformer: disk of --workdir: wrong; do what the table above says\n"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and not os.listdir(tmp_path / "a")
