"""The files of a tokenizer that Transformers and others read without code of ours."""

import json

import tokenizers

from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HuggingFaceTokenizer, Tokenizer
from diffeqformer.errors import UserError

END_OF_TEXT = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """The content of tokenizer.json and tokenizer_config.json. End-of-text also begins a text, and pads it.

    Args:
        max_length: the longest text that the model reads, in tokens.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        file, end = tokenizer.file, tokenizer.end_of_text_token
    elif isinstance(tokenizer, ByteTokenizer | GPT2Tokenizer):
        file, end = _byte_level(tokenizer).to_str(pretty=True).encode(), END_OF_TEXT
    else:
        raise UserError(
            "--workdir: its tokenizer is a SentencePiece model, which a tokenizer.json can't follow exactly; train a "
            "model with data.tokenizer=huggingface, gpt2 or bytes"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    return {"tokenizer.json": file, "tokenizer_config.json": json.dumps(config, indent=2).encode()}


def _byte_level(tokenizer: ByteTokenizer | GPT2Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of bytes and of pieces merged from them."""
    merges = isinstance(tokenizer, GPT2Tokenizer)
    ranks = tokenizer.ranks if merges else {bytes([b]): b for b in range(256)}
    vocabulary = {_written(piece): i for piece, i in ranks.items()}
    pairs = [_halves(piece, ranks) for piece in sorted(ranks, key=ranks.get) if len(piece) > 1]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(_written(a), _written(b)) for a, b in pairs]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=merges)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])  # its id follows those of all pieces
    return made


def _halves(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two pieces of which byte-pair encoding makes one."""
    parts = [bytes([b]) for b in piece]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
"""How GPT-2's format writes each byte as a printable character."""


def _written(piece: bytes) -> str:
    return "".join(LETTERS[byte] for byte in piece)
