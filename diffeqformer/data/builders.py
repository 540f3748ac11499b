"""TFDS builders of WikiText-103 and OpenWebText. Import this module only where TensorFlow may be imported.

Importing it registers `wikitext103/detokenized`, `wikitext103/raw` and `openwebtext`. Their files are read from
`manual_dir` if they exist there. Otherwise they are downloaded from the Hugging Face hub by `huggingface_hub`, whose
settings apply: HF_TOKEN, HF_ENDPOINT and others.
"""

import contextlib
import glob
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from diffeqformer.data import files, wikitext
from diffeqformer.data.seals import write_lasting
from diffeqformer.errors import UserError

CONVERTED = "refs/convert/parquet"  # branch of a data set's repository with the hub's own conversion
OPENWEBTEXT_DOCUMENTS = 8_013_769
VALIDATION_FRACTION, VALIDATION_SEED = 0.0005, 2357

MANUAL = """\
To work without a network, put the files into `wikitext103/detokenized`, `wikitext103/raw` or `openwebtext` in
manual_dir. WikiText needs one or more files for each split. Their names begin with train, valid or test (or with
wiki.train, ...), and they are .parquet, .jsonl, .txt, .tokens or .raw files. OpenWebText takes any number of .parquet
or .jsonl files, which are read in the order of their names.
"""


def validation_rows(count: int) -> np.ndarray:
    """The rows of OpenWebText that make up the validation split, in order, as int64 of shape [ceil(0.0005 count)].

    They are the test part of Hugging Face datasets' `train_test_split(test_size=0.0005, seed=2357, shuffle=True)`.
    """
    return np.random.default_rng(VALIDATION_SEED).permutation(count)[: math.ceil(VALIDATION_FRACTION * count)]


@contextlib.contextmanager
def _asking_hub(dataset: str) -> Iterator[None]:
    """Say what errors of `huggingface_hub` mean for the user, but for those of the disk, which have a number."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of Xet, from where the hub's files come
        if getattr(error, "errno", None) or isinstance(error, RevisionNotFoundError):
            raise
        asked = error.__cause__ or error  # the request that failed, if that made a file missing
        status = getattr(getattr(asked, "response", None), "status_code", None)
        reason = (str(error).strip().splitlines() or [""])[0]
        found = (
            f"the hub answered {status}" if status else f"the hub can't be reached, {type(asked).__name__}: {reason}"
        )
        raise UserError(
            f"{dataset}: {found}; try again later, or put the files into manual_dir as docs/data.md says"
        ) from None


def _on_disk(folder: epath.PathLike) -> pathlib.Path:
    """A folder of TFDS.

    Raises:
        UserError: if it is a URL.
    """
    if "://" in os.fspath(folder):
        raise UserError(
            f"config.data.tfds_dir: a corpus must be written to this machine's disk first, and not to {folder}; choose "
            "a folder here"
        )
    return pathlib.Path(folder)


def hub_files(dataset: str, config: str | None, splits: Iterable[str]) -> tuple[str, str, dict[str, list[RepoFile]]]:
    """The Parquet files of a data set on the hub: the branch that has them, its commit, and the files of each split.

    The repository's own files are preferred to the hub's conversion, which is a branch of the same repository.

    Args:
        dataset: such as `Salesforce/wikitext`.
        config: folder of the repository, which is also the conversion's configuration; None if there is only one.

    Raises:
        UserError: if the hub can't be reached, or a split has no files there or is incomplete.
    """
    hub, splits = HfApi(), tuple(splits)
    for branch in ("main", CONVERTED):
        try:
            with _asking_hub(dataset):
                commit = hub.dataset_info(dataset, revision=branch).sha
                tree = list(hub.list_repo_tree(dataset, repo_type="dataset", revision=commit, recursive=True))
        except RevisionNotFoundError:
            continue
        found = {split: [] for split in splits}
        for file in sorted((entry for entry in tree if isinstance(entry, RepoFile)), key=lambda file: file.path):
            path = pathlib.PurePosixPath(file.path)
            if path.suffix == ".parquet" and config in (None, *path.parts[:-1]):
                for split in splits:
                    if path.name.startswith(split) or path.parent.name in (split, f"partial-{split}"):
                        found[split].append(file)
        if any(found.values()):
            _check_whole(dataset, found)
            return branch, commit, found
    raise UserError(f"{dataset}: the hub has no Parquet files of it; put its files into manual_dir (docs/data.md)")


def _check_whole(dataset: str, found: dict[str, list[RepoFile]]) -> None:
    """Check that each split is there, as a whole, and once."""
    for split, entries in found.items():
        folders = {file.path.rpartition("/")[0] for file in entries}
        if not entries:
            problem = f"the hub has no Parquet files of split '{split}'; put them"
        elif any(folder.endswith(f"partial-{split}") for folder in folders):
            problem = f"the hub has converted only a part of split '{split}'; put all"
        elif len(folders) > 1:
            problem = f"split '{split}' is in several folders of the hub, {sorted(folders)}; put the right one"
        else:
            continue
        raise UserError(f"{dataset}: {problem} into manual_dir (docs/data.md)")


def download(
    dl_manager: tfds.download.DownloadManager, name: str, dataset: str, config: str | None, splits: Iterable[str]
) -> dict[str, list[pathlib.Path]]:
    """Download the files that `hub_files` finds, and return the local paths of each split.

    Files that are whole aren't downloaded again. `<download_dir>/<name>.downloads.json` records size and SHA-256 of
    every file, the commit that it came from, and whether the hub stated that hash.

    Raises:
        UserError: if a download fails, or if a file's hash differs from the hub's or the recorded one.
    """
    downloads = _on_disk(dl_manager.download_dir)
    branch, commit, found = hub_files(dataset, config, splits)
    wanted = list(itertools.chain.from_iterable(found.values()))
    where, record = downloads / dataset, downloads / f"{name}.downloads.json"
    with _asking_hub(dataset):
        snapshot_download(
            dataset, repo_type="dataset", revision=commit, local_dir=where,
            allow_patterns=[glob.escape(file.path) for file in wanted],
        )  # fmt: skip
    try:
        known = json.loads(record.read_text()) if record.exists() else {}
    except ValueError:
        raise UserError(f"{record}: this record can't be read; delete it to begin a new one") from None
    for file in wanted:
        url, path = f"hf://datasets/{dataset}@{branch}/{file.path}", where / file.path  # of any HF_ENDPOINT
        with open(path, "rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        stated, before = file.lfs and file.lfs.sha256, known.get(url, {}).get("sha256")
        for expected, source in ((stated, "the hub states"), (before, f"{record} records")):
            if expected not in (None, sha256):
                raise UserError(
                    f"{url}: SHA-256 {sha256} in {path}, but {source} {expected}; delete the one that is wrong and try "
                    "again"
                )
        known[url] = {"bytes": path.stat().st_size, "sha256": sha256, "stated_by_hub": bool(stated), "commit": commit}
        print(f"{name}: {url}\n  SHA-256 {sha256}, {'as the hub states' if stated else 'none stated by the hub'}")
    write_lasting(record, json.dumps(known, indent=1))
    return {split: [where / file.path for file in entries] for split, entries in found.items()}


def manual_files(dl_manager: tfds.download.DownloadManager, name: str) -> list[pathlib.Path]:
    """The files in `<manual_dir>/<name>`, sorted by name; empty if there is no such folder."""
    try:
        folder = _on_disk(dl_manager.manual_dir) / name
    except AssertionError:  # TFDS raises this if manual_dir is missing or empty
        return []
    found = sorted(path for path in folder.glob("*") if path.is_file() and not path.name.startswith("."))
    if folder.is_dir() and not found:
        raise UserError(f"{folder}: the folder is empty; put the files there, or remove it to download them")
    if found:
        print(f"{name}: reading {len(found)} files of {folder}")
    return found


class Wikitext103(tfds.core.GeneratorBasedBuilder):
    """WikiText-103, one article per example, in the order of the source.

    The hub's rows of `detokenized` are used unchanged. Whether each is one article couldn't be checked.
    """

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="detokenized", description="As prose: dlwh/wikitext_103_detokenized."),
        tfds.core.BuilderConfig(name="raw", description="As tokens, without <unk>: Salesforce/wikitext."),
    ]
    SPLITS = ("train", "validation", "test")

    def _info(self) -> tfds.core.DatasetInfo:
        return _text_info(self, "Featured and good articles of Wikipedia (Merity et al., 2016).")

    def _split_generators(self, dl_manager):
        name = f"{self.name}/{self.builder_config.name}"
        if found := manual_files(dl_manager, name):
            paths = {split: [] for split in self.SPLITS}
            for path in found:
                for split in self.SPLITS:
                    if path.name.removeprefix("wiki.").startswith(split[:5]):  # `valid` is short for validation
                        paths[split].append(path)
            for split in self.SPLITS:
                if not paths[split]:
                    raise UserError(
                        f"{found[0].parent}: no file of split '{split}'; put one there: {split}.parquet, ..."
                    )
        elif self.builder_config.name == "raw":
            paths = download(dl_manager, self.name, "Salesforce/wikitext", "wikitext-103-raw-v1", self.SPLITS)
        else:
            paths = download(dl_manager, self.name, "dlwh/wikitext_103_detokenized", None, self.SPLITS)
        return {split: self._generate_examples(paths[split]) for split in self.SPLITS}

    def _generate_examples(self, paths):
        if self.builder_config.name == "raw":
            texts = wikitext.articles_of_lines(itertools.chain.from_iterable(map(_lines, paths)))
        else:
            texts = itertools.chain.from_iterable(map(_detokenized, paths))
        for row, text in enumerate(texts):
            yield row, {"text": text}


def _lines(path) -> Iterator[str]:
    """The lines of all documents, each with a line feed. On the hub a row is a line; blank rows have no line feed."""
    if files.kind(path) in files.PLAIN:
        yield from files.read_lines(path)
    else:
        for row in files.read_texts(path):
            yield from io.StringIO(row if row.endswith("\n") else row + "\n", newline="\n")


def _detokenized(path) -> Iterator[str]:
    if files.kind(path) in files.PLAIN:
        return map(wikitext.detokenize, wikitext.articles_of_lines(files.read_lines(path)))
    return files.read_texts(path)


class Openwebtext(tfds.core.GeneratorBasedBuilder):
    """OpenWebText: `train` in the order of the source's rows, `validation` in the order of `validation_rows`.

    The split is the published one if the hub's rows are still in their original order, which couldn't be checked. Their
    number, 8,013,769, is checked, and a difference is printed.
    """

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL

    def _info(self) -> tfds.core.DatasetInfo:
        return _text_info(self, "Web pages that Reddit links to (Gokaslan and Cohen, 2019).")

    def _split_generators(self, dl_manager):
        paths = manual_files(dl_manager, self.name)
        if not paths:
            paths = download(dl_manager, self.name, "Skylion007/openwebtext", None, ["train"])["train"]
        counts = [files.count_texts(path) for path in paths]
        if sum(counts) != OPENWEBTEXT_DOCUMENTS:
            print(
                f"{self.name}: {sum(counts):,} documents instead of {OPENWEBTEXT_DOCUMENTS:,},"
                " so the validation split isn't the published one"
            )
        rows = validation_rows(sum(counts))
        return {
            "train": self._generate_examples(self._all_but(paths, set(rows.tolist())), sum(counts) - len(rows)),
            "validation": self._generate_examples(self._only(paths, counts, rows), len(rows)),
        }

    def _generate_examples(self, texts, count: int):
        """Beyond 1 GB, TFDS sorts examples in buckets, cut evenly from keys of 128 bits: so the keys fill these."""
        for row, text in enumerate(texts):
            yield row * (2**128 // count), {"text": text}

    def _all_but(self, paths, left_out: set[int]) -> Iterator[str]:
        for row, text in enumerate(itertools.chain.from_iterable(map(files.read_texts, paths))):
            if row not in left_out:
                yield text

    def _only(self, paths, counts: list[int], rows: np.ndarray) -> Iterator[str]:
        texts, start = {}, 0
        for path, count in zip(paths, counts):
            here = rows[(rows >= start) & (rows < start + count)] - start
            texts |= {start + row: text for row, text in files.pick_texts(path, here.tolist()).items()}
            start += count
        return (texts[row] for row in rows.tolist())


def _text_info(builder: tfds.core.DatasetBuilder, description: str) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=builder,
        description=description,
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        disable_shuffling=True,  # keep the order of the source; the keys are integers
    )
