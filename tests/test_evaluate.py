"""Perplexities equal plain sums and training's own; the command reports what is wrong."""

import contextlib
import io
import itertools
import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from diffeqformer import evaluate as evaluation_command
from diffeqformer.checkpoints import checkpoint
from diffeqformer.console.results import results_folder
from diffeqformer.data.store import SPLITS
from diffeqformer.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference.perplexity import table
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import Transformer, split_model
from helpers import forward, lively_model, make_store, save_params, toy_config

TOKENIZER = ByteTokenizer()
DOCUMENTS = [
    "A first document, of our own.", "", " \u3000\n\x0b", "Another one: naïve 🙂, and a bit longer than the first.",
    "x", "two  spaces\nand lines",
]  # fmt: skip
NOT_BLANK = [text for text in DOCUMENTS if text.strip()]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("text") / "documents.jsonl", DOCUMENTS)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    config = toy_config("diffeqformer")
    workdir = tmp_path_factory.mktemp("runs") / "lively"
    save_params(workdir, config, {3: split_model(lively_model("diffeqformer", vocab_size=257))[1]})
    return workdir


@pytest.fixture(scope="module")
def results(workdir, text):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        score(workdir, files=str(text), solver=["euler", "rk4"], num_steps=["6", "3", "6"], window=8, stride=3)
    [folder] = (workdir / "evaluation" / "documents").iterdir()  # not beside the corpus's
    return said.getvalue(), json.loads((folder / "results.json").read_text()), folder


def score(workdir, **changes) -> dict:
    given = dict.fromkeys("step task files remote module window stride output text_field separator".split())
    given |= {"workdir": str(workdir), "split": "validation", "solver": [], "num_steps": [], "batch_size": 8}
    given |= {"perplexity": "both", "per_document": False}
    return evaluation_command.score_checkpoint(types.SimpleNamespace(**given | changes))


def losses_of(model: Transformer, solver: str, num_steps: int):
    """-log p of each of up to nine ids except the first, given all earlier ones, from a plain forward pass."""
    model = model.replace(solver=SOLVERS[solver])

    def losses(ids: list[int]) -> np.ndarray:
        logits = forward(model, jnp.array([(ids[:-1] + [0] * 8)[:8]]), num_steps)[0]
        log_probs = log_softmax(np.float64(logits), axis=-1)
        return -log_probs[np.arange(len(ids) - 1), ids[1:]]

    return losses


@pytest.mark.long
def test_perplexities_are_those_of_plain_sums(workdir, text, results):
    model, end = checkpoint.load(workdir).model, TOKENIZER.end_of_text
    for row, how in zip(results[1]["rows"], itertools.product(("euler", "rk4"), (6, 3)), strict=True):
        assert (row["solver"], row["num_steps"]) == how
        losses_of_ids = losses_of(model, *how)
        stream = [i for text in NOT_BLANK for i in [*TOKENIZER.encode(text), end]]
        windows = [stream[start : start + 8] for start in range(0, len(stream) - 7, 8)]
        losses = np.concatenate([losses_of_ids(window) for window in windows])
        assert row["paper_perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
        assert row["paper_tokens"] == len(losses) == 7 * (len(stream) // 8)

        total = 0.0
        for text in NOT_BLANK:
            ids = [end, *TOKENIZER.encode(text)]
            done = 0
            while done < len(ids) - 1:
                stop = min(len(ids) - 1, done + (3 if done else 8))
                total += losses_of_ids(ids[max(0, stop - 8) : stop + 1])[-(stop - done) :].sum()
                done = stop
        size, words = len("".join(NOT_BLANK).encode()), sum(len(text.split()) for text in NOT_BLANK)
        assert (row["tokens"], row["bytes"], row["words"], row["documents"]) == (size, size, words, 4)
        assert row["perplexity"] == pytest.approx(math.exp(total / size), rel=1e-4)
        assert row["word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-3)
        assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-4)


@pytest.mark.long
def test_results_are_shown(results):
    shown, kept, folder = results
    assert (folder / "perplexity.png").stat().st_size > 10_000
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith(("| euler", "| rk4"))]
    assert [row[:2] for row in rows] == [["| euler", "6"], ["| euler", "3"], ["| rk4", "6"], ["| rk4", "3"]]
    assert rows[2][3] == f"{kept['rows'][2]['perplexity']:,.2f}"


def test_what_cannot_be_scored_is_one_sentence(workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    for changes, sentence in (
        ({"stride": 17}, "--stride: must be at least 1 and at most 16"),
        ({"solver": ["rk3"]}, "--solver: must be one of euler, midpoint, .*'rk3'"),
        ({"perplexity": "paper", "per_document": True}, "--per_document: "),
        ({"files": "blank.txt", "module": "b"}, "--module: must be left out with --files"),
        ({"files": "blank.txt", "perplexity": "full"}, "blank.txt: there is nothing in it but white space"),
        ({"files": "", "task": "pile"}, ".*must be one of python_stdlib"),
        ({"files": "", "split": "test"}, "--split: python_stdlib has train, validation"),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            score(workdir, **changes)


@pytest.mark.long
def test_results_are_never_overwritten_and_stay_on_this_machine(results, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds results already"):
        results_folder(str(results[2]), str(tmp_path))
    assert len({results_folder(None, str(tmp_path), "evaluation") for _ in range(3)}) == 3  # in one second
    monkeypatch.chdir(tmp_path)
    assert str(results_folder(None, "gs://bucket/some/run", "evaluation").parent) == "runs/run/evaluation"
    with pytest.raises(UserError, match="^--output: must be a folder of this machine"):
        results_folder("gs://bucket/results", str(tmp_path))


@pytest.mark.long
def test_a_corpus_is_scored_from_the_trainings_store(results, tmp_path, capsys):
    """Here at a URL: with the numbers of the same text in a file, with nothing downloaded, and nothing written."""
    store = tmp_path / "there" / "python_stdlib-bytes"
    about = make_store(store, {"train": [["other text"]], "validation": [NOT_BLANK[:1], NOT_BLANK[1:]]})
    about["splits"]["validation"]["bytes"] *= 2  # as of a text that the tokenizer has normalized
    (store / "store.json").write_text(json.dumps(about))
    config = toy_config("diffeqformer", data__dir=f"{tmp_path}/absent")
    sha256 = about["splits"]["train"]["sha256"]
    params = split_model(lively_model("diffeqformer", vocab_size=257))[1]
    save_params(tmp_path / "run", config, {3: params}, data_sha256=sha256)
    remote = f"file://{store.parent}"
    [row] = score(tmp_path / "run", output=str(tmp_path / "out"), window=8, stride=3, remote=remote)["rows"]
    assert f"that of the token store {remote}/python_stdlib-bytes;" in capsys.readouterr().out
    expected = dict(results[1]["rows"][0])
    numbers = [name for name, value in expected.items() if name != "milliseconds_per_window" and value != "euler"]
    assert len(numbers) == 12 and row.keys() == expected.keys()
    expected |= {"bytes": 2 * expected["bytes"], "bits_per_byte": expected["bits_per_byte"] / 2}
    assert [row[name] for name in numbers] == pytest.approx([expected[name] for name in numbers], rel=1e-6)
    assert not (tmp_path / "absent").exists()


@pytest.mark.long
def test_a_short_text_has_the_full_perplexity_alone(workdir, tmp_path):
    short = str(write_lines(tmp_path / "short.jsonl", ["x", "short"]))
    with pytest.raises(UserError, match="short.jsonl has 8 tokens, fewer than one window of 16"):
        score(workdir, files=short)
    how = {"files": short, "perplexity": "full", "num_steps": ["6", "3"], "output": str(tmp_path / "full")}
    results = score(workdir, **how, per_document=True)
    lines = [json.loads(line) for line in (tmp_path / "full" / "documents.jsonl").read_text().splitlines()]
    assert [(line["num_steps"], line["document"], line["bytes"]) for line in lines] == [
        (6, 0, 1), (6, 1, 5), (3, 0, 1), (3, 1, 5)
    ]  # fmt: skip
    for row, (one, two) in zip(results["rows"], (lines[:2], lines[2:])):
        assert one["tokens"] == 1 and two["bits_per_byte"] == pytest.approx(two["nats"] / math.log(2) / 5)
        assert (one["nats"] + two["nats"]) / 6 == pytest.approx(row["loss"])


@pytest.mark.long
def test_what_the_tokenizer_loses_is_counted_and_shown(lossy_file, tmp_path):
    tokenizer = SentencePieceTokenizer.open(str(lossy_file))
    texts = ["A cat sees the red thing.", "A dog\nsees it.", "Кот.", "A cat"]
    about = make_store(tmp_path / f"python_stdlib-{tokenizer.name}", dict.fromkeys(SPLITS, [texts]), tokenizer)
    about["splits"]["validation"] |= {"unknown": 1, "altered": 2}
    (tmp_path / f"python_stdlib-{tokenizer.name}" / "store.json").write_text(json.dumps(about))
    write_lines(tmp_path / "a.jsonl", texts)
    config = toy_config(model__vocab_size=tokenizer.vocab_size, data__dir=str(tmp_path))
    params = split_model(lively_model("diffeqformer", vocab_size=tokenizer.vocab_size))[1]
    named = {"tokenizer": tokenizer.name, "tokenizer_data": tokenizer.save()}
    save_params(tmp_path / "run", config, {3: params}, **named, data_sha256=about["splits"]["train"]["sha256"])
    for changes in ({"files": f"{tmp_path}/a.jsonl", "window": 2}, {"perplexity": "paper", "window": 8}):
        results = score(tmp_path / "run", **changes)
        assert (results["unknown_tokens"], results["altered_documents"]) == (1, 2)
        assert "loses text: 1 unknown id and 2 documents" in table(results)
        [row] = results["rows"]
        assert ("bits_per_byte" in row) == ("word_perplexity" in row) == ("perplexity" not in changes)
        assert math.isnan(row.get("bits_per_byte", math.nan)) and math.isnan(row.get("word_perplexity", math.nan))
        assert row["paper_perplexity"] > 1
