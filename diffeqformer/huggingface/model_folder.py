"""The files of a folder in Hugging Face's format, without torch, pickles or Transformers."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import tokenizers
from safetensors.numpy import save_file

from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HuggingFaceTokenizer, Tokenizer
from diffeqformer.errors import UserError, reason_of

INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""Bytes of a file of weights, unless a single tensor has more."""

Index = tuple[slice, ...] | EllipsisType
"""A part of an array: of each axis, from where to where."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a JSON file. Raises a UserError if it can't be read, or holds no fields."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {reason_of(error)}; name the folder of a pretrained model") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: must hold fields, but it holds a {type(fields).__name__}; download it again")
    return fields


class Tensors:
    """The tensors of a folder, each of which is read when it is asked for.

    They are in model.safetensors, in the files that an index names, of which only what it names counts, or in the only
    file of this kind. A UserError says if there are none, or a file is missing or damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self._files, self._places = {}, {}
        if not (folder / INDEX).exists() or (folder / "model.safetensors").exists():
            found = list(folder.glob("model.safetensors")) or list(folder.glob("*.safetensors"))
            if len(found) != 1:
                what = f"{len(found)} files of weights, but no {INDEX}" if found else "no weights as safetensors"
                raise UserError(f"{folder}: has {what}; name a folder as save_pretrained of Transformers writes it")
            self._places = dict.fromkeys(self._open(found[0]).keys(), found[0])
            return
        for name, file in read_json(folder / INDEX).get("weight_map", {}).items():
            path = folder / file
            if pathlib.PurePath(file).name != file or not path.is_file():
                raise UserError(f"{folder / INDEX}: {name} is in {file}, which isn't in this folder; download it, too")
            if name not in self._open(path).keys():
                raise UserError(f"{path}: lacks {name}, which {INDEX} puts there; download both again")
            self._places[name] = path

    def _open(self, path: pathlib.Path):
        if path not in self._files:
            try:
                self._files[path] = safetensors.safe_open(path, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"{path}: can't be read: {reason_of(error)}; download it again") from None
        return self._files[path]

    def names(self) -> set[str]:
        return set(self._places)

    def describe(self, name: str) -> tuple[pathlib.Path, str, tuple[int, ...]]:
        """The file, type and shape of a tensor."""
        path = self._places[name]
        part = self._open(path).get_slice(name)
        return path, part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str, part: Index = ...) -> np.ndarray:
        """A part of a tensor in fp32. Nothing else of it is read. A UserError says if a number isn't finite."""
        path = self._places[name]
        array = self._open(path).get_slice(name)[part].astype(np.float32)
        if not np.isfinite(array).all():
            raise UserError(f"{path}: {name} has numbers that are NaN or infinite; download it again")
        return array


def write_tensors(folder: pathlib.Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Write tensors as `dtype`: one file, or several of up to `LARGEST` bytes with an index."""
    from huggingface_hub import split_state_dict_into_shards_factory  # which reads its variables when it is imported

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda array: array.size * jnp.dtype(dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST,
    )
    for file, names in split.filename_to_tensors.items():
        made = {name: np.ascontiguousarray(tensors[name], jnp.dtype(dtype)) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})  # some readers refuse files without it
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def written_whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside another, for a `with` block that writes into it. At the end it becomes the other.

    After any error it is removed. A UserError says if it can't be written.
    """
    folder = folder.absolute()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            path.chmod(0o666 & partial.stat().st_mode)  # safetensors' are its owner's alone
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        partial.replace(folder)  # fails if it is a file, or a folder that isn't empty
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--to: {folder} can't be written: {reason_of(error)}; give another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


END_OF_TEXT = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """The content of tokenizer.json and tokenizer_config.json, for a model that reads so many tokens.

    End-of-text also begins a text, and pads it. A UserError says if the format can't express the tokenizer.
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
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end),
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


LETTERS = {byte: 256 + n for n, byte in enumerate([*range(33), *range(127, 161), 173])}
"""How GPT-2's format writes the bytes that aren't printable characters of Latin-1."""


def _written(piece: bytes) -> str:
    return piece.decode("latin-1").translate(LETTERS)
