"""Documents in files: WikiText as prose, JSON lines, Parquet and plain text."""

import bz2
import gzip
import io
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffeqformer.data import files
from diffeqformer.data.files import Layout, count_texts, read_texts
from diffeqformer.data.wikitext import articles, detokenize
from diffeqformer.errors import UserError

FIRST = " = The Old Kettle = \n \n A kettle whistled . \n = Not a Title = \n It whistled twice . \n \n"
SECOND = " = Foo ( 1 = 2 ) = \n \n = = Section = = \n \n = = = Deeper = = = \n \n = = = \n \n Text\u2028here . \n"


def test_articles_begin_at_titles_and_join_to_the_text():
    for parts in (
        [FIRST, SECOND],
        ["No title \n \n", FIRST, " = Last = "],
        [FIRST + " = Followed = \n at once \n"],
        [FIRST + "A list :\n = Item = \n \n"],
        [FIRST, " = A\u2028B = \n \n c"],
        [],
    ):
        assert list(articles(io.StringIO("".join(parts), newline="\n"))) == parts
    assert list(articles([" \n", "\n", " = A = \n", "\n"])) == [" = A = \n\n"]


TOKENS = {
    "About 1 @,@ 000 well @-@ fed hens ate 2 @.@ 5 kg .": "About 1,000 well-fed hens ate 2.5 kg.",
    "He said , \" I don 't know ; we 'll see \" ( or not ) .": "He said, \"I don't know; we'll see\" (or not).",
    "The hen 's eggs , the hens ' nest , O 'Hara": "The hen's eggs, the hens' nest, O'Hara",
    "Hens ' eggs and foxes ' holes": "Hens' eggs and foxes' holes",
    "known as ' the red ones ' , since the ' 90s": "known as 'the red ones', since the '90s",
    "pages 3 – 5 of June 2 , 1955 – June 9 , 1956": "pages 3–5 of June 2, 1955 – June 9, 1956",
    "from 1 May 1910 – 2 May 1980 at 17 : 45": "from 1 May 1910 – 2 May 1980 at 17:45",
    "cost $ 5 or £ 7 — 30 % less [ ... ] at 20 ° C , 4 ° 11 ′ N": "cost $5 or £7—30% less [...] at 20 °C, 4°11′ N",
    "km / h , and / or ; in the pot / And so on": "km/h, and/or; in the pot / And so on",
    "a <unk> @-@ like <unk> 's R & B": "a <unk>-like <unk>'s R&B",
    " = = Old hens = = ": "== Old hens ==",
    " = The Kettle ( 1901 ) = ": "= The Kettle (1901) =",
    "let ’ s see “ this ” , wait ... what": "let’s see “this”, wait... what",
    "= = =": "= = =",
    "": "",
}


def test_detokenized_text_is_prose_and_has_the_same_characters():
    def characters(text):
        for mark in ("@-@", "@,@", "@.@"):
            text = text.replace(mark, mark[1])
        return "".join(text.split())

    for tokens, prose in TOKENS.items():
        text = detokenize(tokens)
        assert text == prose and characters(text) == characters(tokens)
        assert detokenize(f"{tokens}\n\n{tokens}") == f"{text}\n\n{text}"


DOCUMENTS = ["one\ntwo\u2028", "", "  ", "três 🙂"]
PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data[:9], "zstd", asbytes=True) + pa.compress(data[9:], "zstd", asbytes=True),
}


def pack(name: str, data: bytes) -> bytes:
    """The content of a file of that name; two frames, one after the other, for .zst."""
    return PACKED.get(os.path.splitext(name)[1].lower(), bytes)(data)


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", ["a.parquet", "A.JSONL", "a.jsonl.gz", "a.ndjson.bz2", "a.json.xz", "a.b.jsonl.zst"])
def test_documents_of_a_file_come_as_they_are(tmp_path, name):
    path, lines = tmp_path / name, "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    path.write_bytes(parquet(text=DOCUMENTS, id=range(4)) if name == "a.parquet" else pack(name, lines.encode()))
    assert list(read_texts(path)) == DOCUMENTS and count_texts(path) == 4


def test_a_plain_file_is_one_document(tmp_path):
    for name in ("wiki.train.tokens", "README", "a.md.zst", "a.TXT.GZ"):
        (tmp_path / name).write_bytes(pack(name, data := "a \r\n\n é\u2028x".encode()))
        assert list(read_texts(tmp_path / name)) == [data.decode()] and count_texts(tmp_path / name) == 1


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "é", "aa"])
@pytest.mark.parametrize("block", [1, 5, 2**20])
def test_separators_cut_a_plain_file_wherever_blocks_end(tmp_path, separator, block, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", block)
    text, path = separator.join(["<|endoftext|", "", " ü\n", "\n|>", "x" * 20]), tmp_path / "a.txt"
    for last in ("", separator):
        path.write_bytes(f"\ufeff{text}{last}".encode())
        assert list(read_texts(path, Layout(separator=separator))) == text.split(separator)
    monkeypatch.setattr(files, "LARGEST", 8)
    with pytest.raises(UserError, match="a.txt: it has a document of more than 8 bytes; cut it into several"):
        list(read_texts(path, Layout(separator="none")))


@pytest.mark.parametrize("kind", ["string", "large_binary", "string_view", "dictionary"])
def test_parquet_holds_text_in_many_types_and_a_null_is_an_empty_document(tmp_path, kind):
    texts, path = ["é", None, "", "é"], tmp_path / "a.parquet"
    data = [text and text.encode() for text in texts] if kind == "large_binary" else texts
    column = pa.array(data).dictionary_encode() if kind == "dictionary" else pa.array(data, getattr(pa, kind)())
    pq.write_table(pa.table({"text": column}), path)
    assert list(read_texts(path)) == ["é", "", "", "é"] and count_texts(path) == 4


def test_a_row_without_text_is_an_empty_document(tmp_path):
    """So that rows keep their numbers, and preparation counts it."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n \r\n{"text": null}\n{"text": "b"}\n\n')
    assert list(read_texts(tmp_path / "a.jsonl")) == ["a", "", "", "", "b", ""]


@pytest.mark.parametrize(
    "name, data, sentence",
    [
        ("a.txt", None, r"a\.txt: No such file or directory; put"),
        ("a.txt", b"", r"a\.txt: the file is empty"),
        ("a.txt", b"\xef\xbb\xbfabc\xff", r"a\.txt: byte 6 isn't UTF-8"),  # after a byte order mark
        ("a.txt.gz", gzip.compress(b"plain", mtime=0)[:-9], r"a\.txt\.gz: "),
        ("a.txt.xz", b"plain", r"a\.txt\.xz: "),
        ("a.txt.zst", pa.compress(b"plain", "zstd", asbytes=True)[:-2], r"a\.txt\.zst: "),
        ("a.txt", "naïve".encode("utf-16-le"), r"a\.txt: byte 1 is 0, so this isn't text"),
        ("a.parquet.gz", b"x", r"a\.parquet\.gz: texts can't be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl: line 2 isn't a JSON object with a string 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl: line 1 isn't a JSON object with"),
        ("a.parquet", b"PAR1 and so on", r"a\.parquet: this isn't a whole Parquet file"),
        ("a.parquet", parquet(words=["a"]), r"a\.parquet: there is no column 'text' among \['words'\]"),
        ("a.parquet", parquet(text=[1]), r"a\.parquet: column 'text' holds int64 instead of strings"),
        ("a.parquet", parquet(text=pa.array([b"a", b"\xff"])), r"a\.parquet: a text from row 0 on isn't UTF-8"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, name, data, sentence):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=sentence):
        list(read_texts(tmp_path / name))
