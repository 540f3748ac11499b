"""Preparing a token store: the result doesn't depend on the number of processes or on kills."""

import fcntl
import json
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from diffeqformer.data import preparation
from diffeqformer.data.files import fingerprint, local_files
from diffeqformer.data.lock import only_process
from diffeqformer.data.store import open_store, read_about
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from helpers import ROOT, flip, toy_config
from runs import command

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Nine files of JSON lines, one of them slow, and the documents of each split."""
    folder, documents = tmp_path_factory.mktemp("corpus"), {"train": [], "validation": []}
    for i in range(9):
        split = "validation" if i == 8 else "train"
        texts = [f"file {i}, document {j}: naïve 🙂 " + "text " * (j % 50) for j in range(6000 if i == 4 else 60)]
        rows = [{"text": text, "other": j} for j, text in enumerate(texts)] + [{"text": " \n"}] * (i == 2)
        (folder / f"{split}-{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        documents[split] += texts
    return folder, documents


def options(corpus, stores) -> list[str]:
    folder, _ = corpus
    files = [f"--config.data.{split}_files={folder}/{split}-*.jsonl" for split in ("train", "validation")]
    return ["--config=configs/tiny.py", *files, f"--config.data.dir={stores}", "--config.data.processes=2"]


def run(corpus, stores, *more) -> subprocess.CompletedProcess:
    return command("prepare", *options(corpus, stores), *more)


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    """The store of an undisturbed preparation."""
    stores = tmp_path_factory.mktemp("stores")
    done = run(corpus, stores)
    assert done.returncode == 0, done.stderr
    assert "; 1 without any text left out" in done.stdout and "\n  written: 9/9 shards  6,480 documents" in done.stdout
    return stores / "python_stdlib-bytes"


@pytest.mark.long
def test_a_store_has_every_document_and_its_end(corpus, store):
    folder, documents = corpus
    data = toy_config(data__train_files=f"{folder}/train-*", data__validation_files=f"{folder}/validation-*").data
    splits = open_store(store, "bytes", 16, fingerprint(local_files(data)))
    for name, split in splits.items():
        ids = [i for text in documents[name] for i in [*TOKENIZER.encode(text), TOKENIZER.end_of_text]]
        np.testing.assert_array_equal(split.ids(0, split.size), ids)
        windows = split.windows(np.arange(split.size // 16), 16)  # some of them from two shards
        np.testing.assert_array_equal(windows.ravel(), ids[: windows.size])
        assert split.text_bytes == sum(len(text.encode()) for text in documents[name])
    assert len(read_about(store)["splits"]["train"]["shards"]) == 8
    done = run(corpus, store.parent)
    assert done.returncode == 0 and "there already, whole" in done.stdout
    other = run(corpus, store.parent, f"--config.data.train_files={folder}/train-0.jsonl")
    assert other.returncode == 1 and "was made from other text" in other.stderr and other.stdout == ""


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_finished(corpus, store, tmp_path):
    """A limit on file sizes simulates a full disk; only the largest shard exceeds it."""
    preparing = [sys.executable, "-m", "diffeqformer.prepare", *options(corpus, tmp_path)]
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "-", *preparing]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.search(r"File too large \(\d of 9 shards are finished and stay; the same command cont", done.stderr)
    partial, folder = tmp_path / "python_stdlib-bytes.partial", tmp_path / "python_stdlib-bytes"
    left = {path.stem: path.with_suffix("").stat().st_mtime_ns for path in partial.glob("*.bin.json")}
    assert "train-00000.bin" in left and not [path for path in partial.glob("*train-00004*")]
    assert run(corpus, tmp_path).returncode == 0
    assert all((folder / name).stat().st_mtime_ns == time for name, time in left.items())
    assert json.loads((folder / "store.json").read_text()) == json.loads((store / "store.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"python_stdlib-bytes", ".python_stdlib-bytes.partial.lock"}


@pytest.mark.long
@pytest.mark.parametrize(
    "content, sentence",
    [
        (b'{"text": ""}\n', "config.data.train_files: the train split has no text"),
        (b'{"text": "a"}\n{}\n', "broken.jsonl: line 2 isn't a JSON object"),
    ],
)
def test_broken_text_is_one_sentence(content, sentence, corpus, tmp_path):
    (tmp_path / "broken.jsonl").write_bytes(content)
    broken = [f"--config.data.train_files={tmp_path / 'broken.jsonl'}", "--config.data.processes=1"]
    done = run(corpus, tmp_path / "stores", *broken)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "stores" / "python_stdlib-bytes").exists()


@pytest.mark.parametrize("name, content, said", [("read.me", "{}\0", "byte 2 is 0"), ("a.jsonl", "{}", "line 1")])
def test_a_file_that_can_not_be_used_is_said_before_any_work(name, content, said, corpus, tmp_path):
    (tmp_path / name).write_text(content)
    data = toy_config(data__dir=str(tmp_path / "stores"), data__task="mine").data
    data.update(train_files=f"{corpus[0]}/train-*", validation_files=f"{tmp_path}/{name}")
    with mock.patch.object(preparation, "Worker", side_effect=AssertionError("no work")):
        with pytest.raises(UserError, match=f"{name}: {said}"):
            preparation.prepare(data, TOKENIZER)


def test_a_store_has_its_name_only_when_whole_and_verified(small_store, tmp_path):
    about = json.loads((small_store / "store.json").read_text())
    (small_store / "store.json").unlink()
    with mock.patch.object(preparation, "read_about", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        preparation.finish(small_store, tmp_path / "whole", about)
    assert not (tmp_path / "whole").exists()
    flip(small_store / "train-00002.bin", 10, 0)
    with pytest.raises(UserError, match="its content isn't what was written"):
        preparation.finish(small_store, tmp_path / "whole", about)
    assert not (tmp_path / "whole").exists()


def test_what_a_killed_worker_left_is_removed_before_the_next_begins(tmp_path, monkeypatch):
    (left := tmp_path / "python_stdlib-bytes.partial" / "train-00000.bin.partial-1").parent.mkdir()
    left.touch()
    monkeypatch.setattr(preparation, "_prepare", lambda *_: left.exists() and pytest.fail("it is still there"))
    preparation.prepare(toy_config(data__dir=str(tmp_path)).data, TOKENIZER)


def test_a_worker_that_is_killed_is_said_and_holds_the_lock(tmp_path):
    with only_process(tmp_path / "x.partial") as lock:
        worker = preparation.Worker({}, lock)
    with open(tmp_path / ".x.partial.lock") as another:
        with pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        worker.process.kill()
        with pytest.raises(UserError, match=r"ended with status -9 \(killed, perhaps because memory ran out\)$"):
            next(worker.answers())
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOSSY = ["A cat sees the red thing.", "A dog\nsees it.", "Кот.", "the odd thing", "A cat"]
"""One loses a newline, and one is made of an unknown id, whose rank in the model is 0, and a full stop."""


@pytest.mark.long
def test_what_the_tokenizer_loses_is_said_and_stored(lossy_file, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in 9 * LOSSY))
    (tmp_path / "b.jsonl").write_text(9 * (json.dumps({"text": LOSSY[0]}) + "\n"))
    done = command(
        "prepare", "--config=configs/tiny.py", f"--config.data.train_files={tmp_path}/a.jsonl",
        f"--config.data.validation_files={tmp_path}/b.jsonl", f"--config.data.dir={tmp_path}",
        "--config.data.tokenizer=sentencepiece", f"--config.data.tokenizer_file={lossy_file}",
        "--config.sequence_length=16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "  train: 9 unknown ids and 18 documents whose" in done.stdout
    [folder] = tmp_path.glob("python_stdlib-sentencepiece-*")
    splits = read_about(folder)["splits"]
    assert [(split["unknown"], split["altered"]) for split in splits.values()] == [(9, 18), (0, 0)]
    assert open_store(folder, folder.name.removeprefix("python_stdlib-"), 16, files=None)["train"].altered == 18
