"""Tests of the TFDS builders, which `test_builders.py` runs in a separate process."""

import contextlib
import io
import pathlib
import sys
import tempfile

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle

from diffeqformer.data import corpora  # noqa: F401 (registers the data sets)
from diffeqformer.data.sources import validation_rows
from hub import parquet

ARTICLES = {  # our own sentences
    "train": [f" = Kettle {i} = \n \n The kettle no . {i} whistled @-@ twice . \n \n" for i in range(3)],
    "valid": [" = Spoon = \n \n A spoon lay there . \n \n"],
    "test": [" = Fork = \n \n = = Use = = \n \n A fork was used . \n \n", " = Knife = \n \n A knife was not . \n \n"],
}
PAGES = [f"page {i} tells of {i * i} mugs" for i in range(5000)]
DUMMY = pathlib.Path(tempfile.mkdtemp())  # a manual_dir


for split, parts in ARTICLES.items():
    for kind in ("raw", "detokenized"):
        (DUMMY / "wikitext103" / kind).mkdir(parents=True, exist_ok=True)
    (DUMMY / "wikitext103" / "raw" / f"wiki.{split}.raw").write_text("".join(parts))
    (DUMMY / "wikitext103" / "detokenized" / f"wiki.{split}.tokens").write_text("".join(parts))
(DUMMY / "openwebtext").mkdir()
(DUMMY / "openwebtext" / "0.parquet").write_bytes(parquet(PAGES[:2000]))
(DUMMY / "openwebtext" / "1.parquet").write_bytes(parquet(PAGES[2000:]))


def prepare(name, folder, manual_dir=None):
    builder = tfds.builder(name, data_dir=folder)
    shards = 2 if name == "openwebtext" else None  # order must survive several files
    config = tfds.download.DownloadConfig(manual_dir=manual_dir, num_shards=shards)
    builder.download_and_prepare(download_config=config)
    return builder


def texts(builder, split):
    return [example["text"].decode() for example in tfds.as_numpy(builder.as_dataset(split=split))]


@pytest.fixture(scope="module")
def manual(tmp_path_factory) -> tuple[pathlib.Path, str]:
    """A folder with all data sets, made from files of a manual_dir without asking the hub, and what was printed."""
    folder, said = tmp_path_factory.mktemp("manual"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr("diffeqformer.data.hub.HfApi", None)
        for name in ("openwebtext", "wikitext103/raw", "wikitext103/detokenized"):
            prepare(name, folder, DUMMY)
    return folder, said.getvalue()


def test_manual_files_in_their_order_and_without_network(manual):
    folder, said = manual
    builder = tfds.builder("openwebtext", data_dir=folder)
    rows = validation_rows(5000).tolist()
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
    validation = validation_rows(5000).tolist()
    builder = prepare("openwebtext", tmp_path, DUMMY)
    assert texts(builder, "train") == [page for row, page in enumerate(PAGES) if row not in validation]
    assert sum(sizes) == 4997 and max(sizes) == 5  # of 1,000 buckets; those of validation are in memory
