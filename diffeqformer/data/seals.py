"""Seals of JSON records: each holds the SHA-256 of its own content, so that damage is noticed."""

import hashlib
import json
from typing import Any


def from_json(text: str | bytes) -> Any:
    """What JSON says; a ValueError if it isn't JSON, or so deeply nested that Python can't read it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(record: dict) -> dict:
    """A record that JSON can hold, with the SHA-256 of its content as another entry."""
    return {**record, "sha256": hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()}


def unsealed(record: dict) -> dict:
    """The reverse of `sealed`, or a ValueError if the content isn't what was sealed.

    A record without a seal, of an earlier version, is returned as it is, unless it has checksums, which came with it.
    """
    content = {name: value for name, value in record.items() if name != "sha256"}
    if ("sha256" in record or "checksums" in record) and sealed(content) != record:
        raise ValueError("its content isn't what was saved, by its SHA-256")
    return content
