"""Every command of the README and of docs/, as a newcomer types them: in a clone, with an empty home.

tests/documented.py says what is made small, what stands in for the hub and the cloud, and what is left out.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import newcomer
from documented import ELSEWHERE, FILES, FORKED, LEFT_OUT, OUTPUT, PREPARED, ROWS, SNIPPETS, TPU, changed, rows_of
from flags import FAST_COMPILATION
from helpers import ROOT
from hub import Hub
from runs import command as run_in_fork

INDEX = re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "README.md").read_text())
PAGES = ["README.md", "docs/README.md", *dict.fromkeys(f"docs/{page}" for page in INDEX)]
FOLLOWED = [page for page in PAGES if str(pathlib.Path(page).parent) not in ELSEWHERE]


class Block(NamedTuple):
    """A fenced block of a page; `language` is empty for commands and output."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Those of a page in their order, then the commands of README's table."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    blocks = [
        Block(language, re.sub(f"^{indent}", "", block, flags=re.MULTILINE)) for indent, language, block in fenced
    ]
    for cell in re.findall(r"^\| (`.*?`) \|", text.partition("\n## Commands\n")[2].partition("\n## ")[0], re.MULTILINE):
        blocks += [Block("", f"diffeqformer {command}\n") for command in re.findall("`(.*?)`", cell)]
    return blocks


def commands_of(block: Block) -> Iterator[str]:
    """The commands of a block, each in one piece and without its comment. Three dots stand for the one before."""
    before, command = "", ""
    for line in block.text.replace("\\\n", "").splitlines():
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:  # the quotation goes on
            command += "\n"
            continue
        command = re.sub(r"\s+# .*", "", command)
        before = re.sub(r"^\.\.\.", lambda _: before, command)
        yield before
        command = ""


def left_out(command: str) -> bool:
    """Whether a pattern leaves a command out."""
    return any(re.search(pattern, command) for pattern in LEFT_OUT)


def documented(page: str) -> Iterator[str]:
    """All commands of a page."""
    for block in blocks_of(page):
        if not block.language and not block.text.startswith(OUTPUT):
            yield from commands_of(block)


PLANS = [command for page in FOLLOWED for command in documented(page) if TPU in command]


def test_every_page_is_followed_and_no_block_is_passed_over():
    pages = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
    assert sorted(PAGES) == ["README.md", *pages]
    assert {str(pathlib.Path(page).parent) for page in {*PAGES} - {*FOLLOWED}} == {*ELSEWHERE}
    assert {block.language for page in FOLLOWED for block in blocks_of(page)} == {"", "python", "yaml"}


def test_the_table_lists_nothing_that_no_page_has():
    commands = [command for page in FOLLOWED for command in documented(page)]
    assert all(any(re.search(pattern, command) for command in commands) for pattern in LEFT_OUT)
    changing = [row for command in commands if not left_out(command) for row in rows_of(command)]
    assert [row for row in ROWS if row not in changing] == []
    texts = [block.text for page in FOLLOWED for block in blocks_of(page)]
    assert all(any(text.startswith(start) for text in texts) for start in [*OUTPUT, *SNIPPETS])


class Newcomer:
    """Somebody with a clone and an empty home, who types commands into a shell."""

    def __init__(self, folder: pathlib.Path):
        self.clone, self.typed, hub = folder / "diffeqformer", set(), Hub()
        newcomer.fill(hub)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
            if (ROOT / name).exists():
                self.write(name, (ROOT / name).read_bytes())
                shutil.copymode(ROOT / name, self.clone / name)
        for name, text in FILES.items():
            self.write(name, text.encode())
        self.environment = {
            **os.environ,
            **newcomer.environment(folder / "home", hub.address),
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.clone),  # as if it were installed
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FAST_COMPILATION,
            "PIP_NO_INDEX": "1",
        }

    def write(self, name: str, content: bytes) -> None:
        """Write a file in the clone."""
        (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
        (self.clone / name).write_bytes(content)

    def type(self, command: str) -> str:
        """Run a command as the table says, unless it was. Returns what it printed if it didn't end well."""
        command = changed(command)
        same = re.sub(r"^python -m diffeqformer\.", "diffeqformer ", command).replace("configs/tiny.py", "tiny")
        if same in self.typed:
            return ""
        self.typed.add(same)
        self.prepare(command)
        start, words = time.monotonic(), shlex.split(command)
        if re.match(FORKED, command) and "<" not in words:
            done = run_in_fork(words[2].partition(".")[2], *words[3:], environment=self.environment, folder=self.clone)
        else:
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.clone, env=self.environment, input="", capture_output=True, text=True
            )
        said = done.stdout + done.stderr
        failed = done.returncode or "Traceback" in said
        print(f"{time.monotonic() - start:5.1f} s  {command}", said[-1500:] if failed else "", flush=True)
        return f"$ {command}\n{said}\nstatus {done.returncode}\n" if failed else ""

    def prepare(self, text: str) -> None:
        """Make the runs that a command or a snippet takes for granted."""
        for name, needed in PREPARED.items():
            named = re.search(rf"(?<![\w/]){name}(?![\w/-])", text)
            if named and not (self.clone / name).exists() and text != changed(needed):
                assert self.type(needed) == ""

    def follow(self, block: Block) -> list[str]:
        """Do what a block says. Returns what commands printed that didn't end well."""
        if block.language == "python":
            self.prepare(block.text)
            self.write("snippet.py", block.text.encode())
            self.typed.discard("python snippet.py")
            return [self.type("python snippet.py")]
        if block.language == "yaml":
            [(name, changes)] = [SNIPPETS[start] for start in SNIPPETS if block.text.startswith(start)]
            for old, new in changes.items():
                block = block._replace(text=block.text.replace(old, new))
            self.write(name, block.text.encode())
        if block.language or block.text.startswith(OUTPUT):
            return []
        return [self.type(command) for command in commands_of(block) if not left_out(command) and TPU not in command]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return Newcomer(tmp_path_factory.mktemp("newcomer"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in FOLLOWED if blocks_of(page)])
def test_the_commands_of_a_page_run(page, reader):
    said = [each for block in blocks_of(page) for each in reader.follow(block)]
    assert "".join(said) == ""


@pytest.mark.tpu
@pytest.mark.parametrize("command", PLANS)
def test_a_documented_plan_for_tpus_is_made(command, reader, monkeypatch):
    monkeypatch.setitem(reader.environment, "XLA_FLAGS", "")  # of CPUs
    assert reader.type(command) == ""
