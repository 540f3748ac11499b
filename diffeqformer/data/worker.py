"""A process that reads text for `diffeqformer.data.preparation`, which itself imports no TensorFlow.

Requests arrive as lines of JSON on standard input. Answers are lines of JSON on the original standard output; anything
else that is printed goes to standard error. The first request names the task. `plan` fetches the corpus and asks for
the list of work, and `shard` writes one shard. Shard i of n holds the documents of the i-th of the source's n files, so
the shards don't depend on the number of processes. Where SeqIO isn't installed, it does the same without it.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Collection, Iterator

import numpy as np

from diffeqformer.data.files import Layout
from diffeqformer.data.quiet import check_installed, import_tensorflow, not_installed, quiet
from diffeqformer.data.seals import write_lasting
from diffeqformer.data.store import SPLITS, token_type
from diffeqformer.data.texts import open_texts
from diffeqformer.data.tokenizers import Tokenizer, lost_in, restore_tokenizer
from diffeqformer.errors import UserError, unforeseen


def answer(**fields) -> None:
    """Send one line of JSON to the waiting process."""
    try:
        ANSWERS.write(json.dumps(fields) + "\n")
        ANSWERS.flush()
    except BrokenPipeError:
        os._exit(1)  # that process was killed; the next one removes unfinished files here


class TaskTexts:
    """The documents of a SeqIO task, tokenized by it. The corpus is fetched if it is missing.

    Args:
        request: the first one.

    Raises:
        UserError: if the corpus, or the module that adds it, doesn't exist, or it can't be fetched.
    """

    def __init__(self, request: dict, tokenizer: Tokenizer):
        from diffeqformer.data import tasks

        tasks.configure(request["module"], request["tfds_dir"])
        # without the usual preprocessors: `write_shard` itself leaves out blank documents, and counts them
        layout = Layout(*request.get("layout", ()))
        self.task = tasks.add_task(request["task"], tokenizer, request["files"], layout=layout, preprocessors=())
        local = request["files"]
        self.texts = self.task.source.texts if local else None
        self.origin = self.texts.origin if local else tasks.CORPORA[request["task"]].origin

    def fetch(self) -> None:
        from diffeqformer.data.tasks import fetch

        fetch(self.task)

    found = None  # SeqIO finds the corpus again in each process

    @property
    def splits(self) -> Collection[str]:
        """The names of the splits. TFDS knows them once the corpus is fetched."""
        return self.task.splits

    def entry(self, split: str) -> dict:
        """The plan of a split."""
        sizes = self.texts.sizes(split) if self.texts else []
        number = self.task.num_input_examples(split)
        return {"shards": len(self.task.source.list_shards(split)), "documents": number, "file_sizes": sizes}

    def examples(self, split: str, index: int, count: int) -> Iterator[tuple[bytes, np.ndarray]]:
        """The documents of one of `count` shards, as UTF-8 and as ids."""
        from diffeqformer.data.tasks import examples

        return examples(self.task, split, index, count)


class PlainTexts:
    """The same where SeqIO isn't installed.

    Raises:
        UserError: if there is no such corpus, or it needs SeqIO.
    """

    def __init__(self, request: dict, tokenizer: Tokenizer):
        if request["module"]:
            check_installed(f"config.data.module: {request['module']}")
        layout = Layout(*request.get("layout", ()))
        self.texts = open_texts(request["task"], request["files"], request["tfds_dir"], layout)
        self.tokenizer = tokenizer
        self.splits, self.origin = self.texts.splits, self.texts.origin
        self.texts.found = request.get("found")

    def fetch(self) -> None:
        self.texts.fetch()

    @property
    def found(self) -> dict | None:
        """What `fetch` has found, for the other processes."""
        return self.texts.found

    def entry(self, split: str) -> dict:
        """The plan of a split."""
        return {"shards": self.texts.shards(split), "documents": None, "file_sizes": self.texts.sizes(split)}

    def examples(self, split: str, index: int, count: int) -> Iterator[tuple[bytes, np.ndarray]]:
        """The documents of one of `count` shards, as UTF-8 and as ids."""
        for text in self.texts.documents(split, index, count):
            yield text.encode(), np.array([*self.tokenizer.encode(text), self.tokenizer.end_of_text])


def plan(texts: TaskTexts | PlainTexts, request: dict) -> None:
    """Fetch the corpus if it is missing, and answer with its origin and each split's number of shards and documents.

    Raises:
        UserError: if it can't be fetched.
    """
    texts.fetch()
    missing = [split for split in SPLITS if split not in texts.splits]
    if missing:
        raise UserError(
            f"config.data.task: {request['task']} has no split {missing[0]}; a store needs {' and '.join(SPLITS)}"
        )
    answer(origin=texts.origin, found=texts.found, splits={split: texts.entry(split) for split in SPLITS})


def write_shard(
    texts: TaskTexts | PlainTexts, tokenizer: Tokenizer, folder: pathlib.Path, split: str, index: int, count: int
) -> None:
    """Write one shard and its record. Each gets its final name only when it is complete.

    Raises:
        OSError: if the disk is full or the folder can't be written.
    """
    name = f"{split}-{index:05d}.bin"
    digest, told, dtype = hashlib.sha256(), time.monotonic(), token_type(tokenizer.vocab_size)
    tokens, documents, empty, text_bytes, unknown, altered = 0, 0, 0, 0, 0, 0
    partial = folder / f"{name}.partial"
    try:
        with open(partial, "wb") as file:
            for text, ids in texts.examples(split, index, count):
                if not (content := text.decode("utf-8")).strip():
                    empty += 1
                    continue
                data = ids.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                tokens, documents, text_bytes = tokens + len(ids), documents + 1, text_bytes + len(text)
                lost = lost_in(tokenizer, content, ids)
                unknown, altered = unknown + lost[0], altered + lost[1]
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
        file=name, tokens=tokens, documents=documents, empty=empty, bytes=text_bytes, sha256=digest.hexdigest(),
        unknown=unknown, altered=altered,
    )  # fmt: skip
    write_lasting(folder / f"{name}.json", json.dumps(about))
    answer(split=split, shard=index, tokens=tokens, documents=documents, bytes=text_bytes, done=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the answers terminates this one
    line = sys.stdin.readline()  # before the imports: all workers get their tasks at once, and import side by side
    if not line.endswith("\n"):
        return  # the process that waits for the answers was killed before it asked
    kind, errors, say = PlainTexts, UserError, str
    if not not_installed():
        tf = import_tensorflow()
        from diffeqformer.data.tasks import one_sentence

        kind, errors, say = TaskTexts, (UserError, tf.errors.OpError), one_sentence
    first = json.loads(line)
    try:
        tokenizer = restore_tokenizer(*first["tokenizer"])
        texts = kind(first, tokenizer)
        answer(ready=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "plan" in request:
                plan(texts, first)
            else:
                folder, shard = pathlib.Path(request["folder"]), request["shard"]
                with quiet():  # otherwise a broken document is reported twice, with a full traceback
                    write_shard(texts, tokenizer, folder, *shard)
    except OSError as error:
        answer(error=f"{error.filename or 'config.data.dir'}: {error.strerror or error}")
    except errors as error:
        answer(error=say(error))
    except Exception as error:  # a corpus can be the user's own code
        answer(error=f"config.data.task: {first['task']}: {unforeseen(error)}")


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
