"""Tokenizers: plain objects with `encode` and `decode`, no TensorFlow."""

import base64
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterable

from diffeqformer.data.quiet import quiet
from diffeqformer.errors import UserError, counted, reason_of

LARGEST = 2**28  # bytes of a tokenizer's file


class NoTokenizer(UserError):
    """A tokenizer's files aren't here, and can't be downloaded."""


class Tokenizer:
    """What all tokenizers are. `open` reads their file, and `restore` what `data` gave.

    `encode` never gives `end_of_text`: the spelling of a special token in a text is ordinary text.

    name: two tokenizers with the same name give the same ids.
    end_of_text: the id that ends a document.
    unknown: the id that stands for whatever has none of its own, or None.
    exact: whether every text comes back from its ids as it was. Then ids stand for bytes, or else for text.
    """

    name: str
    vocab_size: int
    end_of_text: int
    unknown: int | None = None
    exact: bool = True

    def data(self) -> bytes:
        """All that it consists of, besides its kind."""
        return b""

    def save(self) -> str:
        """The same as text for a checkpoint, which can then be opened without the tokenizer's file."""
        return base64.b85encode(zlib.compress(data, 9)).decode() if (data := self.data()) else ""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids: special ones are left out, broken UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The same as bytes, which may begin or end within a character."""
        return self.decode(ids).encode()


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, plus one id that ends a document."""

    name, vocab_size, end_of_text = "bytes", 257, 256

    @classmethod
    def open(cls, file: str | bytes) -> "ByteTokenizer":
        return cls()

    restore = open

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in ids if i < 256)


def _content(path: str, remedy: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        kind = NoTokenizer if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"config.data.tokenizer_file: {path}: {error.strerror}; {remedy}") from None


GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""GPT-2's vocabulary as OpenAI published it: names and SHA-256."""
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"


class GPT2Tokenizer(Tokenizer):
    """Byte-level byte-pair encoding with GPT-2's way of splitting text into words, by `tiktoken`.

    Args:
        ranks: the id of every piece, from 0 in the order in which pieces are merged; end-of-text comes after them.
    """

    name = "gpt2"

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.ranks, self.end_of_text, self.vocab_size = ranks, len(ranks), len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.end_of_text}
        )

    @classmethod
    def open(cls, folder: str = "") -> "GPT2Tokenizer":
        """GPT-2's own 50,257 entries, from a folder with vocab.bpe and encoder.json, tiktoken's cache or a download."""
        import requests
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        source = str(pathlib.Path(folder)) if folder else GPT2_URL
        remedy = "name a folder that holds GPT-2's vocab.bpe and encoder.json in config.data.tokenizer_file"
        if folder:  # tiktoken would download a damaged file again
            for name, sha256 in GPT2_FILES.items():
                if hashlib.sha256(_content(f"{source}/{name}", remedy)).hexdigest() != sha256:
                    raise UserError(f"{source}/{name}: isn't GPT-2's by its SHA-256; {remedy}")
        try:
            paths = [f"{source}/{name}" for name in GPT2_FILES]
            return cls(data_gym_to_mergeable_bpe_ranks(*paths, *GPT2_FILES.values()))
        except requests.RequestException as error:
            reason = type(error).__name__
            raise NoTokenizer(f"{source}: GPT-2's vocabulary can't be downloaded ({reason}); {remedy}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{source}: GPT-2's vocabulary can't be read ({error}); {remedy}") from None

    def encode(self, text: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:  # a pyo3 exception, which no module exports
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"a text of {len(text):,} characters that begins with {text[:40]!r} can't be encoded by tiktoken; "
                "shorten the long runs of white space in it"
            ) from None

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([i for i in ids if i < self.end_of_text])

    def data(self) -> bytes:
        return b"\n".join(base64.b64encode(piece) for piece in sorted(self.ranks, key=self.ranks.get))

    @classmethod
    def restore(cls, data: bytes) -> "GPT2Tokenizer":
        return cls({base64.b64decode(line): i for i, line in enumerate(data.split(b"\n"))})


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, whose end-of-sentence id ends a document. Its name holds the model's SHA-256."""

    exact = False

    def __init__(self, model: bytes):
        import sentencepiece

        self.model = model
        try:
            with quiet():  # it would log its own words first
                self._processor = sentencepiece.SentencePieceProcessor()
                self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UserError("config.data.tokenizer_file: this file isn't a SentencePiece model") from None
        self.end_of_text, self.vocab_size = self._processor.eos_id(), self._processor.vocab_size()
        self.unknown = self._processor.unk_id()
        if self.end_of_text < 0:
            raise UserError(
                "config.data.tokenizer_file: this SentencePiece model has no end-of-sentence id; train one with it"
            )
        self.name = f"sentencepiece-{hashlib.sha256(model).hexdigest()[:12]}"

    @classmethod
    def open(cls, path: str) -> "SentencePieceTokenizer":
        return cls(_content(path, "name the file of a SentencePiece model in config.data.tokenizer_file"))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(list(map(int, ids)))

    def data(self) -> bytes:
        return self.model

    @classmethod
    def restore(cls, data: bytes) -> "SentencePieceTokenizer":
        return cls(data)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's, by `tokenizers`. Its name holds the SHA-256 of the file and of `end_of_text`.

    The spelling of special tokens is ordinary text, no token is added at the beginning, and nothing is cut or padded,
    whatever the file says.

    Args:
        end_of_text: the token that ends a document, or its id.
    """

    exact = False

    def __init__(self, file: bytes, end_of_text: str | int):
        import tokenizers

        self.file = file
        try:
            self._encoding = tokenizers.Tokenizer.from_buffer(file)
            unknown = json.loads(file)["model"].get("unk_token")
        except Exception as error:  # it raises nothing narrower
            raise UserError(
                f"config.data.tokenizer_file: this file isn't a tokenizer.json: {reason_of(error)}"
            ) from None
        ids = self._encoding.get_vocab()
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_of_text = ids.get(end_of_text) if isinstance(end_of_text, str) else end_of_text
        if self.end_of_text not in ids.values():
            raise UserError(
                f"config.data.tokenizer_file: a text ends with the token {end_of_text!r}, which this tokenizer lacks; "
                "name another one as eos_token in tokenizer_config.json beside the file"
            )
        self.unknown = ids.get(unknown) if ids.get(unknown) != self.end_of_text else None
        self._encoding.no_truncation()
        self._encoding.no_padding()
        self.end_of_text_token = self._encoding.id_to_token(self.end_of_text)
        self._encoding.add_special_tokens([self.end_of_text_token])  # not all files say so
        self._encoding.encode_special_tokens = True
        self.name = f"huggingface-{hashlib.sha256(self.data()).hexdigest()[:12]}"

    @classmethod
    def open(cls, path: str) -> "HuggingFaceTokenizer":
        file = _content(path, "name a tokenizer.json in config.data.tokenizer_file")
        return cls(file, _end_of_text(pathlib.Path(path).parent))

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(map(int, ids)), skip_special_tokens=True)

    def data(self) -> bytes:
        """The file, after the id that ends a document."""
        return b"%d\n%s" % (self.end_of_text, self.file)

    @classmethod
    def restore(cls, data: bytes) -> "HuggingFaceTokenizer":
        end_of_text, _, file = data.partition(b"\n")
        return cls(file, int(end_of_text))


def _end_of_text(folder: pathlib.Path) -> str | int:
    """The token that ends a text, or its id, from the first file beside a tokenizer.json that names it."""
    keys = {"tokenizer_config": "eos_token", "generation_config": "eos_token_id", "config": "eos_token_id"}
    for path, key in ((folder / f"{name}.json", key) for name, key in keys.items()):
        try:
            found = json.loads(path.read_bytes()).get(key) if path.exists() else None
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: can't be read: {reason_of(error)}; replace the file") from None
        found = found[0] if isinstance(found, list) and found else found
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str | int):
            return found
    raise UserError(
        "config.data.tokenizer_file: what ends a text isn't known; name it as eos_token in tokenizer_config.json "
        "beside the file"
    )


def lost_in(tokenizer: Tokenizer, text: str, ids: list[int]) -> tuple[int, bool]:
    """What a tokenizer loses of a text: how many of its ids are unknown, and whether they decode to another text."""
    if tokenizer.exact:
        return 0, False
    unknown = ids.count(tokenizer.unknown)
    return unknown, bool(unknown) or tokenizer.decode(ids) != text


def describe_lost(unknown: int, altered: int | None) -> str:
    """What documents lose, in words; empty if it is nothing, or if `altered` ones weren't counted (None)."""
    said = [counted(unknown, "unknown id")] if unknown else []
    said += [f"{counted(altered, 'document')} whose ids decode to another text"] if altered else []
    return " and ".join(said)


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "gpt2": GPT2Tokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "huggingface": HuggingFaceTokenizer,
}
"""What `config.data.tokenizer` may name."""


def open_tokenizer(kind: str, file: str = "") -> Tokenizer:
    """The tokenizer that a config names, one of `TOKENIZERS` and its file. A UserError says what is wrong with it."""
    try:
        return TOKENIZERS[kind].open(file)
    except UserError as error:
        raise type(error)(str(error) if file in str(error) else f"{error} ({file})") from None


def restore_tokenizer(name: str, saved: str) -> Tokenizer:
    """The tokenizer of a checkpoint, from its name and what its `save` gave; a ValueError if that isn't whole."""
    unpacking, data = zlib.decompressobj(), b""
    if saved:
        data = unpacking.decompress(base64.b85decode(saved), LARGEST)  # a small record could have any number of bytes
        if not unpacking.eof:
            raise ValueError(f"its tokenizer isn't whole, or has more than {LARGEST:,} bytes")
    return TOKENIZERS[name.partition("-")[0]].restore(data)
