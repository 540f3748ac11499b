"""Turn a task into its token store: in parallel, shard by shard, so that a kill loses only unfinished shards.

Separate processes (`diffeqformer.data.worker`) read and tokenize, so this one doesn't import TensorFlow. Everything is
written to `<store>.partial`, which is renamed once all of it has been verified.
"""

import contextlib
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

from ml_collections import ConfigDict

from diffeqformer.console.results import write_whole
from diffeqformer.console.terminal import show_progress
from diffeqformer.data.files import NoFile, check_first, fingerprint, layout_of, local_files
from diffeqformer.data.lock import only_process
from diffeqformer.data.remote import stage
from diffeqformer.data.seals import from_json, sealed
from diffeqformer.data.store import FORMAT, Split, number_of_cores, open_store, read_about, token_type, verify
from diffeqformer.data.tokenizers import NoTokenizer, Tokenizer, describe_lost, open_tokenizer, restore_tokenizer
from diffeqformer.errors import UserError, counted, reachable


def store_folder(data: ConfigDict, tokenizer: Tokenizer) -> pathlib.Path:
    return pathlib.Path(data.dir) / f"{data.task}-{tokenizer.name}"


def tokenizer_of(data: ConfigDict, saved: tuple[str, str] | None = None) -> Tokenizer:
    """The tokenizer of a config's `data` part. Where its file isn't here, the `saved` one, or that of its store."""
    try:
        return open_tokenizer(data.tokenizer, data.tokenizer_file)
    except NoTokenizer:
        if saved:
            return restore_tokenizer(*saved)
        folders = pathlib.Path(data.dir).glob(f"{data.task}-{data.tokenizer}*/store.json")
        stores = [read_about(path.parent) for path in folders if path.parent.suffix not in (".partial", ".copying")]
        found = [(about["tokenizer"], about.get("tokenizer_data")) for about in stores]
        if len(found) != 1 or found[0][1] is None:
            raise
        return restore_tokenizer(*found[0])


def open_prepared(
    data: ConfigDict, tokenizer: Tokenizer, sequence_length: int, resumes: bool = False
) -> dict[str, Split]:
    """The splits of a config's store. A missing store is copied from `data.remote`, or else prepared.

    The text of a store needn't be here, but if it is, it is compared.

    Args:
        resumes: whether the caller knows the hashes of the ids, by which other text is found. If not, a store without
            its text is taken only if the config names that text alike.
    """
    folder, files, missing = store_folder(data, tokenizer), None, None
    if not folder.exists():
        if data.remote:
            stage(data.remote, folder)
        else:
            prepare(data, tokenizer)
    try:
        files = fingerprint(local_files(data), layout_of(data))
    except NoFile as error:
        missing = error
    splits = open_store(folder, tokenizer.name, sequence_length, files, data.task)
    if missing:
        recorded = read_about(folder).get("patterns")  # an earlier version didn't record them
        if not (resumes or data.remote) and recorded not in (None, patterns_of(data)):
            raise missing
        print(f"{missing}; the token store {folder} is taken as it is", flush=True)
    return splits


def patterns_of(data: ConfigDict) -> list:
    """What a config's `data` part says of its local files."""
    return [data.train_files, data.validation_files, *layout_of(data)]


def prepare(data: ConfigDict, tokenizer: Tokenizer) -> None:
    """Make the token store of a config's `data` part, unless it exists. After an error, the next call continues."""
    folder, files = store_folder(data, tokenizer), local_files(data)
    partial = folder.with_name(f"{folder.name}.partial")
    with only_process(partial) as lock, reachable("config.data.dir", partial):
        if folder.exists():
            return
        workers = []
        remove_unfinished(partial)
        try:
            _prepare(data, tokenizer, files, partial, lock, workers)
        finally:
            for worker in workers:
                worker.process.terminate()
                worker.process.wait()
            remove_unfinished(partial)


def remove_unfinished(folder: pathlib.Path) -> None:
    """Remove what processes that were stopped have left, which takes space on a full disk."""
    for path in folder.glob("*.partial*"):
        path.unlink()


def _prepare(
    data: ConfigDict, tokenizer: Tokenizer, files, partial: pathlib.Path, lock: IO, workers: list["Worker"]
) -> None:
    layout, folder = layout_of(data), partial.with_suffix("")
    for path in itertools.chain.from_iterable((files or {}).values()):
        check_first(path, layout)  # rather than when its turn comes
    print(f"Preparing {data.task} into {folder}", flush=True)
    task = dict(task=data.task, module=data.module, files=files, layout=layout)
    task["tokenizer"] = [tokenizer.name, tokenizer.save()]
    workers.append(Worker(task, lock))
    plan, text = next(workers[0].answers()), fingerprint(files, layout)
    about = dict(
        format=FORMAT, task=data.task, origin=plan["origin"], files=text.text, tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size, dtype=token_type(tokenizer.vocab_size).str,
    )  # fmt: skip
    begin_or_go_on(partial, {**about, "shards": plan["shards"], "order": text.order})
    print(f"  from {plan['origin']}", flush=True)
    every = [(split, index, count) for split, count in plan["shards"].items() for index in range(count)]
    todo = [shard for shard in every if finished(partial, *shard[:2]) is None]
    task["found"] = plan["found"]
    for _ in range(min(data.processes or number_of_cores(), len(todo)) - 1):
        workers.append(Worker(task, lock))
    write_shards(workers, partial, len(every), todo)
    about["splits"] = {}
    for split, count in plan["shards"].items():
        records = [finished(partial, split, index) for index in range(count)]
        names = "tokens", "documents", "bytes", "unknown", "altered"
        sums = {name: sum(record[name] for record in records) for name in names}
        about["splits"][split] = {**sums, "shards": records}
    about |= {"patterns": patterns_of(data), "tokenizer_data": tokenizer.save()}  # for where their files aren't
    finish(partial, folder, about)
    for split, paths in (files or {}).items():
        texts = sum(shard["documents"] + shard["empty"] for shard in about["splits"][split]["shards"])
        if data.separator and texts <= len(paths):
            print(f"  {split}: no file has the separator {data.separator!r}; each is one document", flush=True)


def begin_or_go_on(partial: pathlib.Path, about: dict) -> None:
    """Record the plan in the folder of the unfinished store, or check that the plan recorded there is the same.

    As long as no shard is finished, another plan takes its place: files that couldn't be read were mended. Where the
    text lies (`origin`) is no part of the plan.
    """
    plan = json.dumps({name: value for name, value in about.items() if name != "origin"}, indent=1)
    path = partial / "plan.json"
    if path.exists() and path.read_text() == plan:
        return
    shards = (shard.name.removesuffix(".bin.json").rpartition("-") for shard in partial.glob("*.bin.json"))
    if path.exists() and any(finished(partial, split, int(number)) for split, _, number in shards):
        raise UserError(f"{partial}: holds an unfinished store of another text or tokenizer; delete it and start again")
    write_whole(path, plan)


class Worker:
    """A process of `diffeqformer.data.worker` for a task. It holds the lock, even if this process is killed."""

    def __init__(self, task: dict, lock: IO):
        command = [sys.executable, "-m", "diffeqformer.data.worker"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[lock.fileno()])
        self.process = subprocess.Popen(command, **pipes)
        self.ask(task)

    def ask(self, request: dict | list) -> None:
        """Send a request. After a failure, `answers` says the reason."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answers(self) -> Iterator[dict]:
        """Its answers. A UserError says why there are no more."""
        for line in self.process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise UserError(answer["error"])
            yield answer
        killed = " (killed, perhaps because memory ran out)" * (self.process.wait() == -signal.SIGKILL)
        raise UserError(f"a process that prepares the store ended with status {self.process.returncode}{killed}")


def finished(partial: pathlib.Path, split: str, index: int) -> dict | None:
    """The record of a finished shard; None if there is none that can be read."""
    try:
        return from_json((partial / f"{split}-{index:05d}.bin.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_shards(workers: list[Worker], partial: pathlib.Path, shards: int, todo: list) -> None:
    """Let the workers write the shards `todo` of all `shards`. Each takes the next one as soon as it is free."""
    remaining, told, failures = iter(todo), {}, []  # taking the next one is atomic

    def follow(worker: Worker) -> None:
        try:
            for shard in remaining:
                worker.ask([str(partial), shard])
                for answer in worker.answers():
                    told[answer["split"], answer["shard"]] = answer
                    if answer["done"]:
                        break
        except Exception as error:  # otherwise the main thread would wait forever
            failures.append(error)

    for worker in workers:
        threading.Thread(target=follow, args=(worker,), daemon=True).start()
    done, before = 0, shards - len(todo)
    show, start = show_progress("written", "shards", before=before), time.monotonic()
    while done < len(todo):
        time.sleep(0.05)
        begun = list(told.values())
        tokens, documents, done = (sum(shard[what] for shard in begun) for what in ("tokens", "documents", "done"))
        if failures:
            stay = f" ({done} of {len(todo)} shards are finished and stay; the same command continues from them)"
            raise UserError(f"{failures[0]}{stay * (done > 0)}")
        rate = tokens / (time.monotonic() - start)
        if told:
            show(before + done, shards, f"  {documents:,} documents  {tokens:,} tokens  {rate:,.0f} tokens/s")


def finish(partial: pathlib.Path, folder: pathlib.Path, about: dict) -> None:
    """Verify every shard, write `store.json`, and rename the folder."""
    for split, entry in about["splits"].items():
        if not entry["documents"]:
            field = f"{split}_files" if about["files"] else "task"
            raise UserError(
                f"config.data.{field}: the {split} split has no text in it ({about['origin']}); choose another"
            )
    verify(partial, about)
    write_whole(partial / "store.json", json.dumps(sealed(about), indent=1))  # before the records are deleted
    read_about(partial)
    partial.rename(folder)
    for path in folder.iterdir():  # only now: after an earlier kill, every record is still there
        if path.name == "plan.json" or path.name.endswith(".bin.json"):
            path.unlink()
    for split, entry in about["splits"].items():
        empty = sum(shard["empty"] for shard in entry["shards"])
        left_out = f"; {empty:,} without any text left out" if empty else ""
        what = f"{entry['tokens']:,} tokens of {counted(entry['documents'], 'document')}{left_out}"
        print(f"  {split}: {what}, sha256 {entry['sha256'][:12]}")
        if lost := describe_lost(entry["unknown"], entry["altered"]):
            print(f"  {split}: {lost}; docs/data.md says which tokenizers keep text whole")
