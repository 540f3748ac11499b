"""Tokenizers: identical to independent implementations, and no text is mistaken for a special token."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

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
from newcomer import gpt2_files

TEXTS = [
    "The theory of the other thing, in the end.", " the\n\n  there's\tno\r\nend   ", "naïve 🙂 \0 中文 é", "x" * 300,
    "",
    "a text that spells <|endoftext|> and </s> and <s> is text", "12345 67 they'll we've I'd can't",
]  # fmt: skip


@pytest.fixture(scope="module")
def gpt2() -> GPT2Tokenizer:
    return open_tokenizer("gpt2", str(gpt2_files()))


@pytest.fixture(params=["bytes", "gpt2", "sentencepiece", "huggingface"])
def tokenizer(request, gpt2, sentencepiece_file, tmp_path):
    return {
        "bytes": ByteTokenizer(),
        "gpt2": gpt2,
        "sentencepiece": SentencePieceTokenizer.open(str(sentencepiece_file)),
        "huggingface": HuggingFaceTokenizer.open(str(write_tokenizer_json(tmp_path))),
    }[request.param]


def test_text_comes_back_and_is_never_special(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.end_of_text not in ids
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_what_tiktoken_cannot_take_is_one_sentence(gpt2):
    with pytest.raises(UserError, match="begins with 'a .* can't be encoded by tiktoken"):
        gpt2.encode("a" + " " * 1_500_000 + "b")


def test_ids_of_gpt2_are_those_of_another_implementation(gpt2):
    theirs = Tokenizer(BPE.from_file(str(gpt2_files() / "encoder.json"), str(gpt2_files() / "vocab.bpe")))
    theirs.pre_tokenizer = ByteLevel(add_prefix_space=False)
    random = np.random.default_rng(0)
    for text in [*TEXTS, *("".join(random.choice(list("theindx ' \n1é"), size=30)) for _ in range(200))]:
        assert gpt2.encode(text) == theirs.encode(text).ids
    assert theirs.id_to_token(gpt2.end_of_text) == "<|endoftext|>"


def test_a_checkpoint_keeps_the_whole_tokenizer(tokenizer):
    again = restore_tokenizer(tokenizer.name, json.loads(json.dumps(tokenizer.save())))
    for what in ("name", "vocab_size", "end_of_text", "unknown"):
        assert getattr(again, what) == getattr(tokenizer, what)
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)


def test_gpt2_comes_from_its_files_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "vocab.bpe").write_bytes((gpt2_files() / "vocab.bpe").read_bytes()[:-9])
    with pytest.raises(UserError, match="vocab.bpe: isn't GPT-2's by its SHA-256"):
        open_tokenizer("gpt2", str(tmp_path))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizers, "GPT2_URL", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match="GPT-2's vocabulary can't be downloaded"):
        open_tokenizer("gpt2")


def test_a_wrong_sentencepiece_file_is_one_sentence(tmp_path, sentencepiece_file):
    path = tmp_path / "a.model"
    for content, sentence in (
        (b"text", "config.data.tokenizer_file: .*isn't a SentencePiece model .*a.model"),
        (train_sentencepiece(eos_id=-1), "no end-of-sentence id; .*a.model"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            open_tokenizer("sentencepiece", str(path))
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
        ('{"eos_token_id": 300}', "a text ends with the token 300, which this tokenizer lacks"),
        ("{", "generation_config.json: can't be read"),
        ("{}", "what ends a text isn't known"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UserError, match=sentence):
            open_tokenizer("huggingface", str(path))
    with pytest.raises(UserError, match="isn't a tokenizer.json"):
        HuggingFaceTokenizer(b"{}", 0)
