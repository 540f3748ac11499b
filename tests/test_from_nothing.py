"""Each corpus of the hub, from an empty folder to the scores of a trained model, by the commands that a user types.

Nothing stands in for a part of the program. The hub has small data sets under their real names, in their real form.
"""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from diffeqformer.data.store import open_store, read_about
from diffeqformer.data.tokenizers import GPT2Tokenizer
from helpers import ROOT
from hub import CONVERTED, Hub
from newcomer import (
    DETOKENIZED,
    LOGIQA,
    PAGES,
    RAW,
    SMALL_MODEL,
    SMALL_RUN,
    environment,
    fill,
    gpt2_files,
    raw_articles,
)
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
def test_openwebtext_from_nothing(tmp_path):
    hub = Hub()
    fill(hub)
    hub.stated["plain_text/train/0001.parquet"] = None  # no hash, as of a small file
    typed(tmp_path, hub.address, "main", "--config=large", *SMALL, "--config.data.processes=2")
    rows = np.random.default_rng(2357).permutation(len(PAGES))[:2].tolist()
    texts = {"validation": [PAGES[row] for row in rows]}
    texts["train"] = [text for row, text in enumerate(PAGES) if row not in rows]
    check_store(tmp_path, "openwebtext", texts)
    assert len(read_about(tmp_path / "token_stores/openwebtext-gpt2")["splits"]["train"]["shards"]) == 2
    record = json.loads((tmp_path / "tfds/downloads/Skylion007/openwebtext/downloads.json").read_text())
    files = hub.repositories["Skylion007/openwebtext"][CONVERTED]
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    assert record == {"commit": hub.commit("Skylion007/openwebtext", CONVERTED), "files": {"train": hashes}}
    for text in ([], ["--files="]):  # the ids of the store, and the data set
        said = typed(tmp_path, NOWHERE, "evaluate", "--workdir=runs/large", "--perplexity=paper", *text)
    assert "the validation split isn't the published one" in said
    from_store, from_data_set = losses(tmp_path, "runs/large")
    assert from_data_set == pytest.approx(from_store, rel=1e-6)
    assert 10 < from_store < np.log(50257) + 0.5  # of a model that has seen four batches
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "logiqa_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGIQA))
    tasks = f"--include={ROOT}/diffeqformer/inference/task_files"
    assert "| LogiQA | 8 |" in typed(tmp_path, NOWHERE, "downstream", "--workdir=runs/large", tasks)


@pytest.mark.long
@pytest.mark.parametrize("task", ["wikitext103", "wikitext103_raw"])
def test_a_store_of_wikitext_from_nothing(task, tmp_path):
    hub = Hub()
    fill(hub)
    typed(tmp_path, hub.address, "prepare", "--config=wikitext103_small", f"--config.data.task={task}")
    check_store(tmp_path, task, DETOKENIZED if task == "wikitext103" else {split: raw_articles(split) for split in RAW})


@pytest.mark.long
def test_a_data_set_of_ones_own_whose_splits_are_known_once_it_is_written(tmp_path):
    """By a module in the current folder, which isn't on Python's path. What it prints harms nothing."""
    (tmp_path / "my_corpus.py").write_text(MY_CORPUS)
    mine = "--config.data.task=mine", "--config.data.module=my_corpus", "--config.data.processes=1"
    typed(tmp_path, NOWHERE, "prepare", "--config=wikitext103_small", *SMALL, *mine)
    tokenizer = GPT2Tokenizer.open(str(gpt2_files()))
    for name, split in open_store(tmp_path / "token_stores/mine-gpt2", "gpt2", 32).items():
        text = tokenizer.decode(split.ids(0, split.size).tolist())
        assert sorted(text.split(".")) == sorted(["", *(f"{name} {number}, our own text" for number in range(9))])


MY_CORPUS = """
import seqio
import tensorflow_datasets as tfds

from diffeqformer.data.tasks import add_corpus


class MyCorpus(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))

    def _split_generators(self, manager):
        return {split: self._generate_examples(split) for split in ("train", "validation")}

    def _generate_examples(self, split):
        for number in range(9):
            yield number, {"text": f"{split} {number}, our own text."}


print({"split": "what a module prints"})
add_corpus("mine", seqio.TfdsDataSource("my_corpus:1.0.0"), "our own")
"""
