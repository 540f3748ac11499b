"""Each corpus of the hub, from an empty folder to the scores of a trained model, by the commands that a user types.

Nothing stands in for a part of the program. The hub has small data sets under their real names, in their real form.
Where SeqIO isn't installed, the stores are the same.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from diffeqformer.data.store import open_store, read_about
from diffeqformer.data.tokenizers import GPT2Tokenizer
from diffeqformer.data.wikitext import articles
from flags import FAST_COMPILATION
from helpers import ROOT
from hub import Hub, parquet
from newcomer import DETOKENIZED, LOGIQA, PAGES, RAW, SMALL_MODEL, SMALL_RUN, environment, fill, gpt2_files
from notebooks import FOLDER, TRAIN, executed, opened_notebook
from runs import command

TFDS = {"TFDS_DATA_DIR": "tfds"}
SMALL = [*SMALL_MODEL, *SMALL_RUN]
NOWHERE = "http://127.0.0.1:9"


def typed(home: pathlib.Path, address: str, name: str, *options: str) -> str:
    """What `python -m diffeqformer.<name>` prints in a folder, with a hub at an address."""
    home.mkdir(exist_ok=True)
    done = command(name, *options, environment=environment(home, address) | TFDS, folder=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def typed_without_seqio(home: pathlib.Path, address: str, name: str, *options: str) -> str:
    """The same in processes that find neither SeqIO nor TensorFlow."""
    home.mkdir(exist_ok=True)
    hidden = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "without_seqio"), str(ROOT)])}
    command = [sys.executable, "-m", f"diffeqformer.{name}", *options]
    variables = os.environ | environment(home, address) | TFDS | hidden
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_same(one: pathlib.Path, other: pathlib.Path) -> None:
    """Check that two stores have the same ids, hashes, counts and origin, however many shards they have."""
    about, stores = [read_about(folder) for folder in (one, other)], [open_store(x, "gpt2", 32) for x in (one, other)]
    assert about[0]["origin"] == about[1]["origin"] and stores[0].keys() == stores[1].keys()
    for split in stores[0]:
        totals = [{key: store["splits"][split][key] for key in ("tokens", "documents", "bytes")} for store in about]
        empty = [sum(shard["empty"] for shard in store["splits"][split]["shards"]) for store in about]
        first, second = (store[split] for store in stores)
        assert first.sha256 == second.sha256 and totals[0] == totals[1] and empty[0] == empty[1]
        np.testing.assert_array_equal(first.ids(0, first.size), second.ids(0, second.size))


def check_store(home: pathlib.Path, task: str, texts: dict[str, list[str]]) -> None:
    """Check that a store has GPT-2's ids of these documents, each followed by end-of-text, and nothing else."""
    tokenizer = GPT2Tokenizer.open(str(gpt2_files()))
    splits = open_store(home / f"token_stores/{task}-gpt2", "gpt2", 32)
    assert tokenizer.encode("Hello world") == [15496, 995] and tokenizer.end_of_text == 50256
    for name, split in splits.items():
        ids = [i for text in texts[name] for i in [*tokenizer.encode(text), tokenizer.end_of_text]]
        np.testing.assert_array_equal(split.ids(0, split.size), ids)
        assert split.text_bytes == sum(len(text.encode()) for text in texts[name])


def losses(home: pathlib.Path, run: str) -> list[float]:
    """Those of all evaluations of a run, in nats per token."""
    reports = [json.loads(path.read_text()) for path in (home / run / "evaluation").rglob("results.json")]
    return [row["paper_loss"] for report in reports for row in report["rows"]]


def by_hand(home: pathlib.Path, corpus: str, files: dict[str, list[str]]) -> None:
    """Put Parquet files of these texts, under the hub's names, into the folder where TFDS looks before it downloads."""
    manual = home / "tfds/downloads/manual" / corpus
    manual.mkdir(parents=True)
    for name, texts in files.items():
        (manual / f"{name}-00000-of-00001.parquet").write_bytes(parquet(texts))


@pytest.mark.long
def test_wikitext103_from_nothing(tmp_path):
    """By hand: its store. By download: the same store, training, and the test split at another depth."""
    hand, home, hub = tmp_path / "hand", tmp_path / "download", Hub()
    by_hand(hand, "wikitext103/detokenized", DETOKENIZED)
    said = typed(hand, NOWHERE, "prepare", "--config=wikitext103_small")
    assert "Preparing wikitext103 into token_stores/wikitext103-gpt2" in said
    fill(hub)
    said = typed(home, hub.address, "main", "--config=wikitext103_small", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/wikitext103_small" in said
    for folder in (hand, home):
        check_store(folder, "wikitext103", DETOKENIZED)
    light, store = tmp_path / "light", "token_stores/wikitext103-gpt2"
    typed_without_seqio(light, hub.address, "prepare", "--config=wikitext103_small")
    check_same(light / store, home / store)
    record = "tfds/downloads/dlwh/wikitext_103_detokenized/downloads.json"
    assert json.loads((light / record).read_text()) == json.loads((home / record).read_text())
    assert not (light / "tfds/wikitext103").exists()  # TFDS' form of it
    scored = "--split=test", "--num_steps=3", "--perplexity=paper"
    typed(home, NOWHERE, "evaluate", "--workdir=runs/wikitext103_small", *scored)
    [loss] = losses(home, "runs/wikitext103_small")
    assert 10 < loss < np.log(50257) + 0.5  # of a model that has seen four batches


@pytest.mark.long
def test_openwebtext_from_nothing(tmp_path, monkeypatch):
    """By hand: its store, and training. By download: the same, and all that is done with a run. Two pages validate."""
    hand, home, hub = tmp_path / "hand", tmp_path / "download", Hub()
    by_hand(hand, "openwebtext", {"train": PAGES})
    typed(hand, NOWHERE, "prepare", "--config=small", *SMALL)
    assert "\nFinished." in typed(hand, NOWHERE, "main", "--config=small", *SMALL)
    fill(hub)
    said = typed(home, hub.address, "main", "--config=large", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/large" in said
    rows = np.random.default_rng(2357).permutation(len(PAGES))[:2].tolist()
    texts = {"validation": [PAGES[row] for row in rows]}
    texts["train"] = [text for row, text in enumerate(PAGES) if row not in rows]
    for folder in (hand, home):
        check_store(folder, "openwebtext", texts)
    light, store = tmp_path / "light", "token_stores/openwebtext-gpt2"
    typed_without_seqio(light, hub.address, "prepare", "--config=large", *SMALL, "--config.data.processes=2")
    check_same(light / store, home / store)
    assert len(read_about(light / store)["splits"]["train"]["shards"]) == 2
    record = json.loads((home / "tfds/downloads/Skylion007/openwebtext/downloads.json").read_text())
    assert len(record["files"]["train"]) == 2
    pretrain = "--config=finetune_openwebtext_to_wikitext103:pretrain"
    assert "\nFinished." in typed(home, NOWHERE, "main", pretrain, *SMALL)
    for text in ([], ["--files="]):  # the ids of the store, and the data set
        typed(home, NOWHERE, "evaluate", "--workdir=runs/large", "--perplexity=paper", *text)
    from_store, from_data_set = losses(home, "runs/large")
    assert from_data_set == pytest.approx(from_store, rel=1e-6)
    (home / "data").mkdir()
    (home / "data" / "logiqa_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGIQA))
    tasks = f"--include={ROOT}/diffeqformer/inference/task_files"
    assert "| LogiQA | 8 |" in typed(home, NOWHERE, "downstream", "--workdir=runs/large", tasks)
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILATION)
    shown = executed(opened_notebook(**{TRAIN: 'FROM = "folder"', FOLDER: 'CHECKPOINT = "runs/large"'}), home)
    assert "large: diffeqformer" in "".join(shown) and "data:image/png" in shown[-1]


@pytest.mark.long
def test_a_data_set_of_ones_own_whose_splits_are_known_once_it_is_written(tmp_path):
    """Here raw WikiText as the hub has it: a row for each line, with the tokens that it is published with.

    Without SeqIO, the corpus of ours with that text has the same ids.
    """
    by_hand(tmp_path, "wikitext103/raw", RAW)
    (tmp_path / "my_corpus.py").write_text(MY_CORPUS)
    mine = "--config.data.task=mine", "--config.data.module=my_corpus"
    assert "from our own" in typed(tmp_path, NOWHERE, "prepare", "--config=wikitext103_small", *mine)
    texts = {split: "".join(row or "\n" for row in rows) for split, rows in RAW.items()}
    check_store(tmp_path, "mine", {split: list(articles(text)) for split, text in texts.items()})
    raw = "--config.data.task=wikitext103_raw"
    typed_without_seqio(tmp_path, NOWHERE, "prepare", "--config=wikitext103_small", raw)
    stores = tmp_path / "token_stores"
    own, named = (open_store(stores / f"{task}-gpt2", "gpt2", 32) for task in ("mine", "wikitext103_raw"))
    assert {split: own[split].sha256 for split in own} == {split: named[split].sha256 for split in named}


MY_CORPUS = """
import seqio
from diffeqformer.data.corpora import add_corpus

add_corpus("mine", seqio.TfdsDataSource("wikitext103/raw:1.0.0"), "our own")
"""
