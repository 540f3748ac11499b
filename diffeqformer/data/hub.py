"""Downloads of data sets from the Hugging Face hub, by `huggingface_hub`, with a record of what came.

The settings of `huggingface_hub` apply: HF_TOKEN, HF_ENDPOINT and others. Its import takes 0.2 s.
"""

import contextlib
import glob
import json
import pathlib
from collections.abc import Iterator, Sequence

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from diffeqformer.console.results import write_whole
from diffeqformer.data.seals import from_json
from diffeqformer.data.store import sha256
from diffeqformer.errors import UserError, reason_of

CONVERTED = "refs/convert/parquet"  # branch of a data set's repository with the hub's own conversion


@contextlib.contextmanager
def asking_hub(
    what: str, remedy: str = "try again later, or put the files into manual_dir as docs/data.md says"
) -> Iterator[None]:
    """Say what errors of `huggingface_hub` mean for the user, but for those of the disk, which have a number."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of Xet, from where the hub's files come
        if getattr(error, "errno", None) or isinstance(error, RevisionNotFoundError):
            raise
        asked = error.__cause__ or error  # the request that failed, if that made a file missing
        status = getattr(getattr(asked, "response", None), "status_code", None)
        absent = f"the hub can't be reached, {type(asked).__name__}: {reason_of(error)}"
        raise UserError(f"{what}: {f'the hub answered {status}' if status else absent}; {remedy}") from None


def hub_files(dataset: str, config: str | None, splits: Sequence[str]) -> tuple[str, dict[str, list[RepoFile]]]:
    """The commit that has a data set's Parquet files on the hub, and the files of each split.

    The repository's own files are preferred to the hub's conversion, which is a branch of the same repository. `config`
    is a folder of the repository, which is also the conversion's configuration; None if there is only one.
    """
    commit, found = "", {split: [] for split in splits}
    for branch in ("main", CONVERTED):
        try:
            with asking_hub(dataset):
                commit = HfApi().dataset_info(dataset, revision=branch).sha
                tree = list(HfApi().list_repo_tree(dataset, repo_type="dataset", revision=commit, recursive=True))
        except RevisionNotFoundError:
            continue
        for file in sorted((entry for entry in tree if isinstance(entry, RepoFile)), key=lambda file: file.path):
            path = pathlib.PurePosixPath(file.path)
            if path.suffix == ".parquet" and config in (None, *path.parts[:-1]):
                for split in splits:
                    if path.name.startswith(split) or path.parent.name in (split, f"partial-{split}"):
                        found[split].append(file)
        if any(found.values()):
            break
    for split, files in found.items():
        folders = {file.path.rpartition("/")[0] for file in files}
        if len(folders) != 1 or any(folder.endswith(f"partial-{split}") for folder in folders):
            raise UserError(
                f"{dataset}: the hub must have split '{split}' as Parquet files in one folder, and as a whole, but it "
                f"is in {sorted(folders)}; put its files into manual_dir (docs/data.md)"
            )
    return commit, found


def _downloaded(record: pathlib.Path, splits: Sequence[str]) -> dict[str, dict[str, str]] | None:
    """What the record of the last download says, if it can be read and all files have the hashes that it names."""
    try:
        files = {split: from_json(record.read_bytes())["files"][split] for split in splits}
        for path, recorded in (each for entries in files.values() for each in entries.items()):
            if sha256(record.parent / path) != recorded:
                return None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    print(f"{record.parent}: reading the files that {record.name} describes")
    return files


def download(
    downloads: pathlib.Path, dataset: str, config: str | None, splits: Sequence[str]
) -> dict[str, list[pathlib.Path]]:
    """The local paths of each split's files. Without the hub if those of the last download are whole.

    Otherwise the files that `hub_files` finds are downloaded, unless they are there already.
    `<downloads>/<dataset>/downloads.json` records their commit, and their SHA-256 by split and path.
    """
    where = downloads / dataset
    record = where / "downloads.json"
    if not (files := _downloaded(record, splits)):
        commit, found = hub_files(dataset, config, splits)
        with asking_hub(dataset):
            wanted = [glob.escape(file.path) for entries in found.values() for file in entries]
            snapshot_download(dataset, repo_type="dataset", revision=commit, local_dir=where, allow_patterns=wanted)
        files = {split: {file.path: _checked(where, file) for file in found[split]} for split in splits}
        write_whole(record, json.dumps({"commit": commit, "files": files}, indent=1))
    return {split: [where / path for path in files[split]] for split in splits}


def _checked(where: pathlib.Path, file: RepoFile) -> str:
    """The SHA-256 of a downloaded file, which must be the one that the hub states, if it states one."""
    path, stated = where / file.path, file.lfs and file.lfs.sha256
    found = sha256(path)
    if stated not in (None, found):
        raise UserError(f"{path}: has the SHA-256 {found}, but the hub states {stated}; delete it and try again")
    print(f"{path}\n  SHA-256 {found}, {'as the hub states' if stated else 'none stated by the hub'}")
    return found
