"""A process that reads text for `diffeqformer.data.preparation`, which itself imports no TensorFlow.

Requests arrive as lines of JSON on standard input. Answers are lines of JSON on the original standard output; anything
else that is printed goes to standard error. The first request names the task. If it doesn't say what was `found`, the
corpus is fetched, and the answer is the list of work. Each other request is a folder and a shard to write into it.
Shard i of n holds the documents of the i-th of the source's n files, so the shards don't depend on the number of
processes.
"""

import collections
import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

from diffeqformer.console.results import whole_file, write_whole
from diffeqformer.data.files import Layout
from diffeqformer.data.store import SPLITS, token_type
from diffeqformer.data.texts import open_corpus
from diffeqformer.data.tokenizers import Tokenizer, lost_in, restore_tokenizer
from diffeqformer.errors import UserError, unforeseen


def answer(**fields) -> None:
    """Send one line of JSON to the waiting process."""
    try:
        ANSWERS.write(json.dumps(fields) + "\n")
        ANSWERS.flush()
    except BrokenPipeError:
        os._exit(1)  # that process was killed; the next one removes unfinished files here


def plan(texts, task: str) -> None:
    """Fetch the corpus if it is missing, and answer with its origin and each split's number of shards."""
    texts.fetch()
    for split in SPLITS:
        if split not in texts.splits:
            raise UserError(f"config.data.task: {task} has no split {split}; a store needs {' and '.join(SPLITS)}")
    answer(origin=texts.origin, found=texts.found, shards={split: texts.shards(split) for split in SPLITS})


def write_shard(texts, tokenizer: Tokenizer, folder: pathlib.Path, split: str, index: int, count: int) -> None:
    """Write one shard and its record. Each gets its final name only when it is complete."""
    name = f"{split}-{index:05d}.bin"
    digest, told, dtype = hashlib.sha256(), time.monotonic(), token_type(tokenizer.vocab_size)
    sums = collections.Counter(dict.fromkeys(("tokens", "documents", "empty", "bytes", "unknown", "altered"), 0))
    with whole_file(folder / name, "xb") as file:
        for text in texts.documents(split, index, count):
            if not text.strip():
                sums["empty"] += 1
                continue
            ids = tokenizer.encode(text)
            data = np.array([*ids, tokenizer.end_of_text], dtype).tobytes()
            file.write(data)
            digest.update(data)
            unknown, altered = lost_in(tokenizer, text, ids)
            sums.update(tokens=len(ids) + 1, documents=1, bytes=len(text.encode()), unknown=unknown, altered=altered)
            if time.monotonic() - told > 0.5:
                told = time.monotonic()
                answer(split=split, shard=index, done=False, **sums)
    write_whole(folder / f"{name}.json", json.dumps({"file": name, **sums, "sha256": digest.hexdigest()}))
    answer(split=split, shard=index, done=True, **sums)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the answers terminates this one
    line = sys.stdin.readline()  # before the imports: all workers get their tasks at once, and import side by side
    if not line.endswith("\n"):
        return  # the process that waits for the answers was killed before it asked
    first = json.loads(line)
    try:
        tokenizer = restore_tokenizer(*first["tokenizer"])
        texts = open_corpus(first["task"], first["files"], Layout(*first["layout"]), first["module"])
        if "found" in first:
            texts.found = first["found"]
        else:
            plan(texts, first["task"])
        for line in sys.stdin:
            folder, shard = json.loads(line)
            write_shard(texts, tokenizer, pathlib.Path(folder), *shard)
    except OSError as error:
        answer(error=f"{error.filename or 'config.data.dir'}: {error.strerror or error}")
    except UserError as error:
        answer(error=str(error))
    except Exception as error:  # a corpus can be the user's own code
        answer(error=f"config.data.task: {first['task']}: {unforeseen(error)}")


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
