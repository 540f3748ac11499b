"""Local files: which are meant, what identifies their text, and stores without them."""

import gzip
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffeqformer.data import preparation
from diffeqformer.data.files import fingerprint, local_files, matching_files
from diffeqformer.data.store import SPLITS, open_store
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from helpers import make_store, toy_config
from runs import command

TOKENIZER = ByteTokenizer()


def test_patterns(tmp_path):
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text(name)
    files = matching_files(f"{tmp_path}/*.txt, {tmp_path}/c.jsonl,", "--files")
    assert [os.path.basename(file) for file in files] == ["a.txt", "b.txt", "c.jsonl"]
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "empty.md").touch()
    for patterns, sentence in (
        (f"{tmp_path}", "--files: .* is a folder"),
        (f"{tmp_path}/d*", "--files: .*d.jsonl can't be read"),
        (f"{tmp_path}/b.txt,{tmp_path}/*.parquet", r"--files: no file matches '.*/\*.parquet'"),
        (f"{tmp_path}/*.txt", "--files: .*link.txt is named twice"),
        (f"{tmp_path}/*.md", "--files: .*empty.md is empty"),
    ):
        with pytest.raises(UserError, match=sentence):
            matching_files(patterns, "--files")
    data = toy_config(data__train_files=f"{tmp_path}/[ab].txt", data__validation_files=f"{tmp_path}/link.txt").data
    with pytest.raises(UserError, match="^config.data.train_files: .*link.txt is a validation file"):
        local_files(data)


def test_a_fingerprint_sees_sizes_and_both_ends(tmp_path):
    path, part, prints = tmp_path / "a.txt", 1 << 16, set()
    for content in (b"x" * 3 * part, b"y" + b"x" * (3 * part - 1), b"x" * (3 * part - 1) + b"y", b"x" * (3 * part + 1)):
        path.write_bytes(content)
        prints.add(fingerprint({"train": [str(path)], "validation": [str(path)]}))
    assert len(prints) == 4


def test_a_name_that_is_there_means_itself_whatever_its_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["data[1].txt", "what?.txt", " c.txt", "d[1]/a/a.txt", "d1/a/a.txt", "b.txt"]
    for name in (*names, "a,b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a").mkdir()  # a folder doesn't stand for a name that begins like it
    for name in (*names, "a,b.txt"):
        assert matching_files(name, "--files") == [name]
        assert matching_files(f"{tmp_path}/{name}", "--files") == [f"{tmp_path}/{name}"]
    assert matching_files(",".join(names), "--files") == names
    assert matching_files("d[1]/*/*, a?b.txt ,d?/a/*", "--files") == ["d[1]/a/a.txt", "a,b.txt", "d1/a/a.txt"]
    with pytest.raises(UserError, match="^--files: no file matches 'data2.txt'"):
        matching_files("data[1].txt,data2.txt,b.txt", "--files")


def stored(folder, text="text"):
    """The `data` part of a config whose store was made from the files train*.txt and validation.txt in a folder."""
    files = {"data__train_files": f"{folder}/train*.txt", "data__validation_files": f"{folder}/validation.txt"}
    data = toy_config(data__dir=str(folder / "stores"), **files).data
    record = {"files": getattr(fingerprint(local_files(data)), text)}
    if text == "text":
        record["patterns"] = preparation.patterns_of(data)
    make_store(folder / "stores" / "python_stdlib-bytes", {split: [["a text"]] for split in SPLITS}, **record)
    return data


@pytest.fixture
def two_texts(tmp_path):
    for name in ("train1.txt", "train2.txt", "validation.txt"):
        (tmp_path / name).write_text(f"the text of {name}")
    return tmp_path


@pytest.mark.parametrize("text", ["text", "earlier"])
def test_a_store_needs_no_text_but_is_of_the_text_that_is_there(text, two_texts, capsys):
    """`earlier`: as earlier versions recorded it."""
    data = stored(two_texts, text)
    assert preparation.open_prepared(data, TOKENIZER, 4)["train"].size == 7 and capsys.readouterr().out == ""
    (two_texts / "train1.txt").write_text("the TEXT of train1.txt")
    with pytest.raises(UserError, match="was made from other text"):
        preparation.open_prepared(data, TOKENIZER, 4)
    for gone in ("validation.txt", "train1.txt", "train2.txt"):
        (two_texts / gone).unlink()
        assert preparation.open_prepared(data, TOKENIZER, 4)["train"].size == 7
    assert "is taken as it is" in capsys.readouterr().out


def test_a_new_run_names_a_missing_text_as_the_maker_of_its_store_did(two_texts):
    """Or else a mistyped name would train on another text. A resumed run is known by its ids."""
    data = stored(two_texts)
    for name in ("train1.txt", "train2.txt", "validation.txt"):
        (two_texts / name).unlink()
    assert preparation.open_prepared(data, TOKENIZER, 4)["train"].size == 7
    for changes in ({"train_files": "tarin*.txt"}, {"separator": "x"}):
        other = data.copy_and_resolve_references()
        other.update(changes)
        with pytest.raises(UserError, match="no file matches"):
            preparation.open_prepared(other, TOKENIZER, 4)
        assert preparation.open_prepared(other, TOKENIZER, 4, resumes=True)["train"].size == 7


def test_names_and_places_of_texts_are_not_compared_but_contents_and_layouts_are(two_texts):
    data = stored(two_texts)
    (two_texts / "train1.txt").rename(two_texts / "train9.txt")  # now the last one
    moved = two_texts.rename(two_texts.with_name("moved"))
    data.update(train_files=f"{moved}/*[29].txt", validation_files=f"{moved}/val*", dir=f"{moved}/stores")
    assert preparation.open_prepared(data, TOKENIZER, 4)["train"].size == 7
    for changes in (
        {"separator": "x"},
        {"text_field": "x"},
        {"train_files": f"{moved}/train9.txt"},
        {"train_files": f"{moved}/val*", "validation_files": f"{moved}/*[29].txt"},
    ):
        other = data.copy_and_resolve_references()
        other.update(changes)
        with pytest.raises(UserError, match="was made from other text"):
            preparation.open_prepared(other, TOKENIZER, 4)
    (moved / "train9.txt").rename(moved / "train9.jsonl")  # the same bytes are read in another way
    data.train_files = f"{moved}/train*"
    with pytest.raises(UserError, match="was made from other text"):
        preparation.open_prepared(data, TOKENIZER, 4)


def test_a_preparation_goes_on_after_its_text_has_moved_but_not_in_another_order(two_texts, tmp_path):
    paths = [str(two_texts / name) for name in ("train1.txt", "train2.txt")]
    plans = []
    for order, origin in ((paths, "a"), (paths, "b"), (paths[::-1], "a")):
        found = fingerprint({"train": order, "validation": [str(two_texts / "validation.txt")]})
        plans.append({"files": found.text, "order": found.order, "origin": origin})
    preparation.begin_or_go_on(tmp_path, plans[2])  # of which nothing is done yet, so another may follow
    preparation.begin_or_go_on(tmp_path, plans[0])
    (tmp_path / "train-00000.bin.json").write_text('{"file": ""}')
    preparation.begin_or_go_on(tmp_path, plans[1])
    assert plans[0]["files"] == plans[2]["files"]
    with pytest.raises(UserError, match="holds an unfinished store of another text"):
        preparation.begin_or_go_on(tmp_path, plans[2])


@pytest.mark.long
def test_texts_of_any_layout_are_prepared(tmp_path):
    texts = ["one\n", "\ntwo 🙂", "three", "four"]
    (tmp_path / "a?1.md").write_text("one\n<|end|>\ntwo 🙂<|end|> \n<|end|>")
    (tmp_path / "b[1].jsonl.gz").write_bytes(gzip.compress(b'{"a.b": "three"}\n\n{"a.b": null}\n'))
    column = pa.array(["four", None]).dictionary_encode()
    pq.write_table(pa.table({"text": [1, 2], "a.b": column}), tmp_path / "c.parquet")
    (tmp_path / "v.txt").write_text("five")
    done = command(
        "prepare", "--config=configs/tiny.py", "--config.data.processes=1", f"--config.data.dir={tmp_path}/stores",
        "--config.data.text_field=a.b", "--config.data.separator=<|end|>", "--config.sequence_length=4",
        f"--config.data.train_files={tmp_path}/a?1.md,{tmp_path}/b[1].jsonl.gz,{tmp_path}/c.parquet",
        f"--config.data.validation_files={tmp_path}/v.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of 4 documents; 4 without any text left out" in done.stdout
    assert "validation: no file has the separator" in done.stdout and "train: no" not in done.stdout
    split = open_store(tmp_path / "stores" / "python_stdlib-bytes", "bytes", 4, None)["train"]
    assert split.ids(0, 99).tolist() == [i for text in texts for i in [*TOKENIZER.encode(text), 256]]
