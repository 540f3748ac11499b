"""Log-probabilities of given ids, from which perplexities and multiple-choice scores are computed."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.cross_entropy import log_probabilities
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError, UserErrorEverywhere
from diffeqformer.fields import attention
from diffeqformer.fields.layers import Context, multiplying
from diffeqformer.inference.reader import Reader, positions_for, split_reader
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import check_free
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.parallel.sharding import on_each_device, partition
from diffeqformer.transformer import Transformer, check_length

Show = Callable[[int, int], None]  # called with the number of scored ids and their total
SHORTEST = 32  # the fewest positions to which a sequence is padded


class Stretch(NamedTuple):
    """Ids to score, from index `first` (at least 1) on. Each is scored given all ids before it."""

    ids: Sequence[int]
    first: int


class Scores(NamedTuple):
    """For each scored id: its log-probability in nats, and whether it is the likeliest one."""

    log_probs: Float[np.ndarray, "N"]
    likeliest: Bool[np.ndarray, "N"]


def window_size(window: int | None, config, positions: int, name: str = "window", of: str = "of the model") -> int:
    """Tokens of a window: `window`, or by default the sequence length of training."""
    window = config.sequence_length if window is None else window
    if not 2 <= window <= positions:
        raise UserError(f"{name}: must be from 2 to the {positions:,} positions {of}, but it is {window}")
    return window


def sliding_windows(ids: Sequence[int], window: int, stride: int, before: int) -> Iterator[Stretch]:
    """Sequences of at most `window` inputs that score every id of a text once.

    The first scores up to `window` ids. Each further one scores up to `stride` more, and also sees as many earlier ids
    as the window has room for. `before` is the id that precedes the first one: end-of-text.
    """
    stream, done = [before, *ids], 0
    while done < len(ids):
        end = min(len(ids), done + (stride if done else window))
        start = max(0, end - window)
        yield Stretch(stream[start : end + 1], done - start + 1)
        done = end


@functools.partial(jax.jit, static_argnames=("mesh", "written"))
def target_scores(
    reader: Reader,
    tokens: Int[Array, "B S"],
    targets: Int[Array, "B S"],
    mesh: Mesh,
    written: tuple[int, int | None] | None = None,
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """The log-probability of each target, in nats, and whether it is the likeliest id. Every device gets all of them.

    The reader is on every device of `mesh`. Each device scores its own examples.
    """

    def on_device(reader, tokens, targets):
        model = reader.model()
        attend, _ = attention.fastest(mesh.devices.flat[0], str(model.dtype), tokens.shape[1], model.field.head_width)
        x = model.normalize(model.last_state(tokens, reader.weights, Context.attending(attend)))
        with multiplying(model.precision):
            scores = log_probabilities(
                x.reshape(-1, x.shape[-1]), model.head_matrix(), targets.reshape(-1), model.vocab_size, written
            )
        return tuple(part.reshape(targets.shape) for part in scores)

    by_example, copies = partition(("batch", None)), PartitionSpec()
    on_devices = on_each_device(mesh, on_device, (copies, by_example, by_example), by_example)
    return jax.lax.with_sharding_constraint(on_devices(reader, tokens, targets), NamedSharding(mesh, copies))


class Scorer:
    """Scores sequences with one model at one number of steps; its weights are generated once.

    All processes of a run must make it, and call it with the same sequences, unless they share it by `lead`.

    Args:
        num_steps: steps of depth; None: as trained.
        batch_size: sequences at once, over all devices; rounded up to a multiple of the number of devices.
        mesh: the devices that share each batch; by default all.
        tokenizer: by which only ids that it can write are called the likeliest.
    """

    def __init__(
        self,
        model: Transformer,
        num_steps: int | None = None,
        batch_size: int = 8,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size: must be at least 1, but it is {batch_size}")
        self.mesh = make_mesh() if mesh is None else mesh
        self.reader = split_reader(model, num_steps, self.mesh)
        self.by_example = NamedSharding(self.mesh, partition(("batch", None)))
        self.max_length = model.max_length
        self.batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        self.width = model.field.width
        self.written = (tokenizer.vocab_size, tokenizer.unknown) if tokenizer else None
        self.announce: Callable[[Int[np.ndarray, "B positions"]], None] | None = None  # set by `lead`

    def __call__(self, sequences: Sequence[Stretch], show: Show = lambda done, total: None) -> list[Scores]:
        """The scores of each sequence, in order; raises `NotFinite` if one is NaN or infinite.

        Sequences of similar length share a batch, after which `show` is called.
        """
        inputs = [len(sequence.ids) - 1 for sequence in sequences]
        check_length(max(inputs, default=0), self.max_length)
        lengths = [positions_for(number, self.max_length, SHORTEST) for number in inputs]
        states = jax.ShapeDtypeStruct(
            (self.batch_size // self.mesh.size, max(lengths, default=0), self.width), jnp.float32
        )
        check_free(f"batch_size: the states of {self.batch_size:,} sequences", states, 4)  # there are more arrays
        order = sorted(range(len(sequences)), key=lambda i: (-lengths[i], i))  # longest first
        results, waiting, done = [None] * len(sequences), None, 0
        total = sum(len(sequence.ids) - sequence.first for sequence in sequences)
        while order or waiting:
            batch = None
            if order:
                length = lengths[order[0]]
                indices = [i for i in order[: self.batch_size] if lengths[i] == length]
                order = order[len(indices) :]
                ids = np.zeros((self.batch_size, length + 1), np.int32)  # no scored position sees the ends' zeros
                for row, i in zip(ids, indices):
                    row[: len(sequences[i].ids)] = sequences[i].ids
                if self.announce:
                    self.announce(ids)
                batch = indices, self.score_rows(ids)
            if waiting:  # read the last batch while the device computes this one
                indices, (log_probs, likeliest) = waiting[0], map(np.asarray, waiting[1])
                for row, i in enumerate(indices):
                    part = slice(sequences[i].first - 1, len(sequences[i].ids) - 1)
                    results[i] = Scores(log_probs[row, part], likeliest[row, part])
                    if not np.isfinite(results[i].log_probs).all():
                        raise NotFinite
                    done += len(results[i].log_probs)
                show(done, total)
            waiting = batch
        return results

    def score_rows(self, ids: Int[np.ndarray, "B positions"]) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
        """The scores of all ids but the first of each row. S is one less than the number of positions."""
        tokens, targets = (
            jax.make_array_from_callback(part.shape, self.by_example, lambda index, part=part: part[index])
            for part in (ids[:, :-1], ids[:, 1:])
        )
        return target_scores(self.reader, tokens, targets, self.mesh, self.written)


DONE, FAILED = -1, -2


def lead(scorers: Sequence[Scorer], work: Callable[[], Any]) -> Any:
    """The result of `work`, which uses some scorers, on process 0 alone. The others help to score and return None.

    All processes have made the scorers in this order. A UserError of `work` is a `UserErrorEverywhere`.
    """
    if jax.process_count() == 1:
        return work()
    if not hosts.is_first():
        return _follow(scorers)
    for number, scorer in enumerate(scorers):
        scorer.announce = functools.partial(_send, number)
    try:
        result = work()
    except UserError as error:  # raised between batches; after another error the processes can't agree
        _send(FAILED)
        raise UserErrorEverywhere(str(error)) from error
    _send(DONE)
    return result


def _send(number: int, ids: Int[np.ndarray, "B positions"] | None = None) -> None:
    """Tell the other processes which scorer comes next, and its batch, or how the work has ended."""
    hosts.wait("the next batch")
    hosts.from_first(np.array([number, 0 if ids is None else ids.shape[1]], np.int32))
    if ids is not None:
        hosts.from_first(ids)


def _follow(scorers: Sequence[Scorer]) -> None:
    while True:
        hosts.wait("the next batch")
        number, positions = hosts.from_first(np.zeros(2, np.int32)).tolist()
        if number == FAILED:
            raise UserErrorEverywhere("process 0 failed; see its message")
        if number == DONE:
            return
        ids = np.zeros((scorers[number].batch_size, positions), np.int32)
        scorers[number].score_rows(hosts.from_first(ids))
