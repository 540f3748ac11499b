"""Every model of the family: embedding, [times -> depth weights -> solver over the vector field], norm, head."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from diffeqformer.models.depth_weights import PerLayerWeights, SharedWeights, StackedWeights, step_sizes
from diffeqformer.models.generated import GeneratedWeights
from diffeqformer.models.gpt import GPT
from diffeqformer.models.layers import Context, dropout, layer_norm, parameter
from diffeqformer.solvers import euler, lie_trotter


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table of models: which depth weights, which solver, and how long depth is."""

    weights: str  # "generated", "per_layer" or "shared"
    solver: Callable
    unit_steps: bool = False  # steps of length 1 instead of 1 / num_steps


MODELS = {
    "diffeqformer": Kind("generated", euler),
    "gpt": Kind("per_layer", lie_trotter, unit_steps=True),
    "shared": Kind("shared", euler),
}


class Transformer(nnx.Module):
    """A language model in two phases: `weights = model.weights()`, then `logits = model(tokens, weights)`.

    The first phase costs as much for one token as for a million, so whoever runs the second one
    several times (accumulation, generation, evaluation) runs the first one once.

    Args:
        config: the `model` part of a config (`diffeqformer.config`).
        rngs: source of the initial parameters.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        kind = MODELS[config.kind]
        self.num_steps, self.unit_steps, self.solver = config.num_steps, kind.unit_steps, kind.solver
        self.dtype, self.dropout, self.remat = jnp.dtype(config.dtype), config.dropout, config.remat
        self.max_length = config.max_length
        self.field = GPT(config.width, config.heads, config.mlp)
        self.token_embedding = parameter(rngs, (config.vocab_size, config.width), ("vocab", "embed"), stddev=0.02)
        self.position_embedding = parameter(rngs, (config.max_length, config.width), ("sequence", "embed"), stddev=0.01)
        self.depth = self._depth_weights(kind.weights, config, rngs)
        self.final_norm = nnx.Dict(
            scale=parameter(rngs, (config.width,), ("embed",), mean=1.0),
            shift=parameter(rngs, (config.width,), ("embed",)),
        )

    def _depth_weights(self, kind: str, config, rngs: nnx.Rngs):
        layers = self.field.layers()
        if kind == "per_layer":
            return PerLayerWeights(layers, config.num_steps, self.dtype, rngs)
        if kind == "shared":
            return SharedWeights(layers, self.dtype, rngs)
        return GeneratedWeights(
            layers,
            time_embed_dim=config.time_embed_dim,
            sinusoidal_dim=config.sinusoidal_dim,
            time_frequency=config.time_frequency,
            start=config.generator_start,
            dtype=self.dtype,
            rngs=rngs,
        )

    def times(self, num_steps: int | None = None) -> Float[np.ndarray, "T"]:
        """The uniform grid of `num_steps` right ends, t_n = (n + 1) dt, in float64; by default as trained.

        Raises:
            ValueError: if `num_steps` is below 1.
        """
        num_steps = self.num_steps if num_steps is None else num_steps
        if num_steps < 1:
            raise ValueError(f"num_steps: must be at least 1, but it is {num_steps}")
        return np.arange(1, num_steps + 1) / (1 if self.unit_steps else num_steps)

    def weights(self, times: Float[np.ndarray, "T"] | None = None) -> StackedWeights:
        """First phase: the weights for the steps that end at `times`, by default those of the trained grid."""
        times = self.times() if times is None else times
        return StackedWeights(self.depth(times), step_sizes(times), self.depth.constant)

    def __call__(
        self, tokens: Int[Array, "B S"], weights: StackedWeights, dropout_keys: Key[Array, "B"] | None = None
    ) -> Float[Array, "B S V"]:
        """Second phase: fp32 logits of the next token at every position.

        Args:
            tokens: ids below the vocabulary size; S at most `max_length`.
            weights: from `self.weights`, whatever the number of steps.
            dropout_keys: one random key per example; None turns dropout off.

        Raises:
            ValueError: if S exceeds `max_length`.
        """
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"tokens: {tokens.shape[1]} positions, but this model has {self.max_length}")
        context = Context(dropout_keys, self.dropout)
        x = self.solver(self.field, weights, self.embed(tokens, context), context, remat=self.remat)
        return self.head(x)

    def trajectory(self, tokens: Int[Array, "B S"], weights: StackedWeights) -> Float[Array, "states B S D"]:
        """The state at time 0 and after every step, T + 1 in all, without dropout."""
        x = self.embed(tokens, Context())
        states = self.solver(self.field, weights, x, Context(), trajectory=True)
        return jnp.concatenate([x[None], states])

    def embed(self, tokens: Int[Array, "B S"], context: Context) -> Float[Array, "B S D"]:
        """x(0): token plus position embedding, with dropout if `context` has keys."""
        x = self.token_embedding[...][tokens] + self.position_embedding[: tokens.shape[1]]
        return dropout(x, context.at_step(0), site=0)

    def head(self, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Logits of the final state: norm, then the transposed token embedding."""
        x = layer_norm({name: value[...] for name, value in self.final_norm.items()}, x, self.field.epsilon)
        embedding = self.token_embedding[...].astype(self.dtype)
        return jnp.einsum("bsd,vd->bsv", x.astype(self.dtype), embedding, preferred_element_type=jnp.float32)
