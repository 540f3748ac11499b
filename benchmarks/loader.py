"""Reading speed: tokens per second of one process that reads batches of shuffled windows from a token store on disk.

    python benchmarks/loader.py --gigabytes=4 --folder=/local/disk

The store is temporary and has random ids. Data that the operating system still caches in memory is read faster than
from the disk. To measure the disk, use more gigabytes than the machine has memory.
"""

import pathlib
import tempfile
import time

import numpy as np
from absl import flags

from diffeqformer.console import command_line
from diffeqformer.data.store import Split

GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "Size of the store.")
FOLDER = flags.DEFINE_string("folder", None, "Folder of the store; by default the folder for temporary files.")
SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 1024, "Tokens of a window.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Windows of a batch.")
BATCHES = flags.DEFINE_integer("batches", 100, "Batches in each of the two passes.")
SHARDS = 8


def measure() -> None:
    """Make the store, read two passes of different batches, and print their rates."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=FOLDER.value) as folder:
        shards = []
        for i in range(SHARDS):
            path = pathlib.Path(folder, f"train-{i:05d}.bin")
            random.integers(0, 50_257, int(GIGABYTES.value * 1e9) // 2 // SHARDS, np.uint16).tofile(path)
            shards.append(np.memmap(path, np.uint16, "r"))
        split = Split(tuple(shards), text_bytes=1, sha256="")
        split.batch(0, 1, SEQUENCE_LENGTH.value, seed=0)  # this computes the epoch's order, once
        for first in (1, 1 + BATCHES.value):
            start, tokens = time.perf_counter(), 0
            for step in range(first, first + BATCHES.value):
                tokens += split.batch(step, BATCH_SIZE.value, SEQUENCE_LENGTH.value, seed=0).size
            rate = tokens / (time.perf_counter() - start) / 1e6
            print(f"{split.size:,} tokens, batches {first} to {step}: {rate:,.1f} M tokens/s")


if __name__ == "__main__":
    command_line.run(measure)
