"""Token store: batches are a pure function of seed and step, and anything broken is rejected."""

import contextlib
import json
import queue
import shutil
import threading
from unittest import mock

import fsspec
import numpy as np
import pytest

from diffeqformer import prepare
from diffeqformer.data import lock
from diffeqformer.data.lock import only_process
from diffeqformer.data.preparation import open_prepared
from diffeqformer.data.remote import check_writable, stage, upload
from diffeqformer.data.seals import sealed
from diffeqformer.data.store import Split, open_store, read_about, verify
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from helpers import TEXTS, flip, make_store, toy_config

TOKENIZER = ByteTokenizer()


def test_the_order_of_windows_stays_what_it_was_for_every_seed():
    """Runs that are resumed with a later version go on with it. Every epoch has all windows; a batch may span two."""
    eight = Split((np.arange(8 * 4, dtype=np.uint16),), 1, "")
    found = [eight.batch(step, 3, 4, seed=5)[:, 0] // 4 for step in range(8)]
    orders = [np.random.RandomState([5, epoch]).permutation(8) for epoch in range(3)]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(orders))


def test_hosts_read_the_parts_of_one_global_batch(small_store):
    split, hosts = open_store(small_store, "bytes", 8)["train"], 4
    last = split.size // 8 // 8  # a step whose batch spans two epochs
    for step in (0, last):
        parts = [split.batch(step, 8, 8, 0, rows=slice(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(parts), split.batch(step, 8, 8, 0))
    for read in (split.evaluation_batch, split.evaluated):
        parts = [read(last, 8, 8, rows=slice(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(parts), read(last, 8, 8))


@pytest.mark.parametrize(
    "file, damage, sentence",
    [
        ("store.json", lambda text: text.replace('"bytes"', '"gpt2"', 1), "made with tokenizer 'gpt2'"),
        ("store.json", lambda text: text.replace('"python_stdlib"', '"openwebtext"'), "made from other text"),
        ("store.json", lambda text: text.replace('"format": 2', '"format": 99'), "has format 99"),
        ("store.json", None, "there is no whole token store here; delete"),
        ("train-00002.bin", lambda text: text[:10], r"train-00002\.bin: .*has 10 bytes instead of "),
        ("validation-00000.bin", None, r"validation-00000\.bin: .*has 0 bytes instead of "),
    ],
)
def test_a_broken_store_is_refused(small_store, file, damage, sentence):
    if damage:
        (small_store / file).write_bytes(damage((small_store / file).read_bytes().decode("latin-1")).encode("latin-1"))
    else:
        (small_store / file).unlink()
    with pytest.raises(UserError, match=sentence):
        open_store(small_store, "bytes", 8, task="python_stdlib")


def test_a_split_of_exactly_one_window_is_enough(small_store):
    tokens = read_about(small_store)["splits"]["validation"]["tokens"]
    open_store(small_store, "bytes", tokens)
    with pytest.raises(UserError, match="^config.sequence_length"):
        open_store(small_store, "bytes", tokens + 1)


def test_a_changed_store_is_found_by_its_hashes(small_store):
    verify(small_store, read_about(small_store), TOKENIZER.vocab_size)
    with pytest.raises(UserError, match="it holds the id 256"):
        verify(small_store, read_about(small_store), 256)
    about = read_about(small_store)
    about["splits"]["train"]["shards"].reverse()
    with pytest.raises(UserError, match="its shards aren't those of one text in order"):
        verify(small_store, about)
    flip(small_store / "train-00002.bin", 10, 0)
    with pytest.raises(UserError, match="train-00002.bin: its content isn't what was written"):
        verify(small_store, read_about(small_store))  # its size is right


def test_a_changed_record_does_not_fit_its_seal(small_store):
    record = read_about(small_store)
    changed = json.dumps(sealed(record)).replace(record["splits"]["train"]["sha256"], 64 * "0")
    (small_store / "store.json").write_text(changed)
    with pytest.raises(UserError, match="store.json: .* can't be read"):
        read_about(small_store)


def test_a_store_goes_to_a_url_and_comes_back(small_store, tmp_path):
    remote, memory = "memory://bucket/stores", fsspec.filesystem("memory")
    here = tmp_path / "elsewhere" / "task"
    upload(small_store, remote)
    stage(remote, here)
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in small_store.iterdir())
    assert all((here / path.name).read_bytes() == path.read_bytes() for path in small_store.glob("*.bin"))
    assert list(here.parent.glob("[!.]*")) == [here]

    damaged = tmp_path / "damaged" / "task"
    whole = memory.cat_file("/bucket/stores/task/train-00002.bin")
    memory.pipe_file("/bucket/stores/task/train-00002.bin", b"??")
    with pytest.raises(UserError, match="train-00002.bin: its content isn't what was written"):
        stage(remote, damaged)
    finished = damaged.with_name("task.copying") / "train-00000.bin"
    before = finished.stat().st_mtime_ns
    assert not damaged.exists()
    memory.pipe_file("/bucket/stores/task/train-00002.bin", whole)
    stage(remote, damaged)  # goes on from what was copied
    assert (damaged / "train-00000.bin").stat().st_mtime_ns == before


def test_another_store_is_never_replaced_at_a_url_but_in_an_unfinished_copy_here(small_store, tmp_path):
    remote, here, memory = "memory://other/stores", tmp_path / "here" / "task", fsspec.filesystem("memory")
    changed = [text.replace("document", "DOCUMENT") for text in TEXTS]
    make_store(tmp_path / "new" / "task", {"train": [changed[:40], [], changed[40:]], "validation": [changed[:5]]})

    def put_file(path, there):  # a record that came before its shards would stay
        if not path.endswith("store.json"):
            raise OSError("the network is gone")
        memory.pipe_file(there, b"")

    with mock.patch.object(type(memory), "put_file", side_effect=put_file):
        with pytest.raises(UserError, match="can't be written: the network is gone"):
            upload(small_store, remote)
    with pytest.raises(UserError, match="there is no token store"):
        stage(remote, here)
    upload(small_store, remote)
    with pytest.raises(UserError, match="a token store with other content"):
        upload(tmp_path / "new" / "task", remote)
    path, before = small_store / "store.json", (small_store / "store.json").read_text()
    path.write_text(before.replace("made up", "local files elsewhere"))
    upload(small_store, remote)  # has the same ids
    assert memory.cat_file("/other/stores/task/store.json") == before.encode()
    shutil.copytree(tmp_path / "new" / "task", here.with_name("task.copying"))  # of another store
    stage(remote, here)
    verify(here, read_about(here))
    assert (here / "store.json").read_text() == before


def test_a_url_is_asked_before_the_work_of_preparing_and_its_store_needs_no_text(tmp_path):
    store = tmp_path / "python_stdlib-bytes"
    make_store(store, {"train": [TEXTS], "validation": [TEXTS[:5]]}, files="fingerprint")
    upload(store, "memory://fourth/stores")
    config = toy_config(data__train_files="absent/*.txt", data__validation_files="absent.txt")
    for folder, take in (("b", lambda: open_prepared(config.data, TOKENIZER, 8)), ("c", lambda: prepare.run(config))):
        config.data.update(remote="memory://fourth/stores", dir=str(tmp_path / folder))
        take()
        assert read_about(tmp_path / folder / store.name) == read_about(store)
    config.data.update(remote="file:///proc/stores", dir=str(tmp_path / "d"))
    with pytest.raises(UserError, match="^config.data.remote: file:///proc/stores can't be written"):
        prepare.run(config)
    check_writable("memory://eighth/stores")
    assert fsspec.filesystem("memory").ls("/eighth/stores") == []  # as before


def test_a_second_process_waits_for_the_first(small_store, tmp_path, monkeypatch):
    remote, here, said = "memory://seventh/stores", tmp_path / "here" / "task", queue.Queue()
    monkeypatch.setattr(lock, "print", lambda text, **_: said.put(text), raising=False)
    upload(small_store, remote)
    for finished in (True, False):
        with contextlib.ExitStack() as first:
            first.enter_context(only_process(here.with_suffix(".copying")))
            second = threading.Thread(target=stage, args=(remote, here))
            second.start()
            assert "waiting for it" in said.get(timeout=60)
            assert not here.exists()
            if finished:
                shutil.copytree(small_store, here)
        second.join(timeout=30)
        assert [path.name for path in here.parent.glob("[!.]*")] == ["task"]
        verify(here, read_about(here))
        shutil.rmtree(here)
