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
    path = os.pathsep.join([str(ROOT / "tests" / "without_seqio"), str(ROOT)])
    hidden = {"PYTHONPATH": path, "XLA_FLAGS": FAST_COMPILATION}
    command = [sys.executable, "-m", f"diffeqformer.{name}", *options]
    variables = os.environ | environment(home, address) | TFDS | hidden
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.long
def test_wikitext103_from_nothing(tmp_path):
    """Its store, training, and the test split at another depth."""
    hub = Hub()
    fill(hub)
    said = typed(tmp_path, hub.address, "prepare", "--config=wikitext103_small")
    assert "Preparing wikitext103 into token_stores/wikitext103-gpt2" in said
    said = typed(tmp_path, NOWHERE, "main", "--config=wikitext103_small", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/wikitext103_small" in said
    check_store(tmp_path, "wikitext103", DETOKENIZED)
    scored = "--split=test", "--num_steps=3", "--perplexity=paper"
    typed(tmp_path, NOWHERE, "evaluate", "--workdir=runs/wikitext103_small", *scored)
    [loss] = losses(tmp_path, "runs/wikitext103_small")
    assert 10 < loss < np.log(50257) + 0.5  # of a model that has seen four batches


@pytest.mark.long
def test_openwebtext_from_nothing(tmp_path):
    """Its store, the same without SeqIO, where a run makes it before it trains, and scores. Two pages validate."""
    home, light, hub = tmp_path / "home", tmp_path / "light", Hub()
    fill(hub)
    typed(home, hub.address, "prepare", "--config=large", *SMALL)
    said = typed_without_seqio(light, hub.address, "main", "--config=large", *SMALL, "--config.data.processes=2")
    assert "Preparing openwebtext into token_stores/openwebtext-gpt2" in said
    assert "\nFinished. Checkpoints and curves are in runs/large" in said
    rows = np.random.default_rng(2357).permutation(len(PAGES))[:2].tolist()
    texts = {"validation": [PAGES[row] for row in rows]}
    texts["train"] = [text for row, text in enumerate(PAGES) if row not in rows]
    for folder in (home, light):
        check_store(folder, "openwebtext", texts)
    ours, other = (read_about(folder / "token_stores/openwebtext-gpt2") for folder in (home, light))
    assert ours["origin"] == other["origin"] and len(other["splits"]["train"]["shards"]) == 2
    for split, entry in ours["splits"].items():  # however many shards
        assert all(other["splits"][split][key] == entry[key] for key in ("sha256", "tokens", "documents", "bytes"))
    record = "tfds/downloads/Skylion007/openwebtext/downloads.json"
    files = json.loads((home / record).read_text())
    assert len(files["files"]["train"]) == 2 and files == json.loads((light / record).read_text())
    for text in ([], ["--files="]):  # the ids of the store, and the data set
        typed(home, NOWHERE, "evaluate", "--workdir=../light/runs/large", "--perplexity=paper", *text)
    from_store, from_data_set = losses(light, "runs/large")
    assert from_data_set == pytest.approx(from_store, rel=1e-6)
    (home / "data").mkdir()
    (home / "data" / "logiqa_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGIQA))
    tasks = f"--include={ROOT}/diffeqformer/inference/task_files"
    assert "| LogiQA | 8 |" in typed(home, NOWHERE, "downstream", "--workdir=../light/runs/large", tasks)


@pytest.mark.long
def test_a_data_set_of_ones_own_whose_splits_are_known_once_it_is_written(tmp_path):
    """Here raw WikiText as the hub has it, put into the folder where TFDS looks before it downloads."""
    manual = tmp_path / "tfds/downloads/manual/wikitext103/raw"
    manual.mkdir(parents=True)
    for split, rows in RAW.items():
        (manual / f"{split}-00000-of-00001.parquet").write_bytes(parquet(rows))
    (tmp_path / "my_corpus.py").write_text(MY_CORPUS)
    mine = "--config.data.task=mine", "--config.data.module=my_corpus"
    assert "from our own" in typed(tmp_path, NOWHERE, "prepare", "--config=wikitext103_small", *mine)
    texts = {split: "".join(row or "\n" for row in rows) for split, rows in RAW.items()}
    check_store(tmp_path, "mine", {split: list(articles(text)) for split, text in texts.items()})


MY_CORPUS = """
import seqio
from diffeqformer.data.corpora import add_corpus

add_corpus("mine", seqio.TfdsDataSource("wikitext103/raw:1.0.0"), "our own")
"""
