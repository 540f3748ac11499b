"""Tokenizers: plain objects with `encode` and `decode`, no TensorFlow."""

from collections.abc import Iterable


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and one id that ends a document."""

    name = "bytes"
    end_of_text = 256
    vocab_size = 257

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a text, without the end-of-text id."""
        return list(text.encode("utf-8") if isinstance(text, str) else text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids: end-of-text is left out, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


TOKENIZERS = {"bytes": ByteTokenizer}
