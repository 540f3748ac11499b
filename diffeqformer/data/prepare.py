"""Materialise a task into its token store, once.

    python -m diffeqformer.data.prepare --task=python_stdlib --dir=token_stores

This process imports TensorFlow; `diffeqformer.main` starts it when a store is missing.
"""

import argparse
import os
import pathlib
import sys
import time

from diffeqformer.data import TASK_TOKENIZERS
from diffeqformer.data.store import write_store
from diffeqformer.data.tokenizers import TOKENIZERS


def documents(task, split: str):
    """The documents of a split as (ids, bytes of text), with a progress line on the way."""
    start, tokens, shown = time.monotonic(), 0, 0.0
    for example in task.get_dataset(split=split, sequence_length=None, shuffle=False).as_numpy_iterator():
        tokens += len(example["targets"])
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"  {split}: {tokens:,} tokens, {tokens / (shown - start + 1e-9):,.0f} tokens/s", flush=True)
        yield example["targets"], len(example["targets_pretokenized"])
    print(f"  {split}: {tokens:,} tokens in {time.monotonic() - start:.1f} s", flush=True)


def prepare(task_name: str, folder: pathlib.Path) -> None:
    """Write the token store of a registered task into `folder`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import seqio

    from diffeqformer.data import tasks

    task = seqio.TaskRegistry.get(task_name)
    tokenizer = TOKENIZERS[TASK_TOKENIZERS[task_name]]()
    source = tasks.ORIGINS[task_name]
    print(f"Preparing {task_name} ({source}) into {folder}", flush=True)
    write_store(folder, task_name, tokenizer, source, {split: documents(task, split) for split in task.splits})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True, choices=sorted(TASK_TOKENIZERS))
    parser.add_argument("--dir", required=True, type=pathlib.Path, help="folder of the token stores")
    arguments = parser.parse_args()
    folder = arguments.dir / arguments.task
    if folder.exists():
        sys.exit(f"{folder}: already there; delete it to prepare it anew")
    try:
        prepare(arguments.task, folder)
    except OSError as error:
        sys.exit(f"{error.filename or folder}: {error.strerror or error}; choose another --dir, or make room there")


if __name__ == "__main__":
    main()
