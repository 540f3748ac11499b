"""A pretrained model in a folder: what it is in our terms, checked before anything is made of it; and the reverse."""

import collections
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from diffeqformer.config import base_config, check_config
from diffeqformer.data.tokenizers import Tokenizer, open_tokenizer
from diffeqformer.errors import UserError, counted
from diffeqformer.huggingface.architectures import ARCHITECTURES, Row, read_model, tensors_of, write_model
from diffeqformer.huggingface.model_folder import Index, Tensors, read_json, write_json, write_tensors
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import check_free
from diffeqformer.parallel.mesh import AXES
from diffeqformer.parallel.sharding import EVERYWHERE, on_every_device
from diffeqformer.transformer import (
    Path,
    Transformer,
    abstract_model,
    partition_specs,
    split_model,
    vector_field,
    weights_at,
)

SENTENCE = "The capital of France is Paris, and the capital of Italy is"
"""What every model that is imported or exported is tried with."""

TYPES = ("F32", "BF16", "F16")
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Tensors of some files that are no parameters: masks and the angles of rotations."""


ReadPart = Callable[[Index], Float[np.ndarray, "..."]]
"""Reads a part of one parameter."""


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

    def parts(self) -> dict[Path, ReadPart]:
        """What reads a part of each parameter of our baseline, in fp32, by path."""
        names = collections.defaultdict(list)
        for row, _, name, _ in self.places():
            names[row].append(name)
        return {row.ours: functools.partial(self._read, row, names[row]) for row in names}

    def _read(self, row: Row, names: list[str], part: Index) -> np.ndarray:
        """A part of a parameter, whose last axis must be whole, as each row of a GPT-2's heads is put in order."""

        def read(name: str, part: Index) -> np.ndarray:
            theirs = self.tensors.read(name, part[::-1] if row.transposed else part)
            return row.to_ours(theirs, self.config.model.heads)

        stacked = row.ours[0] == "depth"
        return np.stack([read(name, part[1:]) for name in names[part[0]]]) if stacked else read(names[0], part)

    def model(self) -> Transformer:
        return placed_model(self.config, self.parts())

    def describe(self) -> str:
        files, types, shapes = zip(*(self.tensors.describe(name) for _, _, name, _ in self.places()))
        return (
            f"{self.architecture}, {counted(sum(map(math.prod, shapes)), 'weight')} in {len(shapes):,} tensors of "
            f"{' and '.join(sorted({*types}))} and {counted(len({*files}), 'file')}\n"
            f"tokenizer: {self.tokenizer.vocab_size:,} ids of the model's {self.config.model.vocab_size:,}, end of "
            f"text {self.tokenizer.end_of_text}"
        )


def shapes_of(config: ConfigDict) -> dict[Path, tuple[int, ...]]:
    """The shapes of the parameters of a config's model, by path."""
    leaves = traverse_util.flatten_dict(split_model(abstract_model(config))[1])
    return {path: leaf.shape for path, leaf in leaves.items()}


def open_pretrained(folder: pathlib.Path) -> Pretrained:
    """The pretrained model in a folder, or a UserError if it can't be imported exactly. Only headers are read."""
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
            raise UserError(f"{file}: {name} has the shape {list(theirs)}, but config.json asks for {list(shape)}")
        rest.remove(name)
    if vector_field(found.config.model).tied_head:
        rows = {row.ours[0]: row for row in ARCHITECTURES[found.architecture].rows if len(row.ours) == 1}
        head, embedding = (rows[ours].name(0, tensors.names()) for ours in ("lm_head", "token_embedding"))
        # one process reads them as a whole
        if hosts.is_first() and head in rest and not np.array_equal(tensors.read(head), tensors.read(embedding)):
            raise UserError(
                f"{folder}: {head} differs from {embedding}, to which config.json ties it; correct tie_word_embeddings"
            )
        rest.discard(head)
    if rest:
        raise UserError(f"{folder}: has the tensor {min(rest)}, which a {found.architecture} lacks")


def write_pretrained(
    folder: pathlib.Path, config: ConfigDict, arrays: dict[Path, np.ndarray], dtype: str, tokens: dict[str, int]
) -> None:
    """Write the config.json, generation_config.json and weights of a baseline, which `open_pretrained` can open.

    Args:
        arrays: its parameters in fp32, by path, which are written as `dtype`.
        tokens: the ids of special tokens, by their names in config.json.
    """
    model, tensors = write_model(config.model), {}
    [architecture] = model["architectures"]
    leaves = {path: array.shape for path, array in arrays.items()}
    for row, layer, name, _ in tensors_of(ARCHITECTURES[architecture].rows, leaves, config.model.heads):
        one = arrays[row.ours][layer] if row.ours[0] == "depth" else arrays[row.ours]
        tensors[name] = row.to_theirs(one, config.model.heads)
    write_json(folder / "config.json", {**model, **tokens, "dtype": dtype, "torch_dtype": dtype})
    write_json(folder / "generation_config.json", tokens)
    write_tensors(folder, tensors, dtype)


def placed_model(config: ConfigDict, parts: dict[Path, ReadPart]) -> Transformer:
    """The model of a config, its rows divided over all devices. A process reads only the parts of its own devices.

    Rows that can't be divided evenly are on all devices.
    """
    model = abstract_model(config)
    graph, params = split_model(model)
    check_free("the pretrained model: its weights", params, 1 / jax.device_count(), "use a machine with more memory")
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1, -1, 1), AXES)

    def place(path, leaf, spec):
        even = all(size % mesh.size == 0 for size, axes in zip(leaf.shape, spec) if axes)
        where = NamedSharding(mesh, spec if even else EVERYWHERE)
        return jax.make_array_from_callback(leaf.shape, where, parts[tuple(key.key for key in path)])

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, params, partition_specs(model)))


def logits_of(model: Transformer, ids: list[int], num_steps: int | None = None) -> Float[np.ndarray, "S V"]:
    """What a model says of some tokens, without the rows that pad its vocabulary."""
    logits = _logits(*split_model(model), weights_at(model, num_steps), np.array([ids]))
    return np.asarray(on_every_device(logits), np.float64)[:, : model.vocab_size]


@functools.partial(jax.jit, static_argnames="graph")
def _logits(graph: nnx.GraphDef, params: dict, weights, tokens: Int[Array, "1 S"]) -> Float[Array, "S V"]:
    return nnx.merge(graph, params)(tokens, weights)[0]


def difference(logits: Float[np.ndarray, "*B V"], exact: Float[np.ndarray, "*B V"]) -> float:
    """The largest error of a logit, as a part of the largest one."""
    return float(np.abs(logits - exact).max() / np.abs(exact).max())
