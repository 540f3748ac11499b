"""A pretrained model in a folder: what it is in our terms, checked before anything is made of it."""

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from diffeqformer.config import base_config, check_config
from diffeqformer.data.tokenizers import Tokenizer, open_tokenizer
from diffeqformer.errors import UserError
from diffeqformer.huggingface.architectures import ARCHITECTURES, read_model
from diffeqformer.huggingface.folder import Tensors, read_json
from diffeqformer.huggingface.mapping import Row, tensors_of
from diffeqformer.transformer import Path, abstract_model, split_model, vector_field

TYPES = ("F32", "BF16", "F16")
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Tensors of some files that are no parameters: masks and the angles of rotations."""


class Pretrained(NamedTuple):
    """A pretrained model.

    architecture: its name in Transformers, a key of `ARCHITECTURES`.
    config: our config of the baseline that computes the same.
    """

    folder: pathlib.Path
    architecture: str
    config: ConfigDict
    tensors: Tensors
    tokenizer: Tokenizer

    def places(self) -> Iterator[tuple[Row, int, str, tuple[int, ...]]]:
        """Its tensors: the row in the table, the number of the layer, the name, and the shape that config.json says."""
        leaves, rows = shapes_of(self.config), ARCHITECTURES[self.architecture].rows
        return tensors_of(rows, leaves, self.config.model.heads, self.tensors.names())

    def arrays(self) -> Iterator[tuple[Path, np.ndarray]]:
        """The parameters of our baseline in fp32, with their paths, one made after the other."""
        leaves, heads, made = shapes_of(self.config), self.config.model.heads, None
        for row, layer, name, _ in self.places():
            if layer == 0:
                made = np.empty(leaves[row.ours], np.float32)
            stacked = row.ours[0] == "depth"
            made[layer if stacked else ...] = row.transform.to_ours(self.tensors.read(name), heads)
            if not stacked or layer == len(made) - 1:
                yield row.ours, made


def shapes_of(config: ConfigDict) -> dict[Path, tuple[int, ...]]:
    """The shapes of the parameters of a config's model, by path."""
    leaves = traverse_util.flatten_dict(split_model(abstract_model(config))[1])
    return {path: leaf.shape for path, leaf in leaves.items()}


def open_pretrained(folder: pathlib.Path) -> Pretrained:
    """The pretrained model in a folder. Nothing but headers of its tensors is read.

    Raises:
        UserError: if it isn't one that can be imported exactly.
    """
    if not folder.is_dir():
        raise UserError(f"--from: there is no folder {folder}; name the folder of a pretrained model")
    file = folder / "config.json"
    architecture, model = read_model(read_json(file), file)
    config = base_config(folder.resolve().name, ARCHITECTURES[architecture].kind)
    config.model.update(model)
    config.model.update(dropout=0.0, dtype="float32")
    config.sequence_length = min(1024, config.model.max_length)
    tokenizer_file = folder / "tokenizer.json"
    config.data.update(tokenizer="huggingface", tokenizer_file=str(tokenizer_file))
    try:
        check_config(config, None)
    except UserError as error:
        raise UserError(f"{file}: gives a model that can't be computed: {error}") from None
    tokenizer = open_tokenizer("huggingface", str(tokenizer_file))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{tokenizer_file}: has ids up to {tokenizer.vocab_size - 1:,}, but the vocab_size of config.json is "
            f"{config.model.vocab_size:,}; take the tokenizer that the model was trained with"
        )
    found = Pretrained(folder, architecture, config, Tensors(folder), tokenizer)
    _check_tensors(found)
    return found


def _check_tensors(found: Pretrained) -> None:
    """Check that the folder has the tensors of the model, in the right shapes, and no others."""
    tensors, folder = found.tensors, found.folder
    rest = {name for name in tensors.names() if not BUFFERS.search(name)}
    for _, _, name, shape in found.places():
        if name not in rest:
            raise UserError(f"{folder}: lacks the tensor {name}, which config.json asks for; download all of its files")
        file, kind, theirs = tensors.describe(name)
        if kind not in TYPES:
            raise UserError(f"{file}: {name} must be of one of the types {', '.join(TYPES)}, but it is {kind}")
        if theirs != shape:
            raise UserError(
                f"{file}: {name} has the shape {list(theirs)}, but config.json asks for {list(shape)}; take both files "
                "from the same model"
            )
        rest.remove(name)
    if vector_field(found.config.model).tied_head:
        rows = {row.ours[0]: row for row in ARCHITECTURES[found.architecture].rows if len(row.ours) == 1}
        head, embedding = (rows[ours].name(0, tensors.names()) for ours in ("lm_head", "token_embedding"))
        if head in rest and not np.array_equal(tensors.read(head), tensors.read(embedding)):
            raise UserError(
                f"{folder}: {head} differs from {embedding}, to which config.json ties it; correct tie_word_embeddings"
            )
        rest.discard(head)
    if rest:
        raise UserError(
            f"{folder}: has the tensor {min(rest)}, which a {found.architecture} lacks; correct config.json"
        )
