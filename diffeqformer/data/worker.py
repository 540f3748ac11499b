"""A process that reads text for `diffeqformer.data.preparation`, which itself imports no TensorFlow.

Requests arrive as lines of JSON on standard input. Answers are lines of JSON on the original standard output; anything
else that is printed goes to standard error. The first request names the task. `plan` fetches the corpus and asks for
the list of work, and `shard` writes one shard. Shard i of n holds the documents of the i-th of the source's n files, so
the shards don't depend on the number of processes.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time

from diffeqformer.data.quiet import import_tensorflow, quiet
from diffeqformer.data.store import SPLITS, token_type
from diffeqformer.data.tokenizers import restore_tokenizer
from diffeqformer.errors import UserError


def answer(**fields) -> None:
    """Send one line of JSON to the waiting process."""
    try:
        ANSWERS.write(json.dumps(fields) + "\n")
        ANSWERS.flush()
    except BrokenPipeError:
        os._exit(1)  # that process was killed; the next one removes unfinished files here


def open_task(request: dict):
    """The SeqIO task of the first request, and its tokenizer.

    Raises:
        UserError: if the corpus, or the module that adds it, doesn't exist.
    """
    from diffeqformer.data import tasks

    tasks.configure(request["module"], request["tfds_dir"])
    tokenizer = restore_tokenizer(*request["tokenizer"])
    return tasks.add_task(request["task"], tokenizer, request["files"]), tokenizer


def plan(task, request: dict) -> None:
    """Fetch the corpus if it is missing, and answer with its origin and each split's number of shards and documents.

    Raises:
        UserError: if it can't be fetched.
    """
    from diffeqformer.data.corpora import CORPORA
    from diffeqformer.data.tasks import fetch

    fetch(task)
    missing = [split for split in SPLITS if split not in task.splits]
    if missing:
        raise UserError(
            f"config.data.task: {request['task']} has no split {missing[0]}; a store needs {' and '.join(SPLITS)}"
        )
    files, splits = request["files"] or {}, {}
    for split in SPLITS:
        sizes = [sum(map(os.path.getsize, group)) for group in task.source.groups(split)] if files else []
        splits[split] = {"shards": len(task.source.list_shards(split)), "documents": task.num_input_examples(split)}
        splits[split]["file_sizes"] = sizes
    paths = [pathlib.Path(path) for part in files.values() for path in part]
    folders = ", ".join(sorted({str(path.parent) for path in paths}))
    answer(origin=f"local files in {folders}" if paths else CORPORA[request["task"]].origin, splits=splits)


def write_shard(task, dtype, folder: pathlib.Path, split: str, index: int, count: int) -> None:
    """Write one shard and its record. Each gets its final name only when it is complete.

    Raises:
        OSError: if the disk is full or the folder can't be written.
    """
    import seqio

    name = f"{split}-{index:05d}.bin"
    shard_info = seqio.ShardInfo(index, count) if count > 1 else None
    dataset = task.get_dataset(split=split, sequence_length=None, shuffle=False, shard_info=shard_info)
    digest, told = hashlib.sha256(), time.monotonic()
    tokens, documents, empty, text_bytes = 0, 0, 0, 0
    partial = folder / f"{name}.partial"
    try:
        with open(partial, "wb") as file:
            for example in dataset.as_numpy_iterator():
                if not example["targets_pretokenized"].decode("utf-8").strip():
                    empty += 1
                    continue
                data = example["targets"].astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                tokens, documents = tokens + len(example["targets"]), documents + 1
                text_bytes += len(example["targets_pretokenized"])
                if time.monotonic() - told > 0.5:
                    told = time.monotonic()
                    answer(split=split, shard=index, tokens=tokens, documents=documents, bytes=text_bytes, done=False)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # frees space on a full disk
        raise
    partial.rename(folder / name)
    about = dict(
        file=name, tokens=tokens, documents=documents, empty=empty, bytes=text_bytes, sha256=digest.hexdigest()
    )
    account = folder / f"{name}.json"
    with open(account.with_suffix(".partial"), "w") as file:
        file.write(json.dumps(about))
        file.flush()
        os.fsync(file.fileno())
    account.with_suffix(".partial").rename(account)
    answer(split=split, shard=index, tokens=tokens, documents=documents, bytes=text_bytes, done=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the answers terminates this one
    tf = import_tensorflow()
    from diffeqformer.data.tasks import one_sentence

    first = json.loads(sys.stdin.readline())
    try:
        task, tokenizer = open_task(first)
        answer(ready=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "plan" in request:
                plan(task, first)
            else:
                folder, shard = pathlib.Path(request["folder"]), request["shard"]
                with quiet():  # otherwise a broken document is reported twice, with a full traceback
                    write_shard(task, token_type(tokenizer.vocab_size), folder, *shard)
    except OSError as error:
        answer(error=f"{error.filename or 'config.data.dir'}: {error.strerror or error}")
    except (UserError, tf.errors.OpError) as error:
        answer(error=one_sentence(error))


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
