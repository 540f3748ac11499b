"""TFDS builders of WikiText-103 and OpenWebText. Import this module only where TensorFlow may be imported.

Importing it registers `wikitext103/detokenized`, `wikitext103/raw` and `openwebtext`. Their files are read from
`manual_dir` if they exist there. Otherwise they are downloaded from the Hugging Face hub, which is queried for their
names.
"""

import hashlib
import io
import itertools
import json
import math
import pathlib
import urllib.parse
from collections.abc import Iterable, Iterator

import numpy as np
import requests
import tensorflow_datasets as tfds

from diffeqformer.data import files, wikitext
from diffeqformer.data.seals import write_lasting
from diffeqformer.errors import UserError

HUB = "https://huggingface.co"
TIMEOUT = 30  # seconds to wait for the hub's API
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


def _ask_hub(url: str):
    """The JSON at a URL of the hub. TFDS isn't used, because it retries for minutes and caches old answers."""
    try:
        answer = requests.get(url, timeout=TIMEOUT)
        answer.raise_for_status()
        return answer.json()
    except requests.HTTPError as error:
        found = f"the hub answered {error.response.status_code}"
    except requests.JSONDecodeError:
        found = "the answer isn't JSON"
    except requests.RequestException:
        found = "the hub can't be reached"
    raise UserError(f"{url}: {found}; try again later, or put the files into manual_dir as docs/data.md says")


def hub_files(dataset: str, config: str | None, splits: Iterable[str]) -> dict[str, list[tuple[str, str | None]]]:
    """The Parquet files of a data set on the hub: for each split, in order, (URL, SHA-256 if the hub states one).

    The repository's own Parquet files are preferred to the hub's automatic conversion.

    Args:
        dataset: such as `Salesforce/wikitext`.
        config: folder of the repository and name of the conversion's configuration; None if there is only one.

    Raises:
        UserError: if the hub can't be reached, or a split has no files there or is incomplete.
    """
    listing = f"{HUB}/api/datasets/{dataset}/tree/main?recursive=true"
    found = {split: [] for split in splits}
    for entry in sorted(_ask_hub(listing), key=lambda entry: entry["path"]):
        path = pathlib.PurePosixPath(entry["path"])
        if path.suffix != ".parquet" or config not in (None, *path.parts[:-1]):
            continue
        for split in found:
            if path.name.startswith(split) or path.parent.name == split:
                url = f"{HUB}/datasets/{dataset}/resolve/main/{urllib.parse.quote(entry['path'])}"
                found[split].append((url, entry.get("lfs", {}).get("oid")))
    if not any(found.values()):
        listing = f"{HUB}/api/datasets/{dataset}/parquet"
        configs = _ask_hub(listing)
        name = config if config in configs else next(iter(configs), None)
        if name is None or (name != config and len(configs) > 1):
            raise UserError(
                f"{listing}: configurations {sorted(configs)} instead of '{config}'; use manual_dir (docs/data.md)"
            )
        found = {split: [(url, None) for url in configs[name].get(split, [])] for split in found}
    for split, entries in found.items():
        if not entries:
            raise UserError(
                f"{listing}: the hub has no Parquet files of split '{split}'; put them into manual_dir (docs/data.md)"
            )
        for url, _ in entries:
            if "/partial-" in url:
                raise UserError(
                    f"{url}: the hub has converted only a part of the data; put all into manual_dir (docs/data.md)"
                )
        if len({url.rpartition("/")[0] for url, _ in entries}) > 1:
            raise UserError(
                f"{listing}: split '{split}' is in several folders; put the right one into manual_dir (docs/data.md)"
            )
    return found


def download(dl_manager: tfds.download.DownloadManager, name: str, wanted: dict[str, list[tuple[str, str | None]]]):
    """Download the files that `hub_files` found, and return the local paths of each split.

    `<download_dir>/<name>.downloads.json` records size and SHA-256 of every file, and whether the hub stated that hash.

    Raises:
        UserError: if a download fails, or if a file's hash differs from the hub's or the recorded one.
    """
    stated = dict(itertools.chain.from_iterable(wanted.values()))
    try:
        paths = dl_manager.download({url: url for url in stated})
    except tfds.download.DownloadError as error:  # its message names the URL
        raise UserError(
            f"{str(error).rstrip('.')}; try again later, or put the files into manual_dir (docs/data.md)"
        ) from None
    except requests.RequestException as error:
        url = error.request.url if error.request else HUB
        raise UserError(
            f"{url}: the download broke off ({type(error).__name__}); try again, or put the files into manual_dir "
            "(docs/data.md)"
        ) from None
    except ValueError as error:  # TFDS found a difference from its cache
        raise UserError(
            f"{name}: a file of the hub isn't the one downloaded before ({error}); if that is right, delete both"
        ) from None
    record = pathlib.Path(dl_manager.download_dir) / f"{name}.downloads.json"
    try:
        known = json.loads(record.read_text()) if record.exists() else {}
    except ValueError:
        raise UserError(f"{record}: this record can't be read; delete it to begin a new one") from None
    for url, path in paths.items():
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        before = known.get(url, {}).get("sha256")
        for expected, source in ((stated[url], "the hub states"), (before, f"{record} records")):
            if expected not in (None, sha256):
                raise UserError(
                    f"{url}: SHA-256 {sha256} in {path}, but {source} {expected}; delete the one that is wrong and try "
                    "again"
                )
        known[url] = {"bytes": pathlib.Path(path).stat().st_size, "sha256": sha256, "stated_by_hub": bool(stated[url])}
        print(f"{name}: {url}\n  SHA-256 {sha256}, {'as the hub states' if stated[url] else 'none stated by the hub'}")
    write_lasting(record, json.dumps(known, indent=1))
    return {split: [paths[url] for url, _ in entries] for split, entries in wanted.items()}


def manual_files(dl_manager: tfds.download.DownloadManager, name: str) -> list[pathlib.Path]:
    """The files in `<manual_dir>/<name>`, sorted by name; empty if there is no such folder."""
    try:
        folder = pathlib.Path(dl_manager.manual_dir) / name
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
            paths = download(
                dl_manager, self.name, hub_files("Salesforce/wikitext", "wikitext-103-raw-v1", self.SPLITS)
            )
        else:
            paths = download(dl_manager, self.name, hub_files("dlwh/wikitext_103_detokenized", None, self.SPLITS))
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
            paths = download(dl_manager, self.name, hub_files("Skylion007/openwebtext", None, ["train"]))["train"]
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
