"""Downloads of data sets from the Hugging Face hub, by `huggingface_hub`, with a record of what came.

The settings of `huggingface_hub` apply: HF_TOKEN, HF_ENDPOINT and others. Its import takes 0.2 s.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from diffeqformer.data.seals import write_lasting
from diffeqformer.errors import UserError

CONVERTED = "refs/convert/parquet"  # branch of a data set's repository with the hub's own conversion
BRANCHES = ("main", CONVERTED)


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


def _is_of(path: pathlib.PurePosixPath, split: str) -> bool:
    """Whether a file of the hub is of a split, by its name or its folder's."""
    return path.name.startswith(split) or path.parent.name in (split, f"partial-{split}")


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
    for branch in BRANCHES:
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
                    if _is_of(path, split):
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


def _record(downloads: pathlib.Path, name: str) -> tuple[pathlib.Path, dict[str, dict]]:
    """The path and the content of the record of downloads."""
    path = downloads / f"{name}.downloads.json"
    try:
        return path, json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise UserError(f"{path}: this record can't be read; delete it to begin a new one") from None


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def downloaded(
    downloads: pathlib.Path, name: str, dataset: str, splits: Iterable[str]
) -> dict[str, list[pathlib.Path]] | None:
    """The files of the last `download`, by its record. The hub isn't asked.

    Returns:
        their paths by split; None if there is no such record, or a file is missing or has another hash.

    Raises:
        UserError: if the record can't be read.
    """
    record, known = _record(downloads, name)
    found, where = {split: [] for split in splits}, downloads / dataset
    starts = {f"hf://datasets/{dataset}@{branch}/" for branch in BRANCHES}
    recorded = [(url.removeprefix(start), known[url]) for url in known for start in starts if url.startswith(start)]
    for path, entry in sorted(recorded, key=lambda each: each[0]):
        if entry["commit"] != recorded[-1][1]["commit"]:
            continue  # of an earlier download
        if not (where / path).is_file() or _sha256(where / path) != entry["sha256"]:
            return None
        for split in found:
            if _is_of(pathlib.PurePosixPath(path), split):
                found[split].append(where / path)
    if not all(found.values()):
        return None
    print(f"{name}: reading {sum(map(len, found.values()))} files of {where}, which {record} describes")
    return found


def download(
    downloads: pathlib.Path, name: str, dataset: str, config: str | None, splits: Iterable[str]
) -> dict[str, list[pathlib.Path]]:
    """Download the files that `hub_files` finds, and return the local paths of each split.

    Files that are whole aren't downloaded again. `<downloads>/<name>.downloads.json` records size and SHA-256 of every
    file, the commit that it came from, and whether the hub stated that hash. The last download's entries come last.

    Args:
        downloads: the folder, which gets a folder for the data set.
        name: of the record.
        dataset, config, splits: as for `hub_files`.

    Raises:
        UserError: if a download fails, or if a file's hash differs from the hub's or the recorded one.
        OSError: if the folder can't be written.
    """
    branch, commit, found = hub_files(dataset, config, splits)
    wanted = list(itertools.chain.from_iterable(found.values()))
    where = downloads / dataset
    with _asking_hub(dataset):
        snapshot_download(
            dataset, repo_type="dataset", revision=commit, local_dir=where,
            allow_patterns=[glob.escape(file.path) for file in wanted],
        )  # fmt: skip
    record, known = _record(downloads, name)
    for file in wanted:
        url, path = f"hf://datasets/{dataset}@{branch}/{file.path}", where / file.path  # of any HF_ENDPOINT
        sha256 = _sha256(path)
        stated, before = file.lfs and file.lfs.sha256, known.pop(url, {}).get("sha256")
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
