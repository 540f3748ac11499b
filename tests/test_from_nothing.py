"""Each corpus of the hub, from an empty folder to the scores of a trained model, by the commands that a user types.

Nothing stands in for a part of the program. The hub has small data sets under their real names, in their real form.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from diffeqformer.data.store import open_store
from diffeqformer.data.tokenizers import GPT2Tokenizer
from diffeqformer.data.wikitext import articles
from flags import FAST_COMPILATION
from helpers import ROOT
from hub import Hub, parquet
from newcomer import DETOKENIZED, PAGES, RAW, SMALL_MODEL, SMALL_RUN, environment, fill, gpt2_files
from runs import command

SMALL = [*SMALL_MODEL, *SMALL_RUN]


def typed(home: pathlib.Path, address: str, name: str, *options: str) -> str:
    """What `python -m diffeqformer.<name>` prints in an empty home, in a process of its own."""
    import time; t=time.time()
    variables = {**os.environ, **environment(home, address), "XLA_FLAGS": FAST_COMPILATION}
    line = [sys.executable, "-m", f"diffeqformer.{name}", *options]
    done = subprocess.run(line, cwd=home, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(name, time.time()-t)
    return done.stdout


def quickly(home: pathlib.Path, address: str, name: str, *options: str) -> str:
    """The same in a fork of a process that has the imports done."""
    import time; t=time.time()
    done = command(name, *options, environment=environment(home, address), folder=home)
    assert done.returncode == 0, done.stderr
    print(name, options[:1],time.time()-t)
    return done.stdout


def check_store(home: pathlib.Path, task: str, texts: dict[str, list[str]]) -> None:
    """Check that a store has GPT-2's ids of these documents, each followed by end-of-text, and nothing else."""
    tokenizer, splits = GPT2Tokenizer.open(str(gpt2_files())), open_store(home / f"token_stores/{task}-gpt2", "gpt2", 32)
    assert tokenizer.encode("Hello world") == [15496, 995] and tokenizer.end_of_text == 50256
    for name, split in splits.items():
        ids = [i for text in texts[name] for i in [*tokenizer.encode(text), tokenizer.end_of_text]]
        np.testing.assert_array_equal(split.ids(0, split.size), ids)
        assert split.text_bytes == sum(len(text.encode()) for text in texts[name])


def bits_per_byte(home: pathlib.Path, run: str) -> list[float]:
    """Those of all evaluations of a run."""
    reports = [json.loads(path.read_text()) for path in (home / run / "evaluation").rglob("results.json")]
    return [row["bits_per_byte"] for report in reports for row in report["rows"]]


@pytest.mark.long
def test_wikitext_by_hand(tmp_path):
    """The hub's files in TFDS' folder for them, and no network: store, training, test split, another depth."""
    nowhere, manual = "http://127.0.0.1:9", tmp_path / "tensorflow_datasets/downloads/manual/wikitext103/detokenized"
    manual.mkdir(parents=True)
    for split, texts in DETOKENIZED.items():
        (manual / f"{split}-00000-of-00001.parquet").write_bytes(parquet(texts))
    said = typed(tmp_path, nowhere, "prepare", "--config=wikitext103_small")
    assert "Preparing wikitext103 into token_stores/wikitext103-gpt2" in said
    check_store(tmp_path, "wikitext103", DETOKENIZED)
    said = quickly(tmp_path, nowhere, "main", "--config=wikitext103_small", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/wikitext103_small" in said
    typed(tmp_path, nowhere, "evaluate", "--workdir=runs/wikitext103_small", "--split=test", "--num_steps=3")
    [bits] = bits_per_byte(tmp_path, "runs/wikitext103_small")
    assert 3 < bits < 5  # of a model that has seen four batches


@pytest.mark.long
def test_openwebtext_by_download(tmp_path):
    """The card's own command in an empty folder, then all else that is done with a run. A part of text is kept apart."""
    hub = Hub()
    fill(hub)
    said = quickly(tmp_path, hub.address, "main", "--config=large", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/large" in said
    rows = np.random.default_rng(2357).permutation(len(PAGES))[:2].tolist()
    texts = {"validation": [PAGES[row] for row in rows]}
    texts["train"] = [text for row, text in enumerate(PAGES) if row not in rows]
    check_store(tmp_path, "openwebtext", texts)
    record = json.loads((tmp_path / "tensorflow_datasets/downloads/openwebtext.downloads.json").read_text())
    assert len(record) == 2 and all(entry["stated_by_hub"] for entry in record.values())
    hub.datasets.clear()  # from here on nothing is asked of it
    for config in ("small", "finetune_openwebtext_to_wikitext103:pretrain"):
        assert "\nFinished." in quickly(tmp_path, hub.address, "main", f"--config={config}", *SMALL)
    typed(tmp_path, hub.address, "evaluate", "--workdir=runs/large", "--files=")  # from the data set, not the store
    typed(tmp_path, hub.address, "evaluate", "--workdir=runs/large")
    from_data_set, from_store = bits_per_byte(tmp_path, "runs/large")
    assert from_data_set == pytest.approx(from_store, rel=1e-6)
    quickly(tmp_path, hub.address, "downstream", "--workdir=runs/large", f"--include={ROOT}/tests/data/tasks", "--shots=0")


@pytest.mark.long
def test_raw_wikitext_by_download(tmp_path):
    """As the hub has it: a row for each line, with the tokens that WikiText is published with."""
    hub = Hub()
    fill(hub)
    typed(tmp_path, hub.address, "prepare", "--config=wikitext103_small", "--config.data.task=wikitext103_raw")
    texts = {split: ["".join(row or "\n" for row in rows)] for split, rows in RAW.items()}
    check_store(tmp_path, "wikitext103_raw", {split: list(articles(text)) for split, [text] in texts.items()})
