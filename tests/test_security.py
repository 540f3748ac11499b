"""An attack for each sentence of docs/security.md, by files that come from elsewhere."""

import gzip
import io
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import types

import fsspec
import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffeqformer import checkpoint, data
from diffeqformer import evaluate as evaluation_command
from diffeqformer.console.results import check_links, results_folder, write_text
from diffeqformer.console.terminal import PrintableOutput, json_line
from diffeqformer.data import files, tokenizers
from diffeqformer.data.remote import stage, upload
from diffeqformer.data.seals import sealed
from diffeqformer.data.store import read_about, verify
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inspect import inspect_run
from diffeqformer.parallel import memory as device_memory
from diffeqformer.training.run import make_folder
from helpers import ROOT, lively_model, toy_config
from runs import command


def test_a_checkpoint_cannot_choose_a_module_to_import(monkeypatch):
    """A module runs code, so only the user's own option can name one."""
    imported, fake = [], types.SimpleNamespace(CORPORA={"python_stdlib": ...}, Evaluation=lambda *arguments: arguments)
    fake.configure = lambda module, _: imported.append(module)
    monkeypatch.setattr("diffeqformer.data.quiet.import_tensorflow", lambda: None)
    for name in ("diffeqformer.data.tasks", "diffeqformer.inference.perplexity"):  # which import TensorFlow
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(data, "tasks", fake, raising=False)
    config = toy_config(data__task="mine", data__module="planted")
    opened = checkpoint.Checkpoint(3, config, lively_model("gpt"), ByteTokenizer(), checkpoint.About({}, "bytes"))

    def open_text(task, module):
        options = types.SimpleNamespace(module=module, tfds_dir=None, split="validation", files=None, remote=None)
        evaluation_command.open_text(options, opened, task, None, 8, 8)
        return imported.pop()

    with pytest.raises(
        UserError, match="^--module: .* 'mine' came from the module 'planted'; to import it, give --module="
    ):
        open_text("mine", None)
    assert not imported and open_text("python_stdlib", None) == "" and open_text("mine", "planted") == "planted"


@pytest.mark.parametrize("name", ["{tmp}/outside", "../outside", "..", ".hidden", "a/b", "a\\b", "a\n", ""])
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
        lambda: verify(small_store, about),
        lambda: upload(small_store, "memory://tenth/stores"),
    ):
        with pytest.raises(UserError, match=f"{sentence}{re.escape(repr(name))}; delete"):
            act()
    assert not memory.exists("/tenth") and not here.exists() and not list(tmp_path.rglob("outside"))
    memory.rm("/ninth", recursive=True)


@pytest.mark.parametrize(
    "name", ["parameters.txt", ".lock", "checkpoints", "tensorboard/plugins/profile", "checkpoints/4", "evaluation"]
)
def test_a_work_folder_is_written_through_no_link(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "precious"
    (run / name).parent.mkdir(parents=True)
    target.write_text("mine")
    (run / name).symlink_to(target)
    for write in (lambda: make_folder(checkpoint.folder_of(run).parent), lambda: results_folder(None, str(run), "ode")):
        with pytest.raises(UserError, match=f"^--workdir: {run / name} is a link, through which files elsewhere would"):
            write()
    assert target.read_text() == "mine" and len(list(run.rglob("*"))) <= 3
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    check_links(tmp_path / "link", "--workdir")


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
    about = checkpoint.About(config.to_dict(), "bytes", data_sha256=name)
    with checkpoint.open_checkpoints(tmp_path / "run", kept=1) as manager:
        checkpoint.save(manager, 1, {"params": {"token_embedding": jnp.ones((2, 2))}}, about)
    terminal, its_end = pty.openpty()
    inspecting = [sys.executable, "-m", "diffeqformer.inspect", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(inspecting, stdout=its_end, stderr=subprocess.PIPE, cwd=ROOT)
    shown = os.read(terminal, 2**16).decode()
    assert done.returncode == 0 and "\x1b" not in shown and "\ufffd]0;title\ufffd" in shown, done.stderr
    for options in (["--workdir=\x1b[2J"], ["--step=\x1b[2J", "--workdir=x"], ["--workdir=x", "\x1b[2J"]):
        done = command("inspect", *options)
        assert done.returncode == 1 and "\x1b" not in done.stderr and "\ufffd[2J" in done.stderr
    assert json.loads(json_line({"a": "\x1b\x7f\U000e0001é"})) == {"a": "\x1b\x7f\U000e0001é"}
    assert json_line({"a": "\x7fé"}) == '{"a": "\\u007fé"}'


def test_a_small_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 10**6)
    for name, content, what in (
        ("line.txt.gz", b"a" * 10**7, "a document"),
        ("lines.txt.gz", b"a\n" * 10**7, "a document"),
        ("line.jsonl.gz", b'{"text": "' + b"a" * 10**7 + b'"}', "a line"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=f"{name}: it has {what} of more than 1,000,000 bytes; cut it into several"):
            list(files.read_texts(tmp_path / name))
    monkeypatch.setattr(tokenizers, "LARGEST", 10**6)
    for saved in (tokenizers._pack(bytes(10**7)), tokenizers._pack(bytes(range(256)))[:-5]):
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
        files.pick_texts(path, [3])


def test_arrays_are_compared_with_the_free_memory_before_they_are_read(run, monkeypatch):
    monkeypatch.setattr(device_memory, "free_on_host", lambda: 1000)
    with pytest.raises(UserError, match=r"its parameters would take 0\.\d GB, but 0.0 GB are free; use a machine with"):
        checkpoint.load(run)
    with pytest.raises(UserError, match=r"^params/.*: a part of it would take 0\.0 GB, but 0.0 GB are free"):
        inspect_run(run)


def test_a_record_that_was_changed_is_refused(tmp_path):
    config = toy_config("gpt")
    with checkpoint.open_checkpoints(tmp_path, kept=1) as manager:
        checkpoint.save(manager, 1, {"params": {"w": jnp.ones(2)}}, checkpoint.About(config.to_dict(), "bytes"))
    [file] = (tmp_path / "checkpoints" / "1" / "about").glob("metadata")
    whole = json.loads(file.read_text())
    del whole["checksums"]
    for content in ({"config": {}}, {"config": {"name": 3}}, {"config": {"name": "a", "model": []}}, {"tokenizer": 7}):
        file.write_text(json.dumps(sealed({**whole, **content})))  # with a seal of its own
        with pytest.raises(UserError, match="checkpoints/1: this checkpoint can't be read: "):
            checkpoint.load_config(tmp_path)
    for change in ({"tokenizer": "gpt2"}, {"checksums": {"params/w": "other"}}, {"unknown": 1}, {"sha256": "0" * 64}):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match="its content isn't what was saved, by its SHA-256"):
            checkpoint.load_config(tmp_path)
