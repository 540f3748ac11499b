"""Each corpus of the hub, from an empty folder to the scores of a trained model, by the commands that a user types.

Nothing stands in for a part of the program. The hub has small data sets under their real names, in their real form.
"""

import json
import pathlib

import numpy as np
import pytest

from diffeqformer.data.store import open_store
from diffeqformer.data.tokenizers import GPT2Tokenizer
from diffeqformer.data.wikitext import articles
from flags import FAST_COMPILATION
from helpers import ROOT
from hub import Hub, parquet
from newcomer import DETOKENIZED, LOGIQA, PAGES, RAW, SMALL_MODEL, SMALL_RUN, environment, fill, gpt2_files
from notebooks import FOLDER, TRAIN, executed, opened_notebook
from runs import command

SMALL = [*SMALL_MODEL, *SMALL_RUN, "--config.data.tfds_dir=tfds"]


def typed(home: pathlib.Path, address: str, name: str, *options: str) -> str:
    """What `python -m diffeqformer.<name>` prints in a folder, with a hub at an address."""
    done = command(name, *options, environment=environment(home, address), folder=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_store(home: pathlib.Path, task: str, texts: dict[str, list[str]]) -> None:
    """Check that a store has GPT-2's ids of these documents, each followed by end-of-text, and nothing else."""
    tokenizer, splits = (
        GPT2Tokenizer.open(str(gpt2_files())),
        open_store(home / f"token_stores/{task}-gpt2", "gpt2", 32),
    )
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
def test_wikitext_by_hand(tmp_path):
    """The hub's files in TFDS' folder for them, and no network: store, training, test split at another depth."""
    nowhere, manual = "http://127.0.0.1:9", tmp_path / "tfds/downloads/manual/wikitext103/detokenized"
    manual.mkdir(parents=True)
    for split, texts in DETOKENIZED.items():
        (manual / f"{split}-00000-of-00001.parquet").write_bytes(parquet(texts))
    said = typed(tmp_path, nowhere, "prepare", "--config=wikitext103_small", "--config.data.tfds_dir=tfds")
    assert "Preparing wikitext103 into token_stores/wikitext103-gpt2" in said
    check_store(tmp_path, "wikitext103", DETOKENIZED)
    said = typed(tmp_path, nowhere, "main", "--config=wikitext103_small", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/wikitext103_small" in said
    scored = "--split=test", "--num_steps=3", "--perplexity=paper"
    typed(tmp_path, nowhere, "evaluate", "--workdir=runs/wikitext103_small", *scored)
    [loss] = losses(tmp_path, "runs/wikitext103_small")
    assert 10 < loss < np.log(50257) + 0.5  # of a model that has seen four batches


@pytest.mark.long
def test_a_data_set_of_ones_own_whose_splits_are_known_once_it_is_written(tmp_path):
    manual = tmp_path / "tfds/downloads/manual/wikitext103/raw"
    manual.mkdir(parents=True)
    for split, rows in RAW.items():
        (manual / f"{split}.parquet").write_bytes(parquet(rows))
    source = "seqio.TfdsDataSource('wikitext103/raw:1.0.0')"
    module = (
        f"import seqio\nfrom diffeqformer.data.corpora import add_corpus\nadd_corpus('mine', {source}, 'our own')\n"
    )
    (tmp_path / "my_corpus.py").write_text(module)
    mine = "--config.data.task=mine", "--config.data.module=my_corpus", "--config.data.tfds_dir=tfds"
    assert "from our own" in typed(tmp_path, "http://127.0.0.1:9", "prepare", "--config=wikitext103_small", *mine)


@pytest.mark.long
def test_openwebtext_by_download(tmp_path, monkeypatch):
    """`main --config=large` in an empty folder, and what is done with a run. Two documents are for validation."""
    hub = Hub()
    fill(hub)
    said = typed(tmp_path, hub.address, "main", "--config=large", *SMALL)
    assert "\nFinished. Checkpoints and curves are in runs/large" in said
    rows = np.random.default_rng(2357).permutation(len(PAGES))[:2].tolist()
    texts = {"validation": [PAGES[row] for row in rows]}
    texts["train"] = [text for row, text in enumerate(PAGES) if row not in rows]
    check_store(tmp_path, "openwebtext", texts)
    record = json.loads((tmp_path / "tfds/downloads/openwebtext.downloads.json").read_text())
    assert len(record) == 2 and all(entry["stated_by_hub"] for entry in record.values())
    hub.datasets.clear()  # from here on it is asked for nothing
    for config in ("small", "finetune_openwebtext_to_wikitext103:pretrain"):
        assert "\nFinished." in typed(tmp_path, hub.address, "main", f"--config={config}", *SMALL)
    for text in ([], ["--files="]):  # the ids of the store, and the data set
        typed(tmp_path, hub.address, "evaluate", "--workdir=runs/large", "--perplexity=paper", *text)
    from_store, from_data_set = losses(tmp_path, "runs/large")
    assert from_data_set == pytest.approx(from_store, rel=1e-6)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "logiqa_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGIQA))
    tasks = f"--include={ROOT}/diffeqformer/inference/task_files"
    assert "| LogiQA | 8 |" in typed(tmp_path, hub.address, "downstream", "--workdir=runs/large", tasks)
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILATION)
    shown = executed(opened_notebook(**{TRAIN: 'FROM = "folder"', FOLDER: 'CHECKPOINT = "runs/large"'}), tmp_path)
    assert "large: diffeqformer" in "".join(shown) and "data:image/png" in shown[-1]


@pytest.mark.long
def test_raw_wikitext_by_download(tmp_path):
    """As the hub has it: a row for each line, with the tokens that WikiText is published with."""
    hub = Hub()
    fill(hub)
    raw = "--config.data.task=wikitext103_raw"
    assert "\nFinished." in typed(tmp_path, hub.address, "main", "--config=wikitext103_medium", raw, *SMALL)
    texts = {split: "".join(row or "\n" for row in rows) for split, rows in RAW.items()}
    check_store(tmp_path, "wikitext103_raw", {split: list(articles(text)) for split, text in texts.items()})
