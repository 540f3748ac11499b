"""A corpus that needs no download: the Python files of the installed packages that constraints.txt pins.

A package is in one split. Exact duplicates of files are dropped, and files above 128 KiB, most of which are tables. Of
the packages for validation only every 16th file is taken. The SHA-256 that is printed identifies the text.
"""

import hashlib
import importlib.metadata
import itertools
import json
import pathlib
from collections.abc import Iterator

from packaging.requirements import Requirement

from diffeqformer.console.results import write_text

CONSTRAINTS = pathlib.Path(__file__).parents[1] / "constraints.txt"
MOST_BYTES = 2**17


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pinned_packages() -> Iterator[importlib.metadata.Distribution]:
    """The packages of constraints.txt that are installed at their version."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.partition("#")[0].strip():
            wanted = Requirement(line)
            found = next(importlib.metadata.distributions(name=wanted.name), None)
            if found and wanted.specifier.contains(found.version) and (not wanted.marker or wanted.marker.evaluate()):
                yield found


def documents() -> dict[str, list[str]]:
    """The texts of each split, in the order of their hashes."""
    splits: dict[str, dict[str, str]] = {"train": {}, "validation": {}}
    for package in pinned_packages():
        validates = hashed(package.name.lower().encode())[0] == "0"
        for path in package.files or ():
            place = pathlib.Path(package.locate_file(path))
            if path.suffix != ".py" or not place.is_file() or not 0 < place.stat().st_size <= MOST_BYTES:
                continue
            content = place.read_bytes()
            name = hashed(content)
            if not validates or name[0] == "0":
                splits["validation" if validates else "train"][name] = content.decode("utf-8", "replace")
    for name in splits["train"].keys() & splits["validation"].keys():
        del splits["train"][name]
    return {split: [texts[name] for name in sorted(texts)] for split, texts in splits.items()}


def write_corpus(folder: pathlib.Path, most_bytes: dict[str, int] | None = None) -> list[str]:
    """Write the corpus into a folder, unless it is there.

    Returns:
        the options of a run on it.

    Args:
        most_bytes: of each split, of which the first files are taken; by default all.
    """
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "validation")}
    if not all(path.exists() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for split, texts in documents().items():
            if most_bytes:
                ends = itertools.accumulate(len(text.encode()) for text in texts)
                texts = [text for text, end in zip(texts, ends) if end <= most_bytes[split]]
            text = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            write_text(paths[split], text)
            print(f"{paths[split]}: {len(texts)} files, {len(text):,} bytes, SHA-256 {hashed(text.encode())}")
    return ["--config.data.task=python_packages"] + [
        f"--config.data.{split}_files={path}" for split, path in paths.items()
    ]
