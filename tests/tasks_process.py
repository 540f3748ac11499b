"""Tests of the SeqIO tasks, which `test_builders.py` runs in a separate process."""

import json
import runpy

import numpy as np
import pytest
import seqio
import tensorflow as tf

from diffeqformer.data import CORPUS_NAMES, corpora, tasks
from diffeqformer.data.texts import stdlib_files
from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from diffeqformer.errors import UserError


def test_the_standard_library_task_agrees_with_its_files():
    """SeqIO's ids are the bytes of the files without tests, split by path."""
    task = seqio.get_mixture_or_task("python_stdlib_bytes")
    train, validation = (stdlib_files(split) for split in ("train", "validation"))
    assert not set(train) & set(validation) and not any("test" in path.parts for path in train + validation)
    vocabulary = task.output_features["targets"].vocabulary
    first = next(iter(task.get_dataset(split="validation", sequence_length=None, shuffle=False).as_numpy_iterator()))
    text = validation[0].read_bytes()
    assert bytes(first["targets"][:-1].astype(np.uint8)) == text == first["targets_pretokenized"]
    assert first["targets"][-1] == vocabulary.eos_id == 256


def test_the_names_of_corpora_are_known_without_tensorflow():
    assert tuple(corpora.CORPORA) == CORPUS_NAMES


def test_the_import_keeps_a_task_of_that_name_from_elsewhere():
    theirs = seqio.get_mixture_or_task("openwebtext_gpt2")
    runpy.run_path(tasks.__file__)  # imports the module once more
    assert seqio.get_mixture_or_task("openwebtext_gpt2") is theirs


def test_the_import_registers_every_corpus_and_opens_nothing(monkeypatch):
    registered = {"python_stdlib_bytes", "wikitext103_gpt2", "wikitext103_raw_gpt2", "openwebtext_gpt2"}
    assert registered <= set(seqio.TaskRegistry.names())
    opened, gpt2 = [], GPT2Tokenizer({bytes([b]): b for b in range(256)})
    monkeypatch.setattr(tasks, "open_tokenizer", lambda kind: opened.append(kind) or gpt2)
    vocabulary = tasks.TokenizerVocabulary("gpt2")
    assert vocabulary == seqio.get_mixture_or_task("openwebtext_gpt2").output_features["targets"].vocabulary
    assert not opened and vocabulary.encode("é") == [195, 169] and vocabulary.eos_id == 256 and opened == ["gpt2"]


def test_a_tokenizer_is_a_vocabulary():
    """Ids inside a pipeline and outside are the tokenizer's own; no id is padding, start or unknown."""
    for tokenizer in (ByteTokenizer(), GPT2Tokenizer({bytes([b]): b for b in range(256)} | {b"<|": 256})):
        vocabulary, text = tasks.TokenizerVocabulary(tokenizer), "naïve 🙂 <|endoftext|>!\0\0"
        ids = tokenizer.encode(text)
        assert vocabulary.encode(text) == ids and vocabulary.decode(ids) == text
        assert vocabulary.encode_tf(tf.constant(text)).numpy().tolist() == ids
        [inside] = tf.data.Dataset.from_tensors(text).map(vocabulary.encode_tf).as_numpy_iterator()
        assert inside.tolist() == ids and vocabulary.decode_tf(tf.constant(ids)).numpy().decode() == text
        assert (vocabulary.eos_id, vocabulary.bos_id, vocabulary.unk_id) == (tokenizer.end_of_text, None, None)
        assert vocabulary.vocab_size == tokenizer.vocab_size and vocabulary == tasks.TokenizerVocabulary(tokenizer)
    assert tasks.TokenizerVocabulary(ByteTokenizer()) != vocabulary


def test_a_corpus_without_text_or_name_is_said():
    with pytest.raises(UserError, match="^the task must be one of python_stdlib, .* but it is 'pile'"):
        corpora.SourceTexts("pile")
    with pytest.raises(UserError, match="^config.data.task: the examples .* have a 'text', but they have content$"):
        tasks.rekey(tf.data.Dataset.from_tensors({"content": "a"}))


def test_local_files_take_the_place_of_wikitext(tmp_path, monkeypatch):
    """WikiText articles, detokenized or not; unchanged rows of other files. One shard per file or group of files."""
    articles = [" = One = \n \n A well @-@ known thing , it was . \n \n", " = Two = \n \n Another . \n"]
    (tmp_path / "a.txt").write_text("".join(articles))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": " = Three = \n \n As it is , here . \n"}) + "\n")
    files = {"validation": [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]}

    def texts(corpus, **more):
        task = tasks.add_task(corpus, ByteTokenizer(), files)
        dataset = task.get_dataset(split="validation", sequence_length=None, shuffle=False, **more)
        return [example["targets_pretokenized"].decode() for example in dataset.as_numpy_iterator()]

    raw = texts("wikitext103_raw")
    assert raw[:2] == articles and raw[2].startswith(" = Three = ") and len(raw) == 3
    detokenized = texts("wikitext103")
    assert "A well-known thing, it was." in detokenized[0] and raw[2] == detokenized[2]
    assert [texts("wikitext103_raw", shard_info=seqio.ShardInfo(i, 2)) for i in (0, 1)] == [raw[:2], raw[2:]]
    assert len(texts("openwebtext")) == 2  # a text file is a document there
    monkeypatch.setattr("diffeqformer.data.sources.MOST_SHARDS", 2)
    files["validation"] = files["validation"][:1] * 2 + files["validation"][1:]
    assert len(tasks.LocalFiles(files).list_shards("validation")) == 2
    assert [texts("wikitext103_raw", shard_info=seqio.ShardInfo(i, 2)) for i in (0, 1)] == [raw[:2], raw]
    assert texts("wikitext103_raw") == raw[:2] + raw
