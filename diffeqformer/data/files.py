"""Local files: those that patterns name, what identifies them, and their texts (JSON lines, Parquet, plain text)."""

import bz2
import codecs
import glob
import gzip
import hashlib
import lzma
import os
import pathlib
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from diffeqformer.data.seals import from_json
from diffeqformer.data.store import SPLITS
from diffeqformer.errors import UserError

PLAIN, JSON_LINES, PARQUET = "plain text", "JSON lines", "Parquet"
SUFFIXES = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".parquet": PARQUET}
"""Of what isn't plain text."""


def _open_zstandard(path: str | os.PathLike, mode: str):
    import pyarrow

    return pyarrow.CompressedInputStream(open(path, mode), "zstd")


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstandard}
"""By the suffix of a compressed file."""
LARGEST = 2**30  # bytes of a document, which is read as a whole; a small compressed file could hold any number
BLOCK = 2**20  # bytes read at once
BINARY = 2**16  # bytes at the beginning of a file, of which none is 0 in a text
ROWS_AT_ONCE = 4  # of a Parquet file, or fewer: a kilobyte of it can hold a long text a million times


class Layout(NamedTuple):
    """How documents lie in files.

    field: of JSON lines, or the column of a Parquet file, that has the text.
    separator: what separates the documents of a plain-text file; empty: a file is one document.
    """

    field: str = "text"
    separator: str = ""


def kind(path: str | os.PathLike) -> str:
    """The format of a file by its suffix, before that of its compression. What has no known suffix is plain text."""
    name = pathlib.Path(os.fspath(path).lower())
    compressed = name.suffix in OPENERS
    found = SUFFIXES.get((name.with_suffix("") if compressed else name).suffix, PLAIN)
    if compressed and found == PARQUET:
        raise UserError(f"{path}: texts can't be read from a compressed Parquet file; unpack it")
    return found


def check_first(path: str | os.PathLike, layout: Layout = Layout()) -> None:
    """Check, as `read_texts` does, that a file's first document, or the first block of plain text can be read."""
    if kind(path) == PLAIN:
        _decoded(path, 0, next(_blocks(path)), whole=False)
    else:
        next(read_texts(path, layout), None)


def read_texts(path: str | os.PathLike, layout: Layout = Layout()) -> Iterator[str]:
    """The documents of a file: a JSON line or a Parquet row each, or the parts of a plain-text file.

    Documents may be empty. A blank line and a null count as such, so that a document has the number of its row.
    """
    if kind(path) == PARQUET:
        yield from _parquet_texts(path, layout.field)
    elif kind(path) == JSON_LINES:
        for number, line in enumerate(read_lines(path), start=1):
            yield _json_text(path, layout.field, number, line) if line.strip() else ""
    else:
        for text in read_lines(path, layout.separator):
            yield text.removesuffix(layout.separator)


def read_text(option: str, path: str | os.PathLike) -> str:
    """The text of a file that an option names, or of standard input (-), as all commands read it.

    A byte order mark isn't part of it, nor is the end of its last line. Lines end with a line feed, also where the file
    has a carriage return before it.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig") if path == "-" else "".join(read_lines(path))
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: the text must be UTF-8, but byte {error.start} is not") from None
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def read_lines(path: str | os.PathLike, end: str = "\n") -> Iterator[str]:
    """The lines of a plain or JSON-lines file, with what ends them; all of it as one if `end` is empty."""
    mark, start, rest = end.encode("utf-8"), 0, bytearray()
    for block in _blocks(path):
        seen = max(0, len(rest) - len(mark) + 1)  # in what was there before, no more than a part of a mark can be
        rest += block
        while mark and (found := rest.find(mark, seen)) >= 0:
            size, seen = found + len(mark), 0
            yield _decoded(path, start, rest[:size])
            del rest[:size]
            start += size
        if len(rest) > LARGEST:
            what = "a line" if end == "\n" else "a document"
            raise UserError(f"{path}: it has {what} of more than {LARGEST:,} bytes; cut it into several")
    if rest:
        yield _decoded(path, start, rest)


def _decoded(path: str | os.PathLike, start: int, data: bytes | bytearray, whole: bool = True) -> str:
    """Some bytes of a file as text, without its byte order mark. Unless they are `whole`, they may end in a character.

    `start` is the number of bytes before these.
    """
    mark = len(codecs.BOM_UTF8) if not start and data.startswith(codecs.BOM_UTF8) else 0
    try:
        return codecs.utf_8_decode(memoryview(data)[mark:], "strict", whole)[0]
    except UnicodeDecodeError as error:
        position = start + mark + error.start
    raise UserError(f"{path}: byte {position:,} isn't UTF-8; convert the file to UTF-8, or leave it out")


def _blocks(path: str | os.PathLike) -> Iterator[bytes]:
    """The content of a plain or JSON-lines file, unpacked, in blocks."""
    size = 0
    try:
        with OPENERS.get(pathlib.Path(path).suffix.lower(), open)(path, "rb") as file:
            while block := file.read(BLOCK):
                if not size and (zero := block.find(b"\0", 0, BINARY)) >= 0:
                    found = f"byte {zero:,} is 0, so this isn't text"
                    raise UserError(f"{path}: {found}; leave the file out, or convert it to UTF-8")
                size += len(block)
                yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}; put a readable file there") from None
    if not size:
        raise UserError(f"{path}: the file is empty; put one with text there")


def _json_text(path: str | os.PathLike, field: str, number: int, line: str) -> str:
    try:
        if (text := from_json(line)[field]) is None:
            return ""
        text.encode("utf-8")  # a lone surrogate, "\ud800", is valid JSON but not valid text
        return text
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: line {number:,} isn't a JSON object with a string '{field}'; write one a line (jq -c . or '.[]' "
            "may help), or name the field with the text (text_field)"
        ) from None


def _open_parquet(path: str | os.PathLike, field: str):
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; put a readable file there") from None
    except pyarrow.ArrowInvalid:
        raise UserError(f"{path}: this isn't a whole Parquet file; get it again") from None
    names = file.schema_arrow.names
    if names.count(field) != 1:
        found = "are several columns" if field in names else "is no column"
        raise UserError(f"{path}: there {found} '{field}' among {names}; name the one with the text (text_field)")
    column = file.schema_arrow.field(field).type
    values = column.value_type if pyarrow.types.is_dictionary(column) else column
    if str(values).removeprefix("large_").removesuffix("_view") not in ("string", "binary", "null"):
        raise UserError(f"{path}: column '{field}' holds {column} instead of strings; convert it")
    return file


def _strings(path: str | os.PathLike, column, row: int) -> list[str]:
    """The texts of a pyarrow column that begins at `row`. It can hold nulls, and bytes that aren't UTF-8."""
    if hasattr(column, "dictionary"):
        column = column.dictionary_decode()
    if column.nbytes > LARGEST:
        raise UserError(f"{path}: the texts from row {row:,} on have more than {LARGEST:,} bytes; cut them")
    try:
        return [text.decode("utf-8") if isinstance(text, bytes) else text or "" for text in column.to_pylist()]
    except UnicodeDecodeError:
        raise UserError(f"{path}: a text from row {row:,} on isn't UTF-8; convert the file to UTF-8") from None


def _parquet_texts(path: str | os.PathLike, field: str) -> Iterator[str]:
    import pyarrow

    row = 0
    try:
        with _open_parquet(path, field) as file:
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                columns = [about.column(number) for number in range(about.num_columns)]
                [size] = [column.total_uncompressed_size for column in columns if column.path_in_schema == field]
                rows = min(ROWS_AT_ONCE, max(1, LARGEST // max(1, size)))
                for batch in file.iter_batches(rows, [group], columns=[field]):
                    yield from _strings(path, batch.column(0), row)
                    row += batch.num_rows
    except (OSError, pyarrow.ArrowInvalid):
        raise UserError(f"{path}: this Parquet file is damaged after row {row:,}; get it again") from None


def count_texts(path: str | os.PathLike) -> int:
    """The number of documents in `read_texts`. The rows of a Parquet file aren't read for this."""
    if kind(path) == PARQUET:
        with _open_parquet(path, Layout().field) as file:
            return file.metadata.num_rows
    return sum(1 for _ in read_texts(path))


class NoFile(UserError):
    """A text isn't here: no file matches a pattern, or one can't be read."""


def layout_of(data: ConfigDict) -> Layout:
    return Layout(data.text_field, data.separator)


def local_files(data: ConfigDict) -> dict[str, list[str]] | None:
    """The local files of each split that replace the task, if any: its `matching_files`, of which none is in both."""
    if not data.train_files:
        return None
    files = {split: matching_files(data[f"{split}_files"], f"config.data.{split}_files") for split in SPLITS}
    trained = set(map(os.path.realpath, files["train"]))
    for path in files["validation"]:
        if os.path.realpath(path) in trained:
            raise UserError(f"config.data.train_files: {path} is a validation file, too; leave it out of one of them")
    return files


def matching_files(patterns: str, option: str) -> list[str]:
    """The files that comma-separated names and patterns mean; the matches of each pattern are sorted by path.

    A name that is there means itself, whatever characters it has, and so does the folder before a pattern.
    """
    files, seen = [], set()
    names = [patterns] if os.path.lexists(patterns) else patterns.split(",")
    for name in (name for name in names if name.strip() or not files):  # a comma may be at the end
        found = _matches(name) or _matches(name.strip())
        if not found:
            raise NoFile(f"{option}: no file matches '{name.strip()}'")
        for path in found:
            if os.path.isdir(path):
                raise UserError(f"{option}: {path} is a folder; name the files in it, such as '{path}/*.txt'")
            if not os.access(path, os.R_OK):
                raise NoFile(f"{option}: {path} can't be read; put a readable file there")
            if not os.path.isfile(path):
                raise UserError(f"{option}: {path} isn't a file that can be read twice; write its text into one")
            if not os.path.getsize(path):
                raise UserError(f"{option}: {path} is empty; put a file with text there")
            kind(path)
            if (target := os.path.realpath(path)) in seen:
                raise UserError(f"{option}: {path} is named twice; leave one of them out")
            seen.add(target)
        files += found
    return files


def _matches(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return sorted(glob.glob(glob.escape(folder) + pattern[len(folder) :], recursive=True))


class Fingerprint(NamedTuple):
    """Hashes that identify the text of local files; empty if there are none.

    text: of their formats, sizes, and first and last 64 KiB, and of their layout, whatever their names and order.
    order: the same in their order.
    earlier: as earlier versions made it, of names in their order instead of formats.
    """

    text: str = ""
    order: str = ""
    earlier: str = ""


def fingerprint(files: dict[str, list[str]] | None, layout: Layout = Layout()) -> Fingerprint:
    if not files:
        return Fingerprint()
    each, earlier = [], hashlib.sha256()
    for split, path in [(name, path) for name in SPLITS for path in files[name]]:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            beginning = file.read(1 << 16)
            file.seek(max(0, size - (1 << 16)))
            content = (size, beginning, file.read())
        earlier.update(repr((split, os.path.basename(path), *content)).encode())
        each.append(hashlib.sha256(repr((split, kind(path), *content)).encode()).hexdigest())
    text, order = (hashlib.sha256(repr((layout, *found)).encode()).hexdigest() for found in (sorted(each), each))
    return Fingerprint(text, order, earlier.hexdigest() if layout == Layout() else text)
