"""Tests of the corpora as anybody uses them with SeqIO; `test_sources.py` runs them in a process with TensorFlow."""

import json
import math
import pathlib
import tempfile

import numpy as np
import pytest
import seqio
import tensorflow as tf

from diffeqformer.data import tasks, texts
from diffeqformer.data.perplexities import WITHHELD, text_results, window_results
from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from diffeqformer.errors import UserError
from hub import parquet
from newcomer import DETOKENIZED, PAGES, gpt2_files

TFDS = pathlib.Path(tempfile.mkdtemp())
WINDOW = {"targets": 64}
GPT2 = GPT2Tokenizer.open(str(gpt2_files()))
LOG_PROBABILITIES = np.random.RandomState(0).uniform(-9, -1, 997)


@pytest.fixture(scope="module", autouse=True)
def files():
    """The files of two corpora in the manual folder, OpenWebText in two, and nothing else."""
    manual = TFDS / "downloads" / "manual"
    for folder in ("wikitext103/detokenized", "openwebtext"):
        (manual / folder).mkdir(parents=True)
    for split, documents in DETOKENIZED.items():
        content = parquet([f"! {documents[0]}", " \n", *documents[1:]])  # "!" is id 0; blank ones are left out
        (manual / "wikitext103" / "detokenized" / f"{split}.parquet").write_bytes(content)
    for name, pages in (("0", PAGES[:200]), ("1", PAGES[200:400])):
        (manual / "openwebtext" / f"{name}.parquet").write_bytes(parquet(page[-200:] for page in pages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(TFDS))
        patch.setattr(texts, "VALIDATION_FRACTION", 0.01)
        patch.setattr(tasks, "open_tokenizer", lambda kind: {"bytes": ByteTokenizer(), "gpt2": GPT2}[kind])
        yield


def ids_of(dataset: tf.data.Dataset, name: str = "targets") -> list[list[int]]:
    return [example[name].tolist() for example in dataset.as_numpy_iterator()]


def stream(documents: list[str]) -> list[int]:
    """The ids of documents, each followed by end-of-text."""
    return [i for text in documents for i in [*GPT2.encode(text), GPT2.end_of_text]]


def log_probability(before: int, after: int) -> float:
    """That of a model which looks at the last id alone."""
    return LOG_PROBABILITIES[(31 * before + after) % 997]


def score(dataset: tf.data.Dataset) -> list[tuple[int, float]]:
    """The sum over what a converter gives weight, as any program would form it."""
    found = []
    for index, example in dataset.as_numpy_iterator():
        columns = (example[f"decoder_{name}"] for name in ("input_tokens", "target_tokens", "loss_weights"))
        found.append((int(index), sum(weight * log_probability(a, b) for a, b, weight in zip(*columns))))
    return found


def evaluated(name: str, **how) -> dict[str, float]:
    futures, _ = seqio.Evaluator(name, tasks.CONVERTER, **how).evaluate(compute_metrics=True, score_fn=score)
    [found] = futures.result().values()
    return found


def test_the_standard_library_task_agrees_with_its_files():
    train, validation = (texts.stdlib_files(split) for split in ("train", "validation"))
    assert not set(train) & set(validation) and not any("test" in path.parts for path in train + validation)
    task = seqio.get_mixture_or_task("python_stdlib_bytes")
    first = next(iter(task.get_dataset(split="validation", sequence_length=None, shuffle=False).as_numpy_iterator()))
    text = validation[0].read_bytes()
    assert bytes(first["targets"][:-1].astype(np.uint8)) == text == first["targets_pretokenized"]
    assert first["targets"][-1] == task.output_features["targets"].vocabulary.eos_id == 256


def test_by_default_windows_are_shuffled_and_none_is_lost():
    task = seqio.get_mixture_or_task("openwebtext_gpt2")
    in_order = ids_of(task.get_dataset(WINDOW, shuffle=False))
    shuffled = ids_of(task.get_dataset(WINDOW, seed=1))
    assert shuffled == ids_of(task.get_dataset(WINDOW, seed=1)) != ids_of(task.get_dataset(WINDOW, seed=2))
    assert {len(window) for window in shuffled} == {64} and len(shuffled) == len(in_order) > 100
    documents = ids_of(task.get_dataset(shuffle=False))
    assert [i for window in in_order for i in window] == [i for ids in documents for i in ids][: 64 * len(in_order)]
    assert sorted(documents) == sorted(ids_of(task.get_dataset())) != documents
    left_out = texts.validation_rows(400).tolist()  # the order survives several files
    assert documents == [stream([page[-200:]]) for row, page in enumerate(PAGES[:400]) if row not in left_out]


@pytest.mark.parametrize("shuffle, count", [(False, 2), (True, 3)])
def test_shards_part_the_documents(shuffle, count):
    """Two parts are the two files; three are cut from all documents, of which each part needs the same order."""
    task, how = seqio.get_mixture_or_task("openwebtext_gpt2"), {"shuffle": shuffle, "seed": 0}
    whole = sorted(ids_of(task.get_dataset(shuffle=False)))
    parts = [ids_of(task.get_dataset(shard_info=seqio.ShardInfo(i, count), **how)) for i in range(count)]
    assert min(map(len, parts)) > 70 and sorted(ids for part in parts for ids in part) == whole


def test_every_id_but_the_first_has_weight_by_its_place():
    """Also id 0, GPT-2's "!", which SeqIO's own converter takes for padding."""
    [first] = seqio.get_dataset("wikitext103_gpt2", WINDOW, tasks.CONVERTER).take(1).as_numpy_iterator()
    ids = stream([f"! {DETOKENIZED['train'][0]}"])[:64]
    assert first["decoder_input_tokens"].tolist() == ids and ids[0] == 0
    assert first["decoder_target_tokens"].tolist() == [*ids[1:], 0]
    assert first["decoder_loss_weights"].tolist() == 63 * [1] + [0]
    task = tf.data.Dataset.from_tensors({"targets": tf.constant([5, 0, 7], tf.int32)})
    ours, stock = (converter(task, {"targets": 5}) for converter in (tasks.CONVERTER, seqio.LMFeatureConverter(False)))
    assert ids_of(ours, "decoder_target_tokens") == [[0, 7, 0, 0, 0]]
    assert ids_of(ours, "decoder_loss_weights") == [[1, 1, 0, 0, 0]]
    assert ids_of(stock, "decoder_loss_weights") == [[1, 0, 1, 0, 0]]  # "!" isn't learnt, but the first id is scored


def test_an_evaluator_measures_the_papers_perplexity_of_windows():
    ids = stream([f"! {DETOKENIZED['validation'][0]}", *DETOKENIZED["validation"][1:]])
    windows = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)]
    total = sum(log_probability(*pair) for window in windows for pair in zip(window, window[1:]))
    found = evaluated("wikitext103_gpt2", sequence_length=WINDOW)
    expected = window_results(total, 63 * len(windows))
    assert found["perplexity"] == pytest.approx(expected["paper_perplexity"]) and found["tokens"] == 63 * len(windows)
    size = sum(len(GPT2.decode_bytes(window[1:])) for window in windows)
    assert found["bits_per_byte"] == pytest.approx(-total / math.log(2) / size)


def test_an_evaluator_measures_documents_per_token_word_and_byte():
    documents = [stream([text]) for text in (f"! {DETOKENIZED['test'][0]}", *DETOKENIZED["test"][1:])]
    task = seqio.get_mixture_or_task("wikitext103_gpt2")
    assert documents == ids_of(task.get_dataset(split="test", shuffle=False))
    total = sum(log_probability(*pair) for ids in documents for pair in zip(ids, ids[1:]))
    scored = [GPT2.decode(ids[1:]) for ids in documents]
    size, words = (sum(len(part) for part in parts) for parts in (map(str.encode, scored), map(str.split, scored)))
    expected = text_results(total, sum(map(len, documents)) - len(documents), words, size)
    assert evaluated("wikitext103_gpt2", eval_split="test") == pytest.approx(expected)


def test_parts_of_a_metric_add_up_and_unknown_ids_withhold_what_is_divided_by_words_or_bytes():
    """For evaluators that score a batch at a time, and those that leave examples out."""
    features = seqio.get_mixture_or_task("wikitext103_gpt2").output_features
    examples = [{"targets": np.array(stream([f"{number} kettles, émigrés"]))} for number in range(4)]

    def measured(part, scores, **how):
        return tasks.Perplexity.from_model_output(part, scores, features, **how)

    whole = measured(examples, [-1.0, -2.0, -3.0, -4.0])
    both = measured(examples[:1], [-1.0]).merge(measured(examples[1:], [-2.0, -3.0, -4.0]))
    assert both.merge(tasks.Perplexity.empty()) == whole and whole.compute()["words"] == 8
    kept = np.array([True, False, False, True])
    assert measured(examples, [-1.0, 9, 9, -4.0], mask=kept) == measured(examples[::3], [-1.0, -4.0])
    assert math.isnan(tasks.Perplexity.empty().compute()["word_perplexity"])
    unknown = whole.merge(tasks.Perplexity(unknown=1)).compute()
    assert unknown == pytest.approx(whole.compute() | WITHHELD, nan_ok=True)


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


def test_a_corpus_without_text_is_said():
    with pytest.raises(UserError, match="^config.data.task: the examples .* they have content$"):
        tasks.rekey(tf.data.Dataset.from_tensors({"content": "a"}))


def test_local_files_take_the_place_of_a_corpus(tmp_path):
    """Plain text is cut as the corpus is, rows of other files stay as they are."""
    articles = [" = One = \n \n A well @-@ known thing , it was . \n \n", " = Two = \n \n Another . \n"]
    (tmp_path / "a.txt").write_text("".join(articles))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "As it is , here ."}) + "\n")
    names = {"validation": [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]}
    prose = ["= One =\n\nA well-known thing, it was.\n\n", "= Two =\n\nAnother.\n"]
    for corpus, cut in (("wikitext103", prose), ("wikitext103_raw", articles), ("openwebtext", ["".join(articles)])):
        task = tasks.add_task(corpus, ByteTokenizer(), names)
        found = ids_of(task.get_dataset(split="validation", shuffle=False))
        assert found == [[*text.encode(), 256] for text in [*cut, "As it is , here ."]]
