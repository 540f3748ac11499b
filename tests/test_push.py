"""Models are uploaded to the hub; a small server plays it."""

import os
import subprocess
import sys

import pytest

from helpers import ROOT
from hub import Hub


def push(hub: Hub, *options: str, token: str = "writes") -> subprocess.CompletedProcess:
    settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    line = [sys.executable, "-m", "diffeqformer", "push", *options]
    return subprocess.run(line, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)


@pytest.fixture
def model(tmp_path):
    """A folder in the form that export gives it, with a run inside."""
    files = {
        "config.json": b"{}",
        "README.md": b"# a model\n",
        "model.safetensors": bytes(range(256)) * 64,
        "run/checkpoints/3/params/d/0": b"\0\1",
        ".cache": b"not this",
    }
    for path, content in files.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(content)
    return tmp_path / "model", files


def test_a_folder_becomes_a_model_of_the_hub_and_replaces_it(model):
    folder, files = model
    hub = Hub()
    for content in (b"# a model\n", b"# a better model\n"):
        (folder / "README.md").write_bytes(content)
        done = push(hub, f"--from={folder}", "--to=hf://somebody/tiny")
        assert (done.returncode, done.stdout) == (0, f"{hub.address}/somebody/tiny\n"), done.stderr
        files.pop(".cache", None)
        assert hub.repositories["somebody/tiny"]["main"] == {**files, "README.md": content}


def test_what_cannot_be_uploaded_is_said_in_one_sentence(model, tmp_path):
    folder, _ = model
    hub, here, to = Hub(), f"--from={folder}", "--to=hf://somebody/tiny"
    for done, sentence in (
        (push(hub, f"--from={tmp_path}", to), f"--from: {tmp_path} holds no model"),
        (push(hub, here, "--to=somebody/tiny"), "--to: must be hf://OWNER/NAME, but it is somebody/tiny"),
        (push(hub, here, to, token="reads"), "hf://somebody/tiny: the hub answered 403; check that the token"),
    ):
        assert done.returncode == 1 and done.stderr.startswith(f"diffeqformer: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1 and not hub.repositories
