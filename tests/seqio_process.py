"""Tests of the corpora as anybody uses them with SeqIO, whose defaults shuffle; `test_builders.py` runs them.

They run in a process with TensorFlow, on files in TFDS' folder for them.
"""

import math
import pathlib
import tempfile

import numpy as np
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from diffeqformer.data import sources, tasks
from diffeqformer.data.perplexities import WITHHELD, text_results, window_results
from diffeqformer.data.tokenizers import GPT2Tokenizer
from hub import parquet
from newcomer import DETOKENIZED, PAGES, gpt2_files

TFDS = pathlib.Path(tempfile.mkdtemp())
WINDOW = {"targets": 64}
GPT2 = GPT2Tokenizer.open(str(gpt2_files()))
LOG_PROBABILITIES = np.random.RandomState(0).uniform(-9, -1, 997)


@pytest.fixture(scope="module", autouse=True)
def corpora():
    """Both corpora in TFDS' manual folder, and nothing else. TFDS writes OpenWebText into two files."""
    manual = TFDS / "downloads" / "manual"
    for split, texts in DETOKENIZED.items():
        path = manual / "wikitext103" / "detokenized" / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(parquet([f"! {texts[0]}", " \n", *texts[1:]]))  # "!" is id 0; blank ones are left out
    (manual / "openwebtext").mkdir()
    (manual / "openwebtext" / "0.parquet").write_bytes(parquet(page[-200:] for page in PAGES[:400]))
    seqio.set_tfds_data_dir_override(str(TFDS))
    config = tfds.download.DownloadConfig(manual_dir=manual, num_shards=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "VALIDATION_FRACTION", 0.01)
        patch.setattr(tasks, "open_tokenizer", lambda kind: GPT2)  # where GPT-2's files come from is tested elsewhere
        tfds.builder("openwebtext", data_dir=TFDS).download_and_prepare(download_config=config)
        yield


def ids_of(dataset: tf.data.Dataset, name: str = "targets") -> list[list[int]]:
    return [example[name].tolist() for example in dataset.as_numpy_iterator()]


def stream(texts: list[str]) -> list[int]:
    """The ids of documents, each followed by end-of-text."""
    return [i for text in texts for i in [*GPT2.encode(text), GPT2.end_of_text]]


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


def evaluated(name: str, **how) -> dict[str, dict[str, float]]:
    futures, _ = seqio.Evaluator(name, tasks.CONVERTER, **how).evaluate(compute_metrics=True, score_fn=score)
    return futures.result()


def test_nothing_is_read_before_a_task_is_used():
    """Not even for the names of the splits or a description."""
    task = seqio.get_mixture_or_task("wikitext103_gpt2")
    assert set(task.splits) == {"train", "validation", "test"} and "wikitext103" in str(task)
    assert not (TFDS / "wikitext103").exists()


def test_by_default_windows_are_shuffled_and_none_is_lost():
    task = seqio.get_mixture_or_task("openwebtext_gpt2")
    in_order = ids_of(task.get_dataset(WINDOW, shuffle=False))
    shuffled = ids_of(task.get_dataset(WINDOW, seed=1))
    assert shuffled == ids_of(task.get_dataset(WINDOW, seed=1)) != ids_of(task.get_dataset(WINDOW, seed=2))
    assert {len(window) for window in shuffled} == {64} and len(shuffled) == len(in_order) > 100
    documents = ids_of(task.get_dataset(shuffle=False))
    assert [i for window in in_order for i in window] == [i for ids in documents for i in ids][: 64 * len(in_order)]
    assert sorted(documents) == sorted(ids_of(task.get_dataset())) != documents
    left_out = sources.validation_rows(400).tolist()  # the order survives several files
    assert documents == [stream([page[-200:]]) for row, page in enumerate(PAGES[:400]) if row not in left_out]
    assert all(ids[-1] == GPT2.end_of_text for ids in documents)


def test_documents_without_shuffling_are_in_the_order_of_the_source():
    texts = DETOKENIZED["train"]
    documents = ids_of(seqio.get_mixture_or_task("wikitext103_gpt2").get_dataset(shuffle=False))
    assert documents == [stream([text]) for text in (f"! {texts[0]}", *texts[1:])]


@pytest.mark.parametrize("shuffle, count", [(False, 2), (True, 3)])
def test_shards_part_the_documents(shuffle, count):
    """Two parts are the two files; three are cut from all documents, of which each part needs the same order."""
    task, how = seqio.get_mixture_or_task("openwebtext_gpt2"), {"shuffle": shuffle, "seed": 0}
    whole = sorted(ids_of(task.get_dataset(shuffle=False)))
    parts = [ids_of(task.get_dataset(shard_info=seqio.ShardInfo(i, count), **how)) for i in range(count)]
    assert min(map(len, parts)) > 70 and sorted(ids for part in parts for ids in part) == whole


def test_shuffling_mixes_files():
    """The first documents come from both files, and the first of all from either."""
    task = seqio.get_mixture_or_task("openwebtext_gpt2")
    place = {tuple(ids): number for number, ids in enumerate(ids_of(task.get_dataset(shuffle=False)))}
    first = [ids_of(task.get_dataset(shuffle_buffer_size=1, seed=seed).take(100)) for seed in range(8)]
    second_file = [[place[tuple(ids)] >= len(place) // 2 for ids in documents] for documents in first]
    assert set(second_file[0]) == {part[0] for part in second_file} == {True, False}


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
    [found] = evaluated("wikitext103_gpt2", sequence_length=WINDOW).values()
    expected = window_results(total, 63 * len(windows))
    assert found["perplexity"] == pytest.approx(expected["paper_perplexity"]) and found["tokens"] == 63 * len(windows)
    size = sum(len(GPT2.decode_bytes(window[1:])) for window in windows)
    assert found["bits_per_byte"] == pytest.approx(-total / math.log(2) / size)


def test_an_evaluator_measures_documents_per_token_word_and_byte():
    texts = [f"! {DETOKENIZED['test'][0]}", *DETOKENIZED["test"][1:]]
    documents = [stream([text]) for text in texts]
    total = sum(log_probability(*pair) for ids in documents for pair in zip(ids, ids[1:]))
    texts[0] = texts[0][1:]
    firsts = [len(GPT2.decode_bytes(ids[:1])) for ids in documents]
    size = 1 + sum(len(text.encode()) for text in texts) - sum(firsts)
    words = sum(len(GPT2.decode(ids[1:]).split()) for ids in documents)
    [found] = evaluated("wikitext103_gpt2", eval_split="test").values()
    expected = text_results(total, sum(map(len, documents)) - len(documents), words, size)
    assert found == pytest.approx(expected)


def test_unknown_ids_withhold_what_is_divided_by_words_or_bytes():
    scores = dict(log_likelihood=-3.0, tokens=2, words=1, bytes=5)
    known, unknown = (tasks.Perplexity(**scores, unknown=number).merge(tasks.Perplexity.empty()) for number in (0, 1))
    assert known.compute() | WITHHELD == pytest.approx(unknown.compute(), nan_ok=True)
    assert not math.isnan(known.compute()["bits_per_byte"])


def test_parts_of_a_metric_add_up():
    """For evaluators that score a batch at a time, and those that leave examples out."""
    features = seqio.get_mixture_or_task("wikitext103_gpt2").output_features
    examples = [{"targets": np.array(stream([f"{number} kettles, émigrés"]))} for number in range(4)]

    def measured(part, scores, **how):
        return tasks.Perplexity.from_model_output(part, scores, features, **how)

    whole = measured(examples, [-1.0, -2.0, -3.0, -4.0])
    both = measured(examples[:1], [-1.0]).merge(measured(examples[1:], [-2.0, -3.0, -4.0]))
    nothing = tasks.Perplexity.empty()
    assert math.isnan(nothing.compute()["perplexity"]) and math.isnan(nothing.compute()["word_perplexity"])
    assert both.merge(nothing) == whole and whole.compute()["words"] == 8
    kept = np.array([True, False, False, True])
    assert measured(examples, [-1.0, 9, 9, -4.0], mask=kept) == measured(examples[::3], [-1.0, -4.0])
