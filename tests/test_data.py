"""Token store: a pure function of seed and step, and refusal of anything broken."""

import json
import subprocess
import sys

import numpy as np
import pytest

from diffeqformer.data.store import open_store, write_store
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from helpers import ROOT

TOKENIZER = ByteTokenizer()


def documents(texts):
    for text in texts:
        yield np.array([*TOKENIZER.encode(text), TOKENIZER.end_of_text]), len(text.encode())


@pytest.fixture
def folder(tmp_path):
    texts = [f"document {i}: " + "x" * (i % 17) for i in range(100)]
    write_store(
        tmp_path / "task", "task", TOKENIZER, "made up", {"train": documents(texts), "validation": documents(texts[:5])}
    )
    return tmp_path / "task"


def test_a_store_holds_the_documents_and_nothing_else(folder):
    split = open_store(folder, "bytes", 8)["train"]
    text = "".join(f"document {i}: " + "x" * (i % 17) for i in range(100))
    assert TOKENIZER.decode(split.tokens.tolist()) == text and split.text_bytes == len(text)
    assert np.sum(split.tokens == TOKENIZER.end_of_text) == 100 and split.tokens.dtype == np.uint16
    assert [path.name for path in folder.parent.iterdir()] == ["task"]


def test_batches_are_a_function_of_seed_and_step(folder):
    split, again = (open_store(folder, "bytes", 8)["train"] for _ in range(2))
    for step in (0, 3, 1000):
        np.testing.assert_array_equal(split.batch(step, 4, 8, seed=1), again.batch(step, 4, 8, seed=1))
    assert not np.array_equal(split.batch(0, 4, 8, seed=1), split.batch(0, 4, 8, seed=2))


def test_every_epoch_shows_every_window_once_in_an_order_of_its_own(folder):
    split = open_store(folder, "bytes", 8)["train"]
    count = len(split.tokens) // 8
    windows = [split.batch(step, 1, 8, seed=0)[0].tobytes() for step in range(2 * count)]
    whole = sorted(split.windows(np.arange(count), 8)[i].tobytes() for i in range(count))
    assert sorted(windows[:count]) == sorted(windows[count:]) == whole
    assert windows[:count] != windows[count:] != whole


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_read_the_parts_of_one_global_batch(folder, hosts):
    split = open_store(folder, "bytes", 8)["train"]
    last = len(split.tokens) // 8 // 8  # a step whose batch spans two epochs
    for step in (0, last):
        parts = [split.batch(step, 8, 8, 0, rows=slice(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(parts), split.batch(step, 8, 8, 0))


def test_evaluation_covers_every_token_once_in_order(folder):
    split = open_store(folder, "bytes", 8)["validation"]
    batches = list(split.evaluation_batches(4, 8))
    assert all(tokens.shape == valid.shape == (4, 8) for tokens, valid in batches)
    np.testing.assert_array_equal(np.concatenate([tokens[valid] for tokens, valid in batches]), split.tokens)
    assert len(split.tokens) % 32  # so that there is something to fill up


def corrupt_json(folder):
    (folder / "store.json").write_text("{")


def truncate(folder):
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(10)


def lose_split(folder):
    (folder / "validation.bin").unlink()


def other_tokenizer(folder):
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps({**about, "tokenizer": "gpt2"}))


def other_format(folder):
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps({**about, "format": 99}))


def lose_entry(folder):
    about = json.loads((folder / "store.json").read_text())
    del about["splits"]["validation"]
    (folder / "store.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (corrupt_json, r"store\.json: .*can't be read"),
        (lose_entry, r"store\.json: .*can't be read"),
        (truncate, r"train\.bin: .*has 10 bytes instead of "),
        (lose_split, r"validation\.bin: .*has 0 bytes instead of "),
        (other_tokenizer, r"made with tokenizer 'gpt2', but 'bytes' is needed"),
        (other_format, r"has format 99"),
    ],
)
def test_a_broken_store_is_refused(folder, damage, sentence):
    damage(folder)
    with pytest.raises(UserError, match=sentence) as error:
        open_store(folder, "bytes", 8)
    assert "\n" not in str(error.value)


def test_missing_and_too_short_stores_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="there is no whole token store here; delete"):
        open_store(tmp_path / "absent", "bytes", 8)
    with pytest.raises(UserError, match="^config.sequence_length: 10000 is longer than"):
        open_store(folder, "bytes", 10_000)


def test_an_interrupted_preparation_leaves_nothing(tmp_path):
    def interrupted():
        yield from documents(["one"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "task", "task", TOKENIZER, "made up", {"train": interrupted()})
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_round_trip():
    text = "naïve\n\0 🙂"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode([104, 105, TOKENIZER.end_of_text]) == "hi" and TOKENIZER.decode([0xFF]) == "\ufffd"


def test_the_standard_library_task_agrees_with_its_files(stdlib_stores):
    """SeqIO's tokens are the bytes of the files, tests left out, split by path. Its own process imports TensorFlow."""
    script = """
import numpy as np, seqio
from diffeqformer.data import tasks
task = seqio.TaskRegistry.get("python_stdlib")
train, validation = (tasks.stdlib_files(split) for split in ("train", "validation"))
assert not set(train) & set(validation) and not any("test" in path.parts for path in train + validation)
vocabulary = task.output_features["targets"].vocabulary
first = next(iter(task.get_dataset(split="validation", sequence_length=None, shuffle=False).as_numpy_iterator()))
text = validation[0].read_bytes()
assert bytes(first["targets"][:-1].astype(np.uint8)) == text and first["targets"][-1] == vocabulary.eos_id == 256
assert vocabulary.decode_tf(vocabulary.encode_tf("abc")).numpy() == b"abc"
print(sum(path.stat().st_size for path in validation))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    splits = open_store(stdlib_stores / "python_stdlib", "bytes", 128)
    assert splits["validation"].text_bytes == int(done.stdout.splitlines()[-1])
    assert len(splits["train"].tokens) > 5e6
