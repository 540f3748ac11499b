"""Tests of the TFDS builders, which `test_builders.py` runs in a separate process. A small server plays the hub."""

import contextlib
import functools
import hashlib
import http.server
import io
import json
import pathlib
import shutil
import sys
import tempfile
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle

from diffeqformer.data import builders
from diffeqformer.errors import UserError

ARTICLES = {  # our own sentences
    "train": [f" = Kettle {i} = \n \n The kettle no . {i} whistled @-@ twice . \n \n" for i in range(3)],
    "valid": [" = Spoon = \n \n A spoon lay there . \n \n"],
    "test": [" = Fork = \n \n = = Use = = \n \n A fork was used . \n \n", " = Knife = \n \n A knife was not . \n \n"],
}
PAGES = [f"page {i} tells of {i * i} mugs" for i in range(5000)]
DUMMY = pathlib.Path(tempfile.mkdtemp())  # a manual_dir


def write_parquet(path: pathlib.Path, texts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(texts)}), path, row_group_size=100)


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
        patch.setattr(builders, "_ask_hub", None)
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


class Hub(http.server.SimpleHTTPRequestHandler):
    """Serves `answers` (path to JSON; an empty one means not found) and the files of a folder."""

    def do_GET(self):
        if (answer := self.server.answers.get(self.path)) is None:
            return super().do_GET()
        self.send_response(200 if answer else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with both data sets in Parquet: WikiText in its repository, OpenWebText only as converted by the hub."""
    folder = tmp_path / "hub"
    handler = functools.partial(Hub, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.folder, address = folder, f"http://127.0.0.1:{server.server_port}"
    listing = [{"type": "file", "path": "README.md"}, {"type": "file", "path": "wikitext-2-raw-v1/train-0.parquet"}]
    for split, parts in ARTICLES.items():
        name = f"wikitext-103-raw-v1/{'validation' if split == 'valid' else split}-00000-of-00001.parquet"
        path = folder / "datasets/Salesforce/wikitext/resolve/main" / name
        lines = "".join(parts).splitlines(keepends=True)
        write_parquet(path, [line if line.strip() else "" for line in lines])
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        listing.append({"type": "file", "path": name, "lfs": {"oid": sha256}})
    path = folder / "api/datasets/Skylion007/openwebtext/parquet/plain_text/train"
    write_parquet(path / "2.parquet", PAGES[:3000])
    write_parquet(path / "10.parquet", PAGES[3000:])  # the hub's order isn't that of the names
    urls = [f"{address}/{path.relative_to(folder)}/{name}.parquet" for name in ("2", "10")]
    server.answers = {
        "/api/datasets/Salesforce/wikitext/tree/main?recursive=true": listing,
        "/api/datasets/Skylion007/openwebtext/tree/main?recursive=true": [{"type": "file", "path": "openwebtext.py"}],
        "/api/datasets/Skylion007/openwebtext/parquet": {"plain_text": {"train": urls}},
    }
    monkeypatch.setattr(builders, "HUB", address)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_wikitext_from_the_repository(hub, tmp_path):
    builder = prepare("wikitext103/raw", tmp_path)
    assert texts(builder, "train") == [text.replace("\n \n", "\n\n") for text in ARTICLES["train"]]
    record = json.loads((tmp_path / "downloads" / "wikitext103.downloads.json").read_text())
    assert len(record) == 3 and all(entry["stated_by_hub"] for entry in record.values())


def test_openwebtext_from_the_conversion(hub, tmp_path, capsys):
    builder = prepare("openwebtext", tmp_path)
    assert texts(builder, "validation") == [PAGES[row] for row in builders.validation_rows(5000)]
    record = json.loads((tmp_path / "downloads" / "openwebtext.downloads.json").read_text())
    path = hub.folder / "api/datasets/Skylion007/openwebtext/parquet/plain_text/train/2.parquet"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    [entry] = [entry for url, entry in record.items() if url.endswith("/2.parquet")]
    assert entry == {"bytes": path.stat().st_size, "sha256": sha256, "stated_by_hub": False}
    assert f"SHA-256 {sha256}, none stated by the hub" in capsys.readouterr().out


def test_a_file_that_is_not_the_stated_one_is_refused(hub, tmp_path):
    listing = hub.answers["/api/datasets/Salesforce/wikitext/tree/main?recursive=true"]
    listing[-1]["lfs"]["oid"] = "0" * 64
    with pytest.raises(UserError, match="test-.*parquet: SHA-256 .* but the hub states 0000"):
        prepare("wikitext103/raw", tmp_path)


def test_a_file_that_is_not_the_recorded_one_is_refused(hub, tmp_path):
    builder = prepare("openwebtext", tmp_path)
    record = tmp_path / "downloads" / "openwebtext.downloads.json"
    again = tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.FORCE_REDOWNLOAD)
    builder.download_and_prepare(download_config=again)  # the same files: nothing to say
    before = record.read_text()
    path = hub.folder / "api/datasets/Skylion007/openwebtext/parquet/plain_text/train/10.parquet"
    write_parquet(path, PAGES[3001:])
    shutil.rmtree(tmp_path / "downloads" / "openwebtext")  # TFDS's cache, without which it notices nothing
    with pytest.raises(UserError, match=r"10\.parquet: SHA-256 .*openwebtext\.downloads\.json records "):
        builder.download_and_prepare(download_config=again)
    assert record.read_text() == before
    record.write_text("{")
    with pytest.raises(UserError, match=r"openwebtext\.downloads\.json: this record can't be read"):
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS)
        )
    write_parquet(path, PAGES[3002:])  # this time TFDS notices, by its cache
    with pytest.raises(UserError, match=r"a file of the hub isn't the one downloaded before .*10\.parquet"):
        builder.download_and_prepare(download_config=again)


TREE = "tree/main?recursive=true"


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ("parquet", {"x": {"train": ["http://h/parquet/x/partial-train/0.parquet"]}}, "converted only a part"),
        ("parquet", {"x": {"test": []}}, "parquet: the hub has no Parquet files of split 'train'"),
        ("parquet", {"x": {}, "y": {}}, r"configurations \['x', 'y'\] instead of"),
        ("parquet", {}, "openwebtext/parquet: the hub answered 404"),
        (TREE, [{"path": "a/train-0.parquet"}, {"path": "b/train-0.parquet"}], "split 'train' is in several folders"),
        (
            TREE,
            [{"path": "train-0.parquet"}],
            r"Failed to get url http://.*/train-0\.parquet\. HTTP code: 404; try again",
        ),
    ],
)
def test_what_the_hub_cannot_give_is_refused(hub, tmp_path, path, value, sentence):
    hub.answers[f"/api/datasets/Skylion007/openwebtext/{path}"] = value
    with pytest.raises(UserError, match=sentence) as error:
        prepare("openwebtext", tmp_path)
    assert "\n" not in str(error.value) and "manual_dir" in str(error.value)


def test_a_missing_network_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(builders, "HUB", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="^http://127.0.0.1:9/.*: the hub can't be reached; .* manual_dir"):
        prepare("openwebtext", tmp_path)
