"""Which text is scored: that of the training by default, if it is the very text."""

import dataclasses
import types

import pytest

from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.store import SPLITS
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference import text_options
from helpers import lively_model, make_store, toy_config

TOKENIZER = ByteTokenizer()


def test_only_the_very_text_of_the_training_is_taken_from_a_store(tmp_path, capsys):
    about = make_store(tmp_path / "python_stdlib-bytes", {"train": [["a"]], "validation": [["b"]]})
    model, sha256 = lively_model("gpt"), about["splits"]["train"]["sha256"]

    def found(split="validation", sha256=sha256, remote=None, scored="", **changes):
        config = toy_config("gpt", **{"data__dir": str(tmp_path), **changes})
        about = checkpoint.About({}, "bytes", data_sha256=sha256, validation_sha256=scored)
        return text_options.stored_text(checkpoint.Checkpoint(3, config, model, TOKENIZER, about), split, remote)

    for split, entry in about["splits"].items():
        assert found(split).sha256 == entry["sha256"]
    assert found(scored=found().sha256) is not None and found(scored="0" * 64) is None
    assert found(sha256="0" * 64) is found(sha256="") is None
    assert found(data__train_files="mine.txt", data__validation_files="mine.txt") is None
    assert found(data__dir="absent", data__remote="nowhere://bucket") is None  # which a checkpoint can't choose
    with pytest.raises(UserError, match="^config.data.remote: nowhere://bucket: "):
        found(remote="nowhere://bucket")  # asked before the local one
    [shard] = (tmp_path / "python_stdlib-bytes").glob("validation-*.bin")
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])  # another id of the same vocabulary
    capsys.readouterr()
    assert found() is None and capsys.readouterr().out.startswith("Not used: ")


def test_the_text_is_by_default_that_of_the_training(tmp_path):
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_text(name)
    config = toy_config(data__train_files=f"{tmp_path}/train.txt", data__validation_files=f"{tmp_path}/validation.txt")
    config.data.dir = str(tmp_path / "stores")
    about = make_store(tmp_path / "elsewhere", {"train": [["a"]], "validation": [["b"]]}, files="a fingerprint")
    hashes = {f"{name}_sha256": about["splits"][split]["sha256"] for name, split in zip(("data", "validation"), SPLITS)}
    opened = checkpoint.Checkpoint(3, config, lively_model("gpt"), TOKENIZER, checkpoint.About({}, "bytes", **hashes))

    def text_of(**options):
        defaults = {"task": None, "files": None, "split": "validation", "remote": None, "module": None}
        return text_options.text_of(types.SimpleNamespace(**defaults | options), opened)

    assert text_of() == ("python_stdlib", [f"{tmp_path}/validation.txt"], None)
    (tmp_path / "stores").mkdir()
    (tmp_path / "elsewhere").rename(tmp_path / "stores" / "python_stdlib-bytes")
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).unlink()
    for split, entry in about["splits"].items():
        assert text_of(split=split)[2].sha256 == entry["sha256"] and text_of(split=split)[1] is None
    assert text_of(split="test") == text_of(files="") == ("python_stdlib", None, None)
    with pytest.raises(UserError, match="^--files: no file matches '.*/train.txt'"):
        text_of(files=f"{tmp_path}/train.txt")
    for options in ({"split": "test"}, {"task": "wikitext103"}, {"files": ""}):
        with pytest.raises(UserError, match="^--remote: must go without --files"):
            text_of(remote="gs://bucket/stores", **options)
    opened = dataclasses.replace(opened, about=dataclasses.replace(opened.about, data_sha256="of other ids"))
    with pytest.raises(UserError, match="^--files: the default, .*: no file"):
        text_of()
