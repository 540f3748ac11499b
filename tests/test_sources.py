"""The hub's corpora without TensorFlow: which files are taken, what is recorded, and their documents in order.

A small server plays the hub.
"""

import errno
import hashlib
import os
import subprocess
import sys
from unittest import mock

import pytest

from diffeqformer.data import hub as downloads
from diffeqformer.data import texts
from diffeqformer.data.texts import HubTexts, open_corpus
from diffeqformer.errors import UserError
from helpers import ROOT
from hub import CONVERTED, Hub, parquet
from newcomer import PAGES, RAW, RAW_TEXT, fill, raw_articles

OPENWEBTEXT = "Skylion007/openwebtext"
LAST = "plain_text/train/0001.parquet"  # of OpenWebText's files


@pytest.fixture
def hub(monkeypatch):
    """A hub with all three data sets, OpenWebText only as converted by the hub."""
    server = Hub()
    fill(server)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return server


@pytest.fixture
def nowhere(monkeypatch):
    """No hub, and nothing may ask for one."""
    monkeypatch.setattr(downloads, "HfApi", None)


def fetched(corpus: str, folder) -> HubTexts:
    found = open_corpus(corpus, None)
    with mock.patch.dict(os.environ, {"TFDS_DATA_DIR": str(folder)} if folder else {}):
        found.fetch()
    return found


def by_hand(folder, name: str, **files: bytes):
    """Put files into manual_dir; `a__parquet` is a.parquet."""
    manual = folder / "downloads" / "manual" / name
    manual.mkdir(parents=True)
    for file, content in files.items():
        (manual / file.replace("__", ".")).write_bytes(content)
    return manual


def test_validation_rows_are_those_of_hugging_face():
    """Computed with datasets 5.2.0: Dataset.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]."""
    rows = texts.validation_rows(texts.OPENWEBTEXT_DOCUMENTS)
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == "df00c240445075043bc15359133182a5a0d4e241fbff007f3664c958a9e4997e"
    assert texts.validation_rows(2000).tolist() == [79]
    assert texts.validation_rows(2001).tolist() == [79, 1706]


def test_many_files_are_parted_into_the_most_shards_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MOST_SHARDS", 2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    found = open_corpus("mine", {"train": list(map(str, paths))})
    assert [list(found.documents("train", index, 2)) for index in range(found.shards("train"))] == [["a"], ["b", "c"]]


def test_an_article_of_raw_wikitext_may_go_on_in_the_next_file(tmp_path, nowhere):
    half = len(RAW["train"]) // 2 + 3
    files = {f"{split}__parquet": parquet(rows) for split, rows in RAW.items() if split != "train"}
    files |= {"train-0__parquet": parquet(RAW["train"][:half]), "train-1__parquet": parquet(RAW["train"][half:])}
    by_hand(tmp_path, "wikitext103/raw", **files)
    raw = fetched("wikitext103_raw", tmp_path)
    assert list(raw.documents("train")) == raw_articles("train") and raw.shards("train") == 1
    own = {f"wiki__{split[:5]}__tokens": text.encode() for split, text in RAW_TEXT.items()}
    by_hand(tmp_path, "wikitext103/detokenized", **own, train2__jsonl=b'{"text": "As it @-@ is"}')
    prose = fetched("wikitext103", tmp_path)
    assert [len(list(prose.documents("train", i, 2))) for i in (0, 1)] == [1, 20] and prose.shards("train") == 2
    assert "1,905" in list(prose.documents("train"))[1] and "1 @,@ 905" in next(raw.documents("train"))
    assert next(prose.documents("train")) == "As it @-@ is"


def test_missing_manual_files_are_refused(tmp_path, nowhere):
    by_hand(tmp_path, "wikitext103/raw", train__txt=b"\n")
    with pytest.raises(UserError, match="raw: no file of split 'validation'"):
        fetched("wikitext103_raw", tmp_path)


def test_by_default_the_folder_is_that_of_tfds(tmp_path, monkeypatch, nowhere):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    by_hand(tmp_path / "tensorflow_datasets", "openwebtext", a__parquet=parquet(PAGES))
    assert len(fetched("openwebtext", "").found["files"]["train"]) == 1


def test_a_file_of_another_hash_than_the_hub_states_is_refused(hub, tmp_path):
    hub.stated[LAST] = "0" * 64
    with pytest.raises(UserError, match="0001.parquet: has the SHA-256 .* but the hub states 0000"):
        fetched("openwebtext", tmp_path)


def test_whole_files_of_the_last_download_are_taken_without_asking_the_hub(hub, tmp_path, monkeypatch):
    """What an earlier one had in addition is left out. A file of other content isn't whole."""
    files = hub.repositories[OPENWEBTEXT][CONVERTED]
    place = tmp_path / "downloads" / OPENWEBTEXT
    fetched("openwebtext", tmp_path)
    (place / LAST).unlink()
    del files[LAST]  # the hub has cut the data set anew
    files["plain_text/train/0000-more.parquet"] = parquet(PAGES[1500:])
    again = fetched("openwebtext", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "HfApi", None)
        without = fetched("openwebtext", tmp_path)
    assert without.found == again.found and len(again.found["files"]["train"]) == 2
    (place / "plain_text/train/0000.parquet").write_bytes(parquet(["other"]))
    hub.repositories.clear()
    with pytest.raises(UserError, match=f"^{OPENWEBTEXT}: the hub answered 404"):
        fetched("openwebtext", tmp_path)


@pytest.mark.parametrize(
    "branch, names, sentence",
    [
        (CONVERTED, ["x/partial-train/0"], r"but it is in \['x/partial-train'\]"),
        (CONVERTED, ["x/test/0"], r"but it is in \[\]"),
        ("main", ["a/train-0", "b/train-0"], r"but it is in \['a', 'b'\]"),
    ],
)
def test_what_the_hub_cannot_give_is_refused(hub, tmp_path, branch, names, sentence):
    hub.repositories[OPENWEBTEXT][branch] = {f"{name}.parquet": b"" for name in names}
    with pytest.raises(UserError, match=f"^{OPENWEBTEXT}: .*{sentence}"):
        fetched("openwebtext", tmp_path)


@pytest.mark.parametrize(
    "error, sentence",
    [
        (RuntimeError("Task error: CAS\nmore"), "the hub can't be reached, RuntimeError: Task error: CAS"),
        (OSError(errno.ENOSPC, "No space left", "0.parquet"), "TFDS_DATA_DIR: 0.parquet: No space left"),
    ],
)
def test_a_download_that_breaks_off_names_the_hub_or_the_disk(hub, monkeypatch, tmp_path, error, sentence):
    monkeypatch.setattr(downloads, "snapshot_download", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=f"^({OPENWEBTEXT}: )?{sentence}"):
        fetched("openwebtext", tmp_path)


def test_a_corpus_needs_a_disk_and_a_network(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="^TFDS_DATA_DIR: .* gs://bucket/d"):
        fetched("openwebtext", "gs://bucket/d")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=f"^{OPENWEBTEXT}: the hub can't be reached"):
        fetched("openwebtext", tmp_path)


@pytest.mark.long
def test_the_corpora_in_seqio():
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "tests/seqio_process.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
