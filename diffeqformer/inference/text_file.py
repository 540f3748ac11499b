"""A text that a command is given in a file. All of them read it alike."""

import os
import sys

from diffeqformer.data.files import read_lines
from diffeqformer.errors import UserError


def read_text(option: str, path: str | os.PathLike) -> str:
    """A text from a file in UTF-8, which may be gzipped (.gz), or from standard input (-).

    A byte order mark isn't part of it, nor is the end of its last line. Lines end with a line feed, also where the file
    has a carriage return before it.
    """
    try:
        if path == "-":
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            text = "".join(read_lines(path))
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: the text must be UTF-8, but byte {error.start} is not") from None
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    return text.replace("\r\n", "\n").removesuffix("\n")
