"""Turn a task into its token store: in parallel, shard by shard, so that a kill loses only unfinished shards.

Separate processes (`diffeqformer.data.worker`) read and tokenize, so this one doesn't import TensorFlow. Everything is
written to `<store>.partial`, which is renamed once all of it has been verified.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO

from ml_collections import ConfigDict

from diffeqformer.console.terminal import duration
from diffeqformer.data.files import check_first, kind
from diffeqformer.data.lock import only_process
from diffeqformer.data.remote import stage
from diffeqformer.data.seals import from_json, sealed, write_lasting
from diffeqformer.data.store import FORMAT, SPLITS, Split, number_of_cores, open_store, read_about, token_type, verify
from diffeqformer.data.tokenizers import Tokenizer, say_lost
from diffeqformer.errors import UserError


class NoFile(UserError):
    """No file matches a pattern."""


def store_folder(data: ConfigDict, tokenizer: Tokenizer) -> pathlib.Path:
    """The folder of the token store of a config's `data` part."""
    return pathlib.Path(data.dir) / f"{data.task}-{tokenizer.name}"


def local_files(data: ConfigDict) -> dict[str, list[str]] | None:
    """The local files of each split that replace the task, if any, sorted by path.

    Raises:
        UserError: for the reasons given in `matching_files`, or if a file is in both splits.
    """
    if not data.train_files:
        return None
    files = {split: matching_files(data[f"{split}_files"], f"config.data.{split}_files") for split in SPLITS}
    trained = set(map(os.path.realpath, files["train"]))
    for path in files["validation"]:
        if os.path.realpath(path) in trained:
            raise UserError(f"config.data.train_files: {path} is a validation file, too; leave it out of one of them")
    return files


def matching_files(patterns: str, option: str) -> list[str]:
    """The files that comma-separated patterns match; the matches of each pattern are sorted by path.

    Raises:
        UserError: if a pattern matches no file, one of the files isn't a text that can be read, or one is named twice.
    """
    files, seen = [], set()
    for pattern in map(str.strip, patterns.split(",")):
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise NoFile(f"{option}: no file matches '{pattern}'")
        for path in found:
            if os.path.isdir(path):
                raise UserError(f"{option}: {path} is a folder; name the files in it, such as '{path}/*.txt'")
            if not os.access(path, os.R_OK):
                raise UserError(f"{option}: {path} can't be read; put a readable file there")
            if not os.path.isfile(path):
                raise UserError(f"{option}: {path} isn't a file that can be read twice; write its text into one")
            if not os.path.getsize(path):
                raise UserError(f"{option}: {path} is empty; put a file with text there")
            kind(path)
            if (target := os.path.realpath(path)) in seen:
                raise UserError(f"{option}: {path} is named twice; leave one of them out")
            seen.add(target)
        files += found
    return files


def open_prepared(data: ConfigDict, tokenizer: Tokenizer, sequence_length: int) -> dict[str, Split]:
    """The splits of a config's store. A missing store is copied from `data.remote`, or else prepared.

    Raises:
        UserError: if it can't be copied or prepared, or doesn't fit the config.
    """
    folder = store_folder(data, tokenizer)
    if not folder.exists():
        if data.remote:
            stage(data.remote, folder)
        else:
            prepare(data, tokenizer)
    return open_stored(data, tokenizer, sequence_length)


def open_stored(data: ConfigDict, tokenizer: Tokenizer, sequence_length: int) -> dict[str, Split]:
    """The splits of a config's store, which must exist.

    Raises:
        UserError: if it is incomplete, or doesn't fit the config.
    """
    try:
        files = fingerprint(local_files(data))
    except NoFile:
        if not data.remote:
            raise
        files = None  # another machine made the store and has the files
    return open_store(store_folder(data, tokenizer), tokenizer.name, sequence_length, files, data.task)


def fingerprint(files: dict[str, list[str]] | None) -> str:
    """A hash of local files' names, sizes, and first and last 64 KiB; empty if there are none."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for split in SPLITS:
        for path in files[split]:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                beginning = file.read(1 << 16)
                file.seek(max(0, size - (1 << 16)))
                digest.update(repr((split, os.path.basename(path), size, beginning, file.read())).encode())
    return digest.hexdigest()


def prepare(data: ConfigDict, tokenizer: Tokenizer) -> None:
    """Make the token store of a config's `data` part, unless it exists.

    Raises:
        UserError: if it can't be made. Finished shards stay, and the next call continues from them.
    """
    folder, files = store_folder(data, tokenizer), local_files(data)
    partial = folder.with_name(f"{folder.name}.partial")
    with only_process(partial) as lock, contextlib.ExitStack() as running:
        if folder.exists():
            return
        try:
            running.callback(remove_unfinished, partial)  # runs last, when no process is left
            temporary = running.enter_context(tempfile.TemporaryDirectory())
            _prepare(
                data,
                tokenizer,
                files,
                folder,
                partial,
                lambda task: running.enter_context(Worker(task, lock, temporary)),
            )
        except OSError as error:
            raise UserError(f"config.data.dir: {error.filename or partial}: {error.strerror or error}") from None


def _prepare(data: ConfigDict, tokenizer: Tokenizer, files, folder: pathlib.Path, partial: pathlib.Path, start) -> None:
    for path in itertools.chain.from_iterable((files or {}).values()):
        check_first(path)  # rather than when its turn comes
    print(f"Preparing {data.task} into {folder}", flush=True)
    task = dict(task=data.task, module=data.module, files=files, tfds_dir=data.tfds_dir)
    task["tokenizer"] = [tokenizer.name, tokenizer.save()]
    workers = [start(task)]
    plan = workers[0].plan()
    splits = plan["splits"]
    about = dict(
        format=FORMAT, task=data.task, origin=plan["origin"], files=fingerprint(files), tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size, dtype=token_type(tokenizer.vocab_size).str, splits=splits,
    )  # fmt: skip
    begin_or_go_on(partial, about)
    print(f"  from {plan['origin']}", flush=True)
    todo = [(split, i, splits[split]["shards"]) for split in SPLITS for i in range(splits[split]["shards"])]
    todo = [shard for shard in todo if finished(partial, *shard[:2]) is None]
    task["found"] = plan["found"]
    workers += [start(task) for _ in range(min(data.processes or number_of_cores(), len(todo)) - 1)]
    write_shards(workers, partial, ShardProgress(partial, splits, todo), todo)
    about["splits"] = {split: account_of(partial, split, splits[split]["shards"]) for split in SPLITS}
    finish(partial, folder, about)


def remove_unfinished(partial: pathlib.Path) -> None:
    """Remove the shards that processes left unfinished, to free space on a full disk."""
    for path in partial.glob("*.partial"):
        path.unlink()


def begin_or_go_on(partial: pathlib.Path, about: dict) -> None:
    """Record the plan in the folder of the unfinished store, or check that the plan recorded there is the same.

    As long as no shard is finished, another plan takes its place: files that couldn't be read were mended.

    Raises:
        UserError: if it isn't.
    """
    path, plan = partial / "plan.json", json.dumps(about, indent=1)
    if path.exists() and path.read_text() == plan:
        return
    if path.exists() and any(partial.glob("*.bin.json")):
        raise UserError(f"{partial}: holds an unfinished store of another text or tokenizer; delete it and start again")
    write_lasting(path, plan)


class Worker:
    """A process of `diffeqformer.data.worker`.

    Args:
        task: the first request, which names the text and the tokenizer.
        lock: stays held while it runs, even if this process is killed.
        temporary: folder for temporary files that TensorFlow leaves behind.
    """

    def __init__(self, task: dict, lock: IO, temporary: str):
        self.failure = None  # its error message, if it failed
        command = [sys.executable, "-m", "diffeqformer.data.worker"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[lock.fileno()])
        self.process = subprocess.Popen(command, env={**os.environ, "TMPDIR": temporary}, **pipes)
        self.ask(task)

    def ask(self, request: dict) -> None:
        """Send a request. After a failure, `answers` sets the reason."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answers(self) -> Iterator[dict]:
        """Its answers until it ends. If it failed, `failure` then holds the reason."""
        for line in self.process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                self.failure = answer["error"]
            else:
                yield answer
        if self.process.wait() and not self.failure:
            killed = " (killed, perhaps because memory ran out)" * (self.process.returncode == -signal.SIGKILL)
            self.failure = f"a process that prepares the store ended with status {self.process.returncode}{killed}"

    def plan(self) -> dict:
        """Let it fetch the corpus and return the plan of the work.

        Raises:
            UserError: if the corpus can't be fetched.
        """
        self.ask({"plan": True})
        for answer in self.answers():
            if "origin" in answer:
                return answer
        raise UserError(self.failure)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait()


def finished(partial: pathlib.Path, split: str, index: int) -> dict | None:
    """The record of a finished shard; None if there is none that can be read, or an earlier version wrote it."""
    path = partial / f"{split}-{index:05d}.bin.json"
    try:
        record = from_json(path.read_bytes())
        return record if "altered" in record else None
    except (FileNotFoundError, ValueError):
        return None


def write_shards(workers: list[Worker], partial: pathlib.Path, progress: "ShardProgress", todo: list) -> None:
    """Let the workers write the shards `todo`. Each takes the next one as soon as it is free. Progress is printed.

    Raises:
        UserError: if one of them fails. Finished shards stay.
    """
    remaining = iter(todo)  # taking the next one is atomic

    def give(worker: Worker) -> None:
        shard = next(remaining, None)
        if shard:
            worker.ask({"folder": str(partial), "shard": shard})

    def follow(worker: Worker) -> None:
        try:
            for answer in worker.answers():
                if "split" in answer:
                    progress.note(answer)
                if answer.get("done", True):  # otherwise it has just begun
                    give(worker)
        except Exception as error:  # otherwise the main thread would wait forever
            worker.failure = f"a process that prepares the store can't be understood: {error!r}"

    give(workers[0])  # it has already sent the plan
    for worker in workers:
        threading.Thread(target=follow, args=(worker,), daemon=True).start()
    while len(progress.done) < len(todo):
        time.sleep(0.05)
        progress.show()
        failures = [worker.failure for worker in workers if worker.failure]
        if failures:
            done = len(progress.done)
            goes_on = (
                f" ({done} of {len(todo)} shards were finished now and stay; the same command continues from them, "
                "unless the text has to change)"
            )
            raise UserError(failures[0] + goes_on * (done > 0))
    progress.show(last=True)


class ShardProgress:
    """The progress line of the processes that write the shards `todo`."""

    def __init__(self, partial: pathlib.Path, splits: dict, todo: list[tuple[str, int, int]]):
        self.start = self.shown = time.monotonic()
        self.shards = sum(split["shards"] for split in splits.values())
        self.todo = [(split, index) for split, index, _ in todo]
        self.told, self.done = {}, set()
        self.sizes = {(split, i): size for split in splits for i, size in enumerate(splits[split]["file_sizes"])}
        counts = [split["documents"] for split in splits.values()]
        accounts = [finished(partial, split, i) for split in splits for i in range(splits[split]["shards"])]
        before = sum(account["documents"] + account["empty"] for account in accounts if account)
        self.documents = sum(counts) - before if None not in counts else None

    def note(self, told: dict) -> None:
        """Record a worker's report about its shard."""
        key = told["split"], told["shard"]
        self.told[key] = told
        if told["done"]:
            self.done.add(key)

    def part(self) -> float:
        """The finished part of the work: of documents if their number is known, else of files' bytes, else 0."""
        if self.documents:
            return sum(told["documents"] for told in list(self.told.values())) / self.documents
        read = 0
        for key, told in list(self.told.items()):
            size = self.sizes.get(key, 0)
            read += size if key in self.done else min(size, told["bytes"])  # an estimate for compressed files
        return read / max(1, sum(self.sizes.get(key, 0) for key in self.todo))

    def show(self, last: bool = False) -> None:
        """Print the line, at most every two seconds except for the last one."""
        now = time.monotonic()
        if now - self.shown < 2 and not last or not self.told:
            return
        self.shown, seconds, told = now, now - self.start, list(self.told.values())
        tokens, documents = (sum(shard[what] for shard in told) for what in ("tokens", "documents"))
        part = self.part()
        told_enough = seconds > 5 and 0.01 < part <= 1  # an earlier estimate would be too rough
        left = f"  {duration(seconds / part - seconds)} left" if told_enough and not last else ""
        done = self.shards - len(self.todo) + len(self.done)
        print(
            f"  shard {done:,}/{self.shards:,}  {documents:,} documents  {tokens:,} tokens  "
            f"{tokens / seconds:,.0f} tokens/s{left}",
            flush=True,
        )


def account_of(partial: pathlib.Path, split: str, shards: int) -> dict:
    """The totals over a split's shards, and the list of shards."""
    accounts = [finished(partial, split, index) for index in range(shards)]
    names = "tokens", "documents", "bytes", "unknown", "altered"
    sums = {name: sum(account[name] for account in accounts) for name in names}
    return {**sums, "shards": accounts}


def finish(partial: pathlib.Path, folder: pathlib.Path, about: dict) -> None:
    """Verify every shard, write `store.json`, and rename the folder.

    Raises:
        UserError: if a split has no text, or a shard differs from what was written.
    """
    for split, entry in about["splits"].items():
        if not entry["documents"]:
            field = f"{split}_files" if about["files"] else "task"
            raise UserError(
                f"config.data.{field}: the {split} split has no text in it ({about['origin']}); choose another"
            )
    start = time.monotonic()
    verify(partial, about)
    write_lasting(partial / "store.json", json.dumps(sealed(about), indent=1))  # before the records are deleted
    read_about(partial)
    partial.rename(folder)
    for path in folder.iterdir():  # only now: after an earlier kill, every record is still there
        if path.name in ("plan.json", "lock") or path.name.endswith(".bin.json"):
            path.unlink()
    for split, entry in about["splits"].items():
        empty = sum(shard["empty"] for shard in entry["shards"])
        left_out = f"; {empty:,} without any text left out" if empty else ""
        what = f"{entry['tokens']:,} tokens of {entry['documents']:,} documents{left_out}"
        print(f"  {split}: {what}, sha256 {entry['sha256'][:12]}")
        if lost := say_lost(entry["unknown"], entry["altered"]):
            print(f"  {split}: {lost}; docs/data.md says which tokenizers keep text whole")
    print(f"  verified in {time.monotonic() - start:.1f} s", flush=True)
