"""An attack for each sentence of docs/security.md, by files that come from elsewhere."""

import base64
import gzip
import io
import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import types
import zlib

import fsspec
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath

from diffeqformer import data
from diffeqformer import evaluate as evaluation_command
from diffeqformer.analysis.report import Section, highlighted, paragraph, table
from diffeqformer.analysis.report import write as write_report
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints import folder as checkpoint_folder
from diffeqformer.console.results import check_links, results_folder, whole_numbers, write_text
from diffeqformer.console.terminal import PrintableOutput, json_line
from diffeqformer.data import files, tokenizers
from diffeqformer.data.files import matching_files
from diffeqformer.data.lock import only_process, only_run
from diffeqformer.data.remote import read_split, stage, upload
from diffeqformer.data.seals import sealed, unsealed
from diffeqformer.data.store import read_about
from diffeqformer.data.texts import CORPORA
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inspect import inspect_run
from diffeqformer.materialize import materialize
from diffeqformer.parallel import memory as device_memory
from diffeqformer.training.run import make_folder
from helpers import ROOT, lively_model, save_params, toy_config
from runs import command


def test_a_checkpoint_cannot_choose_a_module_to_import(monkeypatch):
    """A module runs code, so only the user's own option can name one."""
    imported = []
    texts = types.SimpleNamespace(splits=["validation"], fetch=lambda: None, documents=lambda split: ["a"])
    fake = types.SimpleNamespace(SourceTexts=lambda task: texts, configure=lambda name, _: imported.append(name))
    monkeypatch.setattr("diffeqformer.data.texts.import_tensorflow", lambda what: None)
    monkeypatch.setitem(sys.modules, "diffeqformer.data.tasks", fake)
    monkeypatch.setattr(data, "tasks", fake, raising=False)
    monkeypatch.setitem(CORPORA, "python_stdlib", lambda: texts)
    config = toy_config(data__task="mine", data__module="planted")
    opened = checkpoint.Checkpoint(3, config, lively_model("gpt"), ByteTokenizer(), checkpoint.About({}, "bytes"))

    def open_text(task, module):
        options = dict.fromkeys("files remote text_field separator".split())
        options = types.SimpleNamespace(**options, module=module, split="validation")
        evaluation_command.open_text(options, opened, task, None, None, 8, 8)

    with pytest.raises(UserError, match="^--module: .* 'mine' came from the module 'planted'; to import it, give"):
        open_text("mine", None)
    open_text("python_stdlib", None)
    assert not imported
    open_text("mine", "planted")
    assert imported == ["planted"]


@pytest.mark.parametrize("name", ["{tmp}/outside", "../outside", "..", "a\\b", "a\n", ""])
def test_a_store_names_no_file_outside_its_folder(name, small_store, tmp_path):
    """Neither a store at a URL, which would be written here, nor a local one, which would be read or uploaded."""
    name = name.format(tmp=tmp_path)
    about = json.loads((small_store / "store.json").read_text())
    about["splits"]["validation"]["shards"][0]["file"] = name
    memory = fsspec.filesystem("memory")
    upload(small_store, "memory://ninth/stores")
    memory.pipe_file("/ninth/stores/task/store.json", json.dumps(about).encode())
    if name:
        memory.pipe_file(f"/ninth/stores/task/{name}", (small_store / "validation-00000.bin").read_bytes())
    (small_store / "store.json").write_text(json.dumps(about))
    here, sentence = tmp_path / "here" / "task", "store.json: 'file' must be a plain file name, but it is "
    for act in (
        lambda: stage("memory://ninth/stores", here),
        lambda: read_about(small_store),
        lambda: upload(small_store, "memory://tenth/stores"),
    ):
        with pytest.raises(UserError, match=f"{sentence}{re.escape(repr(name))}; delete"):
            act()
    assert not memory.exists("/tenth") and not here.exists() and not list(tmp_path.rglob("outside"))
    memory.rm("/ninth", recursive=True)


@pytest.mark.parametrize("name", ["parameters.txt", "tensorboard/plugins/profile", "checkpoints/4"])
def test_a_work_folder_is_written_through_no_link(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "precious"
    (run / name).parent.mkdir(parents=True)
    target.write_text("mine")
    (run / name).symlink_to(target)
    for write in (
        lambda: make_folder(checkpoint.folder_of(run).parent),
        lambda: results_folder(None, str(run), *name.split("/")),
    ):
        with pytest.raises(UserError, match=f"^--workdir: {run / name} is a link, through which files elsewhere would"):
            write()
    assert target.read_text() == "mine" and len(list(run.rglob("*"))) <= 3
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    check_links(tmp_path / "link", "--workdir")
    called = tmp_path / "checkpoints"  # like a part of one, which is searched no deeper
    (called / "evaluation").mkdir(parents=True)
    (called / "evaluation" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"^--workdir: {called}/evaluation/link is a link"):
        make_folder(epath.Path(called))
    assert results_folder(None, str(run), "ode").is_dir()  # a link that isn't on the way doesn't matter


@pytest.mark.parametrize(
    "name", [".task.partial.lock", "task.partial/plan.json", "task.partial/train-00000.bin.partial"]
)
def test_an_unfinished_store_is_written_through_no_link(name, tmp_path):
    (partial := tmp_path / "task.partial").mkdir()
    (tmp_path / name).symlink_to(target := tmp_path / "precious")
    for there in (False, True):
        if there:
            target.write_text("mine")
        with pytest.raises(UserError, match=f"^config.data.dir: {tmp_path / name}"), only_process(partial):
            raise AssertionError("it was taken")
        assert target.exists() == there and (not there or target.read_text() == "mine")


def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(UserError, match=f"^--workdir: {tmp_path}/.lock: "), only_run(epath.Path(tmp_path)):
        raise AssertionError("it was taken")
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(UserError, match="text.txt isn't a file that can be read twice; write its text into one"):
        matching_files(str(tmp_path / "*.txt"), "config.data.train_files")


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "results.json").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "results.json", "ours")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "results.json").read_text() == "ours"


def test_no_control_character_reaches_a_terminal(tmp_path):
    output = io.StringIO()
    print("a\x1b[2J\r\n\té", "\x9b31m", file=PrintableOutput(output), flush=True)
    assert output.getvalue() == "a\ufffd[2J\ufffd\n\té \ufffd31m\n"

    config, name = toy_config("gpt"), "\x1b]0;title\x07"
    config.name = name
    save_params(tmp_path / "run", config, {1: {"token_embedding": jnp.ones((2, 2))}}, data_sha256=name)
    terminal, its_end = pty.openpty()
    inspecting = [sys.executable, "-m", "diffeqformer.inspect", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(inspecting, stdout=its_end, stderr=subprocess.PIPE, cwd=ROOT)
    shown = os.read(terminal, 2**16).decode()
    assert done.returncode == 0 and "\x1b" not in shown and "\ufffd]0;title\ufffd" in shown, done.stderr
    assert name in command("inspect", f"--workdir={tmp_path / 'run'}").stdout  # a pipe gets it as it is
    done = command("inspect", f"--workdir={tmp_path / 'run'}", "--step=\x1b[2J")
    assert done.returncode == 1 and "\x1b" not in done.stderr and "\ufffd[2J" in done.stderr
    assert json.loads(json_line({"a": "\x1b\x7f\U000e0001é"})) == {"a": "\x1b\x7f\U000e0001é"}
    assert json_line({"a": "\x7fé"}) == '{"a": "\\u007fé"}'


def test_a_small_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 10**6)
    for name, content, what in (
        ("lines.txt.gz", b"a\n" * 10**7, "a document"),
        ("line.jsonl.gz", b'{"text": "' + b"a" * 10**7 + b'"}', "a line"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=f"{name}: it has {what} of more than 1,000,000 bytes; cut it into several"):
            list(files.read_texts(tmp_path / name))
    monkeypatch.setattr(tokenizers, "LARGEST", 10**6)
    large, broken = (base64.b85encode(zlib.compress(data)).decode() for data in (bytes(10**7), bytes(range(256))))
    for saved in (large, broken[:-5]):
        with pytest.raises(ValueError, match="its tokenizer isn't whole, or has more than 1,000,000 bytes"):
            tokenizers.restore_tokenizer("gpt2", saved)
    (tmp_path / "many.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 10**5))
    assert sum(1 for _ in files.read_texts(tmp_path / "many.jsonl.gz")) == 10**5


def test_a_text_that_a_parquet_file_repeats_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A dozen kilobytes of Parquet hold a megabyte a million times."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 10**6, pa.int32()), pa.array(["a" * 2**20]))
    path = tmp_path / "repeated.parquet"
    pq.write_table(
        pa.table({"before": [{"a": 1, "b": 2}] * 10**6, "text": repeated}), path, compression="zstd", store_schema=False
    )
    assert path.stat().st_size < 20_000
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert len(list(itertools.islice(files.read_texts(path), 100))) == 100
        assert pool.max_memory() < 2**25
    finally:
        pa.set_memory_pool(usual)
    monkeypatch.setattr(files, "LARGEST", 10**6)
    with pytest.raises(UserError, match="texts from row 0 on have more than 1,000,000 bytes; cut them"):
        list(itertools.islice(files.read_texts(path), 1))


def test_arrays_are_compared_with_the_free_memory_before_they_are_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "free_on_host", lambda: 1000)
    with pytest.raises(UserError, match=r"its parameters would take 0\.\d GB, but 0.0 GB are free; use a machine with"):
        checkpoint.load(run)
    for read in (lambda: inspect_run(run), lambda: materialize(run, output=tmp_path / "small")):
        with pytest.raises(UserError, match=r"^params/.*: a part of it would take 0\.0 GB, but 0.0 GB are free"):
            read()


def test_numbers_in_lists_are_limited():
    with pytest.raises(UserError, match="^--num_steps: must be .* of at least 1, but it has '9999999999...'$"):
        whole_numbers("--num_steps", ["9" * 5000], 1)


def test_text_from_elsewhere_is_escaped_in_reports(tmp_path):
    write_report(tmp_path, "<script>title", {"<b>name": "<script>value"}, [Section("name", "<i>section", "", {}, {})])
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<b>name" not in page and "<i>section" not in page
    assert "&lt;script&gt;title" in page and "&lt;script&gt;value" in page
    assert "<script" not in paragraph("<script>") + table(["<script>"], [["<script>", 1.5]])
    assert "<script" not in highlighted(["<script>"], np.ones(1))


def test_arrays_of_another_checkpoint_are_refused(tmp_path):
    config = toy_config("gpt")
    with checkpoint.open_to_write(tmp_path, kept=2) as checkpoints:
        for step in (1, 2):
            about = checkpoint.About(config.to_dict(), "bytes")
            checkpoint.save(checkpoints, step, {"params": {"w": jnp.full(9, float(step))}, "step": jnp.int32(1)}, about)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "params")
    shutil.copytree(tmp_path / "checkpoints" / "1" / "params", tmp_path / "checkpoints" / "2" / "params")
    folder = checkpoint.folder_of(tmp_path)
    assert checkpoint.damage_of(folder, 1) is None
    assert "this checkpoint can't be read: params/w" in str(checkpoint.damage_of(folder, 2))


NESTED = "[" * 200_000


def test_records_and_texts_that_are_nested_too_deeply_are_refused(tmp_path, small_store):
    (small_store / "store.json").write_text(NESTED)
    with pytest.raises(UserError, match="store.json: this file of the token store can't be read"):
        read_about(small_store)
    (tmp_path / "text.jsonl").write_text(NESTED)
    with pytest.raises(UserError, match="text.jsonl: line 1 isn't a JSON object"):
        list(files.read_texts(tmp_path / "text.jsonl"))
    (metrics := tmp_path / "3" / "metrics").mkdir(parents=True)
    (metrics / "metrics").write_text(NESTED)
    with pytest.raises(checkpoint_folder.Damaged, match="this validation is damaged: it is nested too deeply"):
        checkpoint_folder.validation_of(epath.Path(tmp_path), 3)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "x"}, {"tokens": -1}, {"tokens": 10**6}, {"shards": 3}, {"sha256": 5},
        {"shards": [{"file": "train-00000.bin"}]},
    ],
)  # fmt: skip
def test_a_stores_record_of_another_form_is_refused(change, small_store):
    about = unsealed(json.loads((small_store / "store.json").read_text()))
    about["splits"]["train"] |= change
    content = json.dumps(about).encode()  # without a seal, as of an earlier version
    (small_store / "store.json").write_bytes(content)
    fsspec.filesystem("memory").pipe_file("/eleventh/stores/task/store.json", content)
    for read in (
        lambda: read_about(small_store),
        lambda: stage("memory://eleventh/stores", small_store.with_name("here") / "task"),
        lambda: read_split("memory://eleventh/stores", "task", "train"),
    ):
        with pytest.raises(UserError, match="task/store.json: this file of the token store can't be read; delete"):
            read()


def test_a_record_that_was_changed_is_refused(tmp_path):
    config = toy_config("gpt")
    save_params(tmp_path, config, {1: {"w": jnp.ones(2)}})
    [file] = (tmp_path / "checkpoints" / "1" / "about").glob("data.json")
    record = json.loads(file.read_text())
    whole = {name: value for name, value in record.items() if name not in ("sha256", "checksums")}
    models = ({"kind": "nope"}, {"solver": None}, {"heads": 0}, {"dtype": "int8"}, {"training_depths": "x"})
    others = [{"config": {**whole["config"], "model": {**whole["config"]["model"], **model}}} for model in models]
    configs = {}, {"name": 3}, {"name": "a", "model": []}
    origins = {"base": {"a": 1}}, {"base": "runs/base"}, {"materialized_from": {"workdir": 3, "step": 1}}
    wrong = *others, *origins, {"config": 3}, {"tokenizer": 7}, {"time_spent": {"steps": float("nan")}}
    for content in (*({"config": config} for config in configs), *wrong):
        file.write_text(json.dumps(sealed({**whole, **content})))  # with a seal of its own
        with pytest.raises(UserError, match="checkpoints/1: this checkpoint can't be read: (?!its content isn't what)"):
            checkpoint.load_config(tmp_path)
    file.write_text(json.dumps(whole | {"note": "of a later version"}))  # without a seal, as of the first
    assert checkpoint.load_config(tmp_path).to_dict() == config.to_dict()
    for change in ({"tokenizer": "gpt2"}, {"checksums": {"params/w": "other"}}, {"unknown": 1}, {"sha256": "0" * 64}):
        file.write_text(json.dumps(record | change))
        with pytest.raises(UserError, match="its content isn't what was saved, by its SHA-256"):
            checkpoint.load_config(tmp_path)
