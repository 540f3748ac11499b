"""Tests of the TFDS builders, which `test_builders.py` runs in a separate process. A small server plays the hub."""

import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import sys
import tempfile
import types

import numpy as np
import pytest
import seqio
import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle

import hub as hub_server

HUB = hub_server.Hub()
os.environ |= {"HF_ENDPOINT": HUB.address, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}  # read at the import

from diffeqformer.data import builders  # noqa: E402
from diffeqformer.errors import UserError  # noqa: E402

ARTICLES = {  # our own sentences
    "train": [f" = Kettle {i} = \n \n The kettle no . {i} whistled @-@ twice . \n \n" for i in range(3)],
    "valid": [" = Spoon = \n \n A spoon lay there . \n \n"],
    "test": [" = Fork = \n \n = = Use = = \n \n A fork was used . \n \n", " = Knife = \n \n A knife was not . \n \n"],
}
PAGES = [f"page {i} tells of {i * i} mugs" for i in range(5000)]
DUMMY = pathlib.Path(tempfile.mkdtemp())  # a manual_dir


def write_parquet(path: pathlib.Path, texts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(hub_server.parquet(texts))


for split, parts in ARTICLES.items():
    for kind in ("raw", "detokenized"):
        (DUMMY / "wikitext103" / kind).mkdir(parents=True, exist_ok=True)
    (DUMMY / "wikitext103" / "raw" / f"wiki.{split}.raw").write_text("".join(parts))
    (DUMMY / "wikitext103" / "detokenized" / f"wiki.{split}.tokens").write_text("".join(parts))
write_parquet(DUMMY / "openwebtext" / "0.parquet", PAGES[:2000])
write_parquet(DUMMY / "openwebtext" / "1.parquet", PAGES[2000:])


class TestWikitext103(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = builders.Wikitext103
    EXAMPLE_DIR = str(DUMMY)
    SPLITS = {"train": 3, "validation": 1, "test": 2}


class TestOpenwebtext(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = builders.Openwebtext
    EXAMPLE_DIR = str(DUMMY)
    SPLITS = {"train": 4997, "validation": 3}


def prepare(name, folder, manual_dir=None):
    builder = tfds.builder(name, data_dir=folder)
    shards = 2 if name == "openwebtext" else None  # order must survive several files
    config = tfds.download.DownloadConfig(manual_dir=manual_dir, num_shards=shards)
    builder.download_and_prepare(download_config=config)
    return builder


def texts(builder, split):
    return [example["text"].decode() for example in tfds.as_numpy(builder.as_dataset(split=split))]


def test_validation_rows_are_those_of_hugging_face():
    """Computed with datasets 5.2.0: Dataset.train_test_split(test_size=0.0005, seed=2357, shuffle=True)["test"]."""
    assert builders.validation_rows(2000).tolist() == [79]
    assert builders.validation_rows(2001).tolist() == [79, 1706]
    assert builders.validation_rows(4001).tolist() == [1788, 151, 2470]
    assert builders.validation_rows(10_000).tolist() == [8290, 1229, 4733, 8519, 1700]
    rows = builders.validation_rows(builders.OPENWEBTEXT_DOCUMENTS)
    assert (
        rows.dtype == np.int64
        and len(rows) == 4007
        and rows[:5].tolist() == [4327249, 4286500, 2184614, 4793011, 1709068]
    )
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == "df00c240445075043bc15359133182a5a0d4e241fbff007f3664c958a9e4997e"


@pytest.fixture(scope="module")
def manual(tmp_path_factory) -> tuple[pathlib.Path, str]:
    """A folder with all data sets, made from files of a manual_dir without asking the hub, and what was printed."""
    folder, said = tmp_path_factory.mktemp("manual"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(builders, "HfApi", None)
        for name in ("openwebtext", "wikitext103/raw", "wikitext103/detokenized"):
            prepare(name, folder, DUMMY)
    return folder, said.getvalue()


def test_manual_files_in_their_order_and_without_network(manual):
    folder, said = manual
    builder = tfds.builder("openwebtext", data_dir=folder)
    rows = builders.validation_rows(5000).tolist()
    assert texts(builder, "validation") == [PAGES[row] for row in rows] and rows != sorted(rows)
    assert texts(builder, "train") == [page for row, page in enumerate(PAGES) if row not in rows]
    assert "5,000 documents instead of 8,013,769, so the validation split isn't the published" in said
    assert texts(tfds.builder("wikitext103/raw", data_dir=folder), "train") == ARTICLES["train"]
    prose = texts(tfds.builder("wikitext103/detokenized", data_dir=folder), "train")
    assert prose[2] == "= Kettle 2 =\n\nThe kettle no. 2 whistled-twice.\n\n"
    assert "apache_beam" not in sys.modules


def test_text_beyond_the_memory_is_sorted_part_by_part(tmp_path, monkeypatch):
    """OpenWebText has 40 GB. TFDS reads one bucket at a time, so they must be of one size."""
    sizes, read = [], shuffle._Bucket.read_values
    monkeypatch.setattr(shuffle, "MAX_MEM_BUFFER_SIZE", 10_000)
    monkeypatch.setattr(shuffle._Bucket, "read_values", lambda bucket: sizes.append(len(bucket)) or read(bucket))
    validation = builders.validation_rows(5000).tolist()
    builder = prepare("openwebtext", tmp_path, DUMMY)
    assert texts(builder, "train") == [page for row, page in enumerate(PAGES) if row not in validation]
    assert sum(sizes) == 4997 and max(sizes) == 5  # of 1,000 buckets; those of validation are in memory


def test_seqio_finds_the_builders(manual):
    folder = str(manual[0])
    source = seqio.TfdsDataSource("wikitext103/detokenized:1.0.0", tfds_data_dir=folder)
    assert set(source.splits) == {"train", "validation", "test"} and source.num_input_examples("train") == 3
    source = seqio.TfdsDataSource("openwebtext:1.0.0", tfds_data_dir=folder, splits=["train", "validation"])
    for split in ("train", "validation"):
        found = [example["text"].decode() for example in source.get_dataset(split, shuffle=False).as_numpy_iterator()]
        assert found == texts(tfds.builder("openwebtext", data_dir=folder), split)


def test_missing_manual_files_are_refused(tmp_path):
    folder = tmp_path / "manual" / "wikitext103" / "raw"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match="raw: the folder is empty"):
        prepare("wikitext103/raw", tmp_path, tmp_path / "manual")
    (folder / "train.txt").write_text("".join(ARTICLES["train"]))
    with pytest.raises(UserError, match="raw: no file of split 'validation'; put one there"):
        prepare("wikitext103/raw", tmp_path, tmp_path / "manual")


RAW, OPENWEBTEXT = "Salesforce/wikitext", "Skylion007/openwebtext"


@pytest.fixture
def hub(monkeypatch):
    """A hub with WikiText in Parquet of its repository, and OpenWebText only as converted by the hub."""
    files = {"README.md": b"", "wikitext-2-raw-v1/train-0.parquet": b""}
    for split, parts in ARTICLES.items():
        name = f"wikitext-103-raw-v1/{'validation' if split == 'valid' else split}-00000-of-00001.parquet"
        lines = "".join(parts).splitlines(keepends=True)
        files[name] = hub_server.parquet(line if line.strip() else "" for line in lines)
    HUB.stated.clear()
    HUB.datasets = {
        RAW: {"main": files},
        OPENWEBTEXT: {
            "main": {"openwebtext.py": b""},
            hub_server.CONVERTED: {
                "plain_text/train/0000.parquet": hub_server.parquet(PAGES[:3000]),
                "plain_text/train/0001.parquet": hub_server.parquet(PAGES[3000:]),
            },
        },
    }
    return HUB


def test_wikitext_from_the_repository(hub, tmp_path):
    builder = prepare("wikitext103/raw", tmp_path)
    assert texts(builder, "train") == [text.replace("\n \n", "\n\n") for text in ARTICLES["train"]]
    record = json.loads((tmp_path / "downloads" / "wikitext103.downloads.json").read_text())
    assert len(record) == 3 and all(entry["stated_by_hub"] for entry in record.values())


def test_openwebtext_from_the_conversion(hub, tmp_path, capsys):
    name = "plain_text/train/0000.parquet"
    hub.stated[name] = None
    builder = prepare("openwebtext", tmp_path)
    assert texts(builder, "validation") == [PAGES[row] for row in builders.validation_rows(5000)]
    record = json.loads((tmp_path / "downloads" / "openwebtext.downloads.json").read_text())
    content = hub.datasets[OPENWEBTEXT][hub_server.CONVERTED][name]
    sha256 = hashlib.sha256(content).hexdigest()
    assert record[f"hf://datasets/{OPENWEBTEXT}@{hub_server.CONVERTED}/{name}"] == {
        "bytes": len(content),
        "sha256": sha256,
        "stated_by_hub": False,
        "commit": hub.commit(OPENWEBTEXT, hub_server.CONVERTED),
    }
    assert f"SHA-256 {sha256}, none stated by the hub" in capsys.readouterr().out and len(record) == 2


def test_a_file_that_is_not_the_stated_one_is_refused(hub, tmp_path):
    hub.stated["wikitext-103-raw-v1/test-00000-of-00001.parquet"] = "0" * 64
    with pytest.raises(UserError, match="test-.*parquet: SHA-256 .* but the hub states 0000"):
        prepare("wikitext103/raw", tmp_path)


def test_a_file_that_is_not_the_recorded_one_is_refused(hub, tmp_path):
    builder = prepare("openwebtext", tmp_path)
    record = tmp_path / "downloads" / "openwebtext.downloads.json"
    again = tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS)
    builder.download_and_prepare(download_config=again)  # the same files: nothing to say
    before, branches = record.read_text(), hub.datasets[OPENWEBTEXT]
    later = hub_server.parquet(PAGES[3001:])
    branches[hub_server.CONVERTED] = {**branches[hub_server.CONVERTED], "plain_text/train/0001.parquet": later}
    with pytest.raises(UserError, match=r"0001\.parquet: SHA-256 .*openwebtext\.downloads\.json records "):
        builder.download_and_prepare(download_config=again)
    assert record.read_text() == before
    record.write_text("{")
    with pytest.raises(UserError, match=r"openwebtext\.downloads\.json: this record can't be read"):
        builder.download_and_prepare(download_config=again)


def test_files_that_are_whole_are_not_downloaded_again(hub, tmp_path):
    files = hub.datasets[OPENWEBTEXT][hub_server.CONVERTED]
    broken = {**files, "plain_text/train/0001.parquet": None}  # the hub lists it, and can't give it
    hub.datasets[OPENWEBTEXT][hub_server.CONVERTED] = broken
    with pytest.raises(UserError, match="^Skylion007/openwebtext: the hub answered 404; try again later"):
        prepare("openwebtext", tmp_path)
    [kept] = (tmp_path / "downloads").rglob("0000.parquet")
    written = kept.stat().st_mtime_ns
    hub.datasets[OPENWEBTEXT][hub_server.CONVERTED] = files
    assert texts(prepare("openwebtext", tmp_path), "validation") and kept.stat().st_mtime_ns == written


FOLDERS = {"a/train-0.parquet": b"", "b/train-0.parquet": b""}


@pytest.mark.parametrize(
    "branch, files, sentence",
    [
        (hub_server.CONVERTED, {"x/partial-train/0.parquet": b""}, "converted only a part of split 'train'"),
        (hub_server.CONVERTED, {"x/test/0.parquet": b""}, "the hub has no Parquet files of it"),
        (hub_server.CONVERTED, {"x/train/0.parquet": b"", "y/train/0.parquet": b""}, "'train' is in several folders"),
        (hub_server.CONVERTED, None, "the hub has no Parquet files of it"),
        ("main", None, "the hub answered 404"),
        ("main", FOLDERS, r"split 'train' is in several folders of the hub, \['a', 'b'\]"),
    ],
)
def test_what_the_hub_cannot_give_is_refused(hub, tmp_path, branch, files, sentence):
    hub.datasets[OPENWEBTEXT][branch] = files
    if files is None:
        del hub.datasets[OPENWEBTEXT][branch]
    if not hub.datasets[OPENWEBTEXT].get("main"):
        del hub.datasets[OPENWEBTEXT]
    with pytest.raises(UserError, match=f"^{OPENWEBTEXT}: .*{sentence}") as error:
        prepare("openwebtext", tmp_path)
    assert "\n" not in str(error.value) and "manual_dir" in str(error.value)


def test_a_split_that_the_hub_lacks_is_named(hub, tmp_path):
    del hub.datasets[RAW]["main"]["wikitext-103-raw-v1/test-00000-of-00001.parquet"]
    with pytest.raises(UserError, match=f"^{RAW}: the hub has no Parquet files of split 'test'; put them into manual_"):
        prepare("wikitext103/raw", tmp_path)


@pytest.mark.parametrize(
    "error, sentence",
    [
        (RuntimeError("Task error: CAS\nmore"), "can't be reached, RuntimeError: Task error: CAS; try again later"),
        (OSError("Consistency check failed\nmore"), "can't be reached, OSError: Consistency check failed; try again"),
    ],
)
def test_a_download_that_breaks_off_is_one_sentence(hub, monkeypatch, tmp_path, error, sentence):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(builders, "snapshot_download", broken)
    with pytest.raises(UserError, match=f"^{OPENWEBTEXT}: the hub {sentence}"):
        prepare("openwebtext", tmp_path)


def test_an_error_of_the_disk_is_not_one_of_the_hub(hub, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "0000.parquet")

    monkeypatch.setattr(builders, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left on device: '0000.parquet'"):
        prepare("openwebtext", tmp_path)


def test_corpora_are_not_downloaded_to_a_url(tmp_path):
    manager = types.SimpleNamespace(download_dir="gs://bucket/downloads")
    with pytest.raises(
        UserError, match="^config.data.tfds_dir: .* this machine's disk first, and not to gs://bucket/d"
    ):
        builders.download(manager, "openwebtext", OPENWEBTEXT, None, ["train"])


def test_a_missing_network_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    said = f"^{OPENWEBTEXT}: the hub can't be reached, .*; try again later, .* manual_dir"
    with pytest.raises(UserError, match=said):
        prepare("openwebtext", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)  # HF_HUB_OFFLINE=1
    with pytest.raises(UserError, match=said):
        prepare("openwebtext", tmp_path)
