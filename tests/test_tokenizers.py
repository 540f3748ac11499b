"""Tokenizers: identical to independent implementations, and no text is mistaken for a special token."""

import json

import numpy as np
import pytest
import regex

from diffeqformer.data import tokenizers
from diffeqformer.data.tokenizers import (
    ByteTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    open_tokenizer,
    restore_tokenizer,
)
from diffeqformer.errors import UserError
from helpers import train_sentencepiece, write_tokenizer_json

TEXTS = [
    "The theory of the other thing, in the end.", " the\n\n  there's\tno\r\nend   ", "naïve 🙂 \0 中文 é", "x" * 300,
    "",
    "a text that spells <|endoftext|> and </s> and <s> is text", "12345 67 they'll we've I'd can't",
]  # fmt: skip
MERGES = [(b" ", b"t"), (b"h", b"e"), (b" t", b"he"), (b"i", b"n"), (b"x", b"x"), (b"xx", b"xx"), (b"e", b"n")]
WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""  # of GPT-2's release


def byte_order() -> list[int]:
    """The bytes in the order of GPT-2's first 256 ids: printable ones first."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return printable + [b for b in range(256) if b not in printable]


@pytest.fixture
def small_bpe() -> GPT2Tokenizer:
    pieces = [bytes([b]) for b in byte_order()] + [first + second for first, second in MERGES]
    return GPT2Tokenizer({piece: i for i, piece in enumerate(pieces)})


def plain_bpe(text: str) -> list[int]:
    """Byte-pair encoding as its authors describe it: merge the pair of the lowest rank until none is left."""
    ranks = {pair: i for i, pair in enumerate(MERGES)}
    ids = {bytes([b]): i for i, b in enumerate(byte_order())} | {a + b: 256 + i for i, (a, b) in enumerate(MERGES)}
    result = []
    for word in regex.findall(WORDS, text):
        pieces = [bytes([b]) for b in word.encode()]
        while pairs := [pair for pair in zip(pieces, pieces[1:]) if pair in ranks]:
            best, merged, i = min(pairs, key=ranks.get), [], 0
            while i < len(pieces):
                pair = tuple(pieces[i : i + 2])
                merged.append(b"".join(pair) if pair == best else pieces[i])
                i += 2 if pair == best else 1
            pieces = merged
        result += [ids[piece] for piece in pieces]
    return result


@pytest.fixture(params=["bytes", "gpt2", "sentencepiece", "huggingface"])
def tokenizer(request, small_bpe, sentencepiece_file, tmp_path):
    return {
        "bytes": ByteTokenizer(),
        "gpt2": small_bpe,
        "sentencepiece": SentencePieceTokenizer.open(str(sentencepiece_file)),
        "huggingface": HuggingFaceTokenizer.open(str(write_tokenizer_json(tmp_path))),
    }[request.param]


def test_text_comes_back_and_is_never_special(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.end_of_text not in ids
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_what_tiktoken_cannot_take_is_one_sentence(small_bpe):
    with pytest.raises(UserError, match="begins with 'a .* can't be encoded by tiktoken; shorten the long runs"):
        small_bpe.encode("a" + " " * 1_500_000 + "b")


def test_byte_pairs_are_those_of_a_plain_implementation(small_bpe):
    random = np.random.default_rng(0)
    for text in [*TEXTS, *("".join(random.choice(list("theindx ' \n1é"), size=30)) for _ in range(200))]:
        assert small_bpe.encode(text) == plain_bpe(text)


def test_a_checkpoint_keeps_the_whole_tokenizer(tokenizer):
    again = restore_tokenizer(tokenizer.name, json.loads(json.dumps(tokenizer.save())))
    for what in ("name", "vocab_size", "end_of_text", "unknown"):
        assert getattr(again, what) == getattr(tokenizer, what)
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)


def test_gpt2_comes_from_its_files_and_no_others(tmp_path, monkeypatch):
    """Small files in the published format, whose hashes replace GPT-2's."""
    to_text = {b: chr(b) if i < 188 else chr(256 + i - 188) for i, b in enumerate(byte_order())}

    def write(piece):
        return "".join(to_text[b] for b in piece)

    pieces = [bytes([b]) for b in byte_order()] + [a + b for a, b in MERGES]
    files = {
        "vocab.bpe": "\n".join(["#version", *(f"{write(a)} {write(b)}" for a, b in MERGES), ""]),
        "encoder.json": json.dumps({write(piece): i for i, piece in enumerate(pieces)}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setitem(tokenizers.GPT2_FILES, name, tokenizers.hashlib.sha256(text.encode()).hexdigest())
    tokenizer = open_tokenizer("gpt2", str(tmp_path))
    assert all(tokenizer.encode(text) == plain_bpe(text) for text in TEXTS)
    assert tokenizer.end_of_text == 256 + len(MERGES)
    (tmp_path / "vocab.bpe").write_text(files["vocab.bpe"][:-9])
    with pytest.raises(UserError, match="vocab.bpe: isn't GPT-2's by its SHA-256; name a folder"):
        open_tokenizer("gpt2", str(tmp_path))
    with pytest.raises(UserError, match="absent/vocab.bpe: No such file or directory; name a folder"):
        open_tokenizer("gpt2", str(tmp_path / "absent"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizers, "GPT2_URL", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match="GPT-2's vocabulary can't be downloaded .*config.data.tokenizer_file"):
        open_tokenizer("gpt2")


def test_a_wrong_sentencepiece_file_is_one_sentence(tmp_path, capfd, sentencepiece_file):
    path = tmp_path / "a.model"
    for content, sentence in (
        (b"text", "config.data.tokenizer_file: .*isn't a SentencePiece model .*a.model"),
        (train_sentencepiece(eos_id=-1), "this SentencePiece model has no end-of-sentence id; .*a.model"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            open_tokenizer("sentencepiece", str(path))
    assert capfd.readouterr().err == ""  # the library would log three lines of its own
    path.write_bytes(sentencepiece_file.read_bytes() + b"\x9a\x06\x00")  # an unknown field, which says nothing
    names = {open_tokenizer("sentencepiece", str(file)).name for file in (sentencepiece_file, path)}
    assert len(names) == 2  # of two models


def test_a_tokenizer_json_ends_texts_as_the_files_beside_it_say(tmp_path):
    path = write_tokenizer_json(tmp_path)
    found = open_tokenizer("huggingface", str(path))
    assert found.encode("a  b") == [64, 220, 220, 65] and found.encode("3 spaces   ") == [260]  # no <s>, cut or padding
    assert (found.vocab_size, found.end_of_text, found.decode([64, 256, 299, 400, 65])) == (300, 299, "ab")

    (tmp_path / "config.json").write_text('{"eos_token_id": 256}')
    assert open_tokenizer("huggingface", str(path)).end_of_text == 299
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    other = open_tokenizer("huggingface", str(path))
    assert other.end_of_text == 256 and other.name != found.name
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [299, 256]}')
    assert open_tokenizer("huggingface", str(path)).end_of_text == 299
    for text, sentence in (
        ('{"eos_token_id": 300}', "a text ends with the token 300, which this tokenizer lacks; name another"),
        ("{", "generation_config.json: can't be read: .*; replace the file"),
        ("{}", "what ends a text isn't known; name it as eos_token in tokenizer_config.json .*tokenizer.json"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UserError, match=sentence):
            open_tokenizer("huggingface", str(path))
    path.write_text("{}")
    with pytest.raises(UserError, match="this file isn't a tokenizer.json: .*Model missing"):
        HuggingFaceTokenizer(b"{}", 0)
