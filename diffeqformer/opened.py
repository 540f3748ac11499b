"""A trained model in a few lines: `diffeqformer.open`."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from diffeqformer.analysis import attention_maps
from diffeqformer.analysis.report import check_text
from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.errors import UserError
from diffeqformer.inference.reader import with_solver
from diffeqformer.inference.sampling import Choice, generate
from diffeqformer.inference.scoring import Scorer, sliding_windows
from diffeqformer.transformer import Transformer, check_weights, split_model, weights_at


class Score(NamedTuple):
    """How well a model predicts a text.

    tokens: the text of each token
    log_probs: the log-probability of each token given those before it, in nats
    bits_per_byte: of the whole text; NaN if it has unknown ids
    """

    tokens: list[str]
    log_probs: Float[np.ndarray, "S"]
    bits_per_byte: float


class Trace(NamedTuple):
    """What a model does with a text of S tokens, in L steps.

    The lens reads every state as if it were the last one (the logit lens; nostalgebraist, 2020).

    tokens: the text of each token
    times: of the states, from 0 on
    states: x at these times
    attention: the attention from each token (rows) to each token (columns), by every head at the first evaluation of
        each step
    lens: the text of the likeliest next token, by time and position
    lens_probability: its probability
    """

    tokens: list[str]
    times: Float[np.ndarray, "states"]
    states: Float[np.ndarray, "states S D"]
    attention: Float[np.ndarray, "L H S S"]
    lens: list[list[str]]
    lens_probability: Float[np.ndarray, "states S"]


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """A model of a run, ready to be used (`diffeqformer.open`).

    checkpoint: the step, config, model and tokenizer
    num_steps: steps of depth that every method takes; None: as trained
    """

    checkpoint: Checkpoint
    num_steps: int | None = None

    @property
    def model(self) -> Transformer:
        return self.checkpoint.model

    def at(self, num_steps: int | None = None, solver: str | None = None) -> "OpenedRun":
        """The same model in another number of steps, or with another solver of `diffeqformer.solvers.SOLVERS`."""
        num_steps = self.num_steps if num_steps is None else num_steps
        model = self.model if solver is None else with_solver(self.model, solver, self.checkpoint.config.model)
        check_weights(model, num_steps)
        return OpenedRun(dataclasses.replace(self.checkpoint, model=model), num_steps)

    def generate(self, prompt: str = "", tokens: int | None = None, temperature: float = 0.8, seed: int = 0) -> str:
        """A prompt and its continuation, of up to `tokens` tokens (None: up to 256, as far as there are positions)."""
        how = dict(tokens=tokens, key=jax.random.key(seed), choice=Choice(temperature), num_steps=self.num_steps)
        [text] = generate(self.model, self.checkpoint.tokenizer, prompt, **how)
        return prompt + text

    def score(self, text: str) -> Score:
        """The log-probability of each token of a text, which can be longer than a window.

        As in `evaluate`: windows of the length of training, which move by half a window.
        """
        tokenizer, window = self.checkpoint.tokenizer, self.checkpoint.config.sequence_length
        ids = list(tokenizer.encode(text))
        if not ids:
            raise UserError("text: must not be empty")
        stretches = list(sliding_windows(ids, window, max(1, window // 2), tokenizer.end_of_text))
        log_probs = np.concatenate([scores.log_probs for scores in self._scorer(stretches)])
        bits = -float(np.sum(log_probs, dtype=np.float64)) / math.log(2) / len(text.encode())
        return Score(self._texts(ids), log_probs, math.nan if tokenizer.unknown in ids else bits)

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.model, self.num_steps, tokenizer=self.checkpoint.tokenizer)

    def weights(self, time: float) -> dict[str, dict[str, Float[np.ndarray, "..."]]]:
        """{layer: {kernel | bias | scale | shift: ...}}: the weights at a time from 0 to 1, in fp32.

        A UserError if they aren't functions of time, or the time is another one.
        """
        depth = self.model.depth
        if not 0 <= time <= 1:
            raise UserError(f"time: must be between 0 and 1, but it is {time}")
        if not depth.continuous:
            kind = self.checkpoint.config.model.kind
            raise UserError(f"time: model.kind {kind} has weights for steps alone (model.weights()), not for times")
        made = depth.from_features(depth.features(np.array([time])))
        return {layer: {name: np.asarray(value[0]) for name, value in each.items()} for layer, each in made.items()}

    def trace(self, text: str) -> Trace:
        """States, attention and what the states predict, along the depth.

        A UserError if the text has fewer than two tokens, or more than the model has positions.
        """
        ids = list(self.checkpoint.tokenizer.encode(text))
        check_text(self.model, ids, "text")
        tokens, grid = jnp.array([ids]), self.model.grid(self.num_steps)
        states, likeliest, probability = _lens(*split_model(self.model), weights_at(self.model, self.num_steps), tokens)
        attention = attention_maps.maps(self.model, tokens, self.num_steps)
        return Trace(
            self._texts(ids),
            np.array([0.0, *grid.ends]),
            np.asarray(states[:, 0]),
            np.asarray(attention[:, 0]),
            [self._texts(row) for row in likeliest.tolist()],
            np.asarray(probability),
        )

    def _texts(self, ids: list[int]) -> list[str]:
        return [self.checkpoint.tokenizer.decode([each]) for each in ids]


@functools.partial(jax.jit, static_argnames="graph")
def _lens(
    graph: nnx.GraphDef, params: dict, weights, tokens: Int[Array, "1 S"]
) -> tuple[Float[Array, "states 1 S D"], Int[Array, "states S"], Float[Array, "states S"]]:
    """The states, and of each the likeliest next token and its probability. Logits exist for one state at a time."""
    model = nnx.merge(graph, params)

    def read(state):
        chances = jax.nn.softmax(model.head(state)[0])
        return chances.argmax(-1), chances.max(-1)

    states = model.trajectory(tokens, weights)
    return states, *jax.lax.map(read, states)
