"""Texts from files: .txt (also .tokens, .raw), .jsonl (also .json) and .parquet. The first two may be gzipped (.gz)."""

import codecs
import gzip
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

from diffeqformer.data.seals import from_json
from diffeqformer.errors import UserError

PLAIN = (".txt", ".tokens", ".raw")
JSON_LINES = (".jsonl", ".json")
PARQUET = (".parquet",)
LARGEST = 2**30  # bytes of a document, which is read as a whole; a small compressed file could hold any number
ROWS_AT_ONCE = 4  # of a Parquet file, or fewer: a kilobyte of it can hold a long text a million times


def kind(path: str | os.PathLike) -> str:
    """The suffix that gives a file's format, without `.gz`.

    Raises:
        UserError: if the suffix isn't supported.
    """
    suffixes = pathlib.Path(path).suffixes
    compressed = suffixes[-1:] == [".gz"]
    suffix = (suffixes[:-1] if compressed else suffixes)[-1:]
    if not suffix or suffix[0] not in PLAIN + JSON_LINES + (() if compressed else PARQUET):
        raise UserError(f"{path}: texts can't be read from a file of this kind; use .txt, .jsonl or .parquet")
    return suffix[0]


def check_first(path: str | os.PathLike) -> None:
    """Check that the first document of a file can be read, if the file has one in each line or row.

    Raises:
        UserError: as `read_texts`.
    """
    if kind(path) not in PLAIN:
        next(read_texts(path), None)


def read_texts(path: str | os.PathLike) -> Iterator[str]:
    """The documents of a file: a whole plain file, or the `text` of each JSON line or Parquet row.

    A document of a .jsonl or .parquet file may be empty.

    Raises:
        UserError: if the file is missing, empty, broken, without the field, not UTF-8, or holds too large a document.
    """
    if kind(path) in PARQUET:
        with _open_parquet(path) as file:
            yield from _parquet_texts(path, file, range(file.num_row_groups))
    elif kind(path) in JSON_LINES:
        number = 0
        for number, line in enumerate(read_lines(path), start=1):
            yield _json_text(path, number, line)
    else:
        yield "".join(read_lines(path, whole=True))


def read_lines(path: str | os.PathLike, whole: bool = False) -> Iterator[str]:
    """The lines of a plain or JSON-lines file, with their line feeds. Only a line feed ends a line.

    Args:
        whole: whether all of them are one document.

    Raises:
        UserError: if the file is missing, empty, not UTF-8, or holds too large a line or document.
    """
    offset = 0
    try:
        with gzip.open(path) if os.fspath(path).endswith(".gz") else open(path, "rb") as file:
            while line := file.readline(LARGEST + 1):
                if len(line) + (offset if whole else 0) > LARGEST:
                    what = "a document" if whole else "a line"
                    raise UserError(f"{path}: it has {what} of more than {LARGEST:,} bytes; cut it into several")
                mark = 0 if offset or not line.startswith(codecs.BOM_UTF8) else len(codecs.BOM_UTF8)
                try:
                    yield line[mark:].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}: byte {offset + mark + error.start:,} isn't UTF-8; convert the file to UTF-8"
                    ) from None
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}; put a readable file there") from None
    if not offset:
        raise UserError(f"{path}: the file is empty; put one with text there")


def _json_text(path: str | os.PathLike, number: int, line: str) -> str:
    try:
        text = from_json(line)["text"]
        text.encode("utf-8")  # a lone surrogate, "\ud800", is valid JSON but not valid text
        return text
    except UnicodeEncodeError:
        found = "holds half of a surrogate pair"
    except ValueError:
        found = "isn't a JSON object"
    except (KeyError, TypeError, AttributeError):
        found = "has no string 'text'"
    raise UserError(f'{path}: line {number:,} {found}; write one {{"text": "..."}} a line')


def _open_parquet(path: str | os.PathLike):
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; put a readable file there") from None
    except pyarrow.ArrowInvalid:
        raise UserError(f"{path}: this isn't a whole Parquet file; get it again") from None
    names = file.schema_arrow.names
    if names.count("text") > 1:
        raise UserError(f"{path}: there are several columns 'text' among {names}; keep one of them")
    if "text" not in names:
        raise UserError(f"{path}: there is no column 'text' among {names}; rename the one with the text")
    if not pyarrow.types.is_string(column := file.schema_arrow.field("text").type) and column != pyarrow.large_string():
        raise UserError(f"{path}: column 'text' holds {column} instead of strings; convert it")
    if not file.metadata.num_rows:
        raise UserError(f"{path}: the file has no rows; put one with text there")
    return file


def _strings(path: str | os.PathLike, column, row: int) -> list[str]:
    """The texts of a pyarrow column that begins at `row`. Parquet files can hold nulls and bytes that aren't UTF-8."""
    if column.nbytes > LARGEST:
        raise UserError(f"{path}: the texts from row {row:,} on have more than {LARGEST:,} bytes; cut them")
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError:
        raise UserError(f"{path}: a text from row {row:,} on isn't UTF-8; convert the file to UTF-8") from None
    if None in texts:
        raise UserError(f"{path}: row {row + texts.index(None):,} has no text (null); leave it out")
    return texts


def _parquet_texts(path: str | os.PathLike, file, groups: Sequence[int], row: int = 0) -> Iterator[str]:
    """The texts of some row groups in order, the first of which begins at `row`."""
    import pyarrow

    try:
        for group in groups:
            about = file.metadata.row_group(group)
            columns = [about.column(number) for number in range(about.num_columns)]
            [size] = [column.total_uncompressed_size for column in columns if column.path_in_schema == "text"]
            rows = min(ROWS_AT_ONCE, max(1, LARGEST // max(1, size)))
            for batch in file.iter_batches(rows, [group], columns=["text"]):
                yield from _strings(path, batch.column(0), row)
                row += batch.num_rows
    except (OSError, pyarrow.ArrowInvalid):
        raise UserError(f"{path}: this Parquet file is damaged after row {row:,}; get it again") from None


def count_texts(path: str | os.PathLike) -> int:
    """The number of documents in `read_texts`. The rows of a Parquet file aren't read for this.

    Raises:
        UserError: as `read_texts`.
    """
    if kind(path) in PARQUET:
        with _open_parquet(path) as file:
            return file.metadata.num_rows
    return sum(1 for _ in (read_lines if kind(path) in JSON_LINES else read_texts)(path))


def pick_texts(path: str | os.PathLike, rows: Iterable[int]) -> dict[int, str]:
    """Some documents of `read_texts`, by row. In a Parquet file, only row groups that contain such rows are read.

    Raises:
        UserError: as `read_texts`.
    """
    wanted = set(rows)
    if kind(path) not in PARQUET:
        return {row: text for row, text in enumerate(read_texts(path)) if row in wanted}
    texts, start = {}, 0
    with _open_parquet(path) as file:
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if any(start <= row < end for row in wanted):
                found = enumerate(_parquet_texts(path, file, [group], start), start)
                texts.update((row, text) for row, text in found if row in wanted)
            start = end
    return texts
