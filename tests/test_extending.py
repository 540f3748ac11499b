"""The pages on additions, followed to the letter in a copy of the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT

PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
BLOCK = r"^([^\n]*)\n+```(\w*)\n(.*?)^```$"  # the line before, which names a file, the language, and the text


def change(file: pathlib.Path, diff: str) -> None:
    """Apply a page's diff: each line to add follows the line before it, or replaces the one to remove."""
    text, last, removed = file.read_text(), None, None
    for line in diff.splitlines():
        sign, line = line[0], f"{line[1:]}\n"
        if sign == "+":
            old, new = (removed, line) if removed else (last, last + line)
            text, last, removed = text.replace(old, new), line, None
            continue
        assert f"\n{text}".count(f"\n{line}") == 1, (file, line)
        last, removed = (line, None) if sign == " " else (None, line)
    file.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed_to_the_letter(page, tmp_path, short_stores):
    for folder in ("configs", "diffeqformer", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(short_stores, tmp_path / "token_stores")
    done = []
    for before, language, text in re.findall(BLOCK, page.read_text(), re.MULTILINE | re.DOTALL):
        named = re.search(r"`([\w/]+\.py)`", before)
        if language == "python":
            (tmp_path / named[1]).write_text(text)
        elif language == "diff":
            change(tmp_path / named[1], text)
        else:
            done += text.replace("\\\n", "").splitlines()
    assert len(done) >= 1
    for line in done:
        program, *arguments = line.split()
        assert program == "python"
        short = ["--config.steps=2"] if "diffeqformer.main" in arguments else []
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            [sys.executable, *arguments, *short], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
