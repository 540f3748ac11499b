"""The pure functions that a run compiles: initial state, train step, evaluation.

The state is a plain tree, {"params": ..., "optimizer": ..., "step": int32}; a checkpoint that holds it
forgets nothing, since data and dropout are functions of the seed and the step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from clu import metrics
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key, Shaped

from diffeqformer.errors import UserError
from diffeqformer.models.transformer import Transformer
from diffeqformer.optimizer import learning_rate_schedule, make_optimizer
from diffeqformer.sharding import sharding


def token_losses(logits: Float[Array, "B S V"], tokens: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Cross-entropy in nats of each position's next token; the last position's entry has no meaning."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, axis=1))


def random_key(seed: int, purpose: str) -> Key[Array, ""]:
    """The root key of everything random that serves one purpose: parameters, dropout or sample."""
    return jax.random.fold_in(jax.random.key(seed), ("parameters", "dropout", "sample").index(purpose))


def dropout_keys(seed: int, step: Int[Array, ""], batch_size: int) -> Key[Array, "B"]:
    """One key for each example of the global batch, from (seed, step, index of the example)."""
    key = jax.random.fold_in(random_key(seed, "dropout"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch_size))


class Program(NamedTuple):
    """The compiled functions of one run on one mesh.

    graph: the model's structure, to be merged with `state["params"]`
    state_shardings, batch_sharding: where the state and a batch [B, S] live
    init() -> state
    train_step(state, tokens [B, S]) -> (state, metrics); the state that goes in is donated
    weights(params, num_steps) -> the stacked weights of the grid of so many steps; None: of the trained one
    evaluate(params, weights, tokens [B, S], valid [B, 1]) -> clu Average of the loss over the targets of valid rows
    """

    graph: nnx.GraphDef
    state_shardings: dict
    batch_sharding: NamedSharding
    init: Callable
    train_step: Callable
    weights: Callable
    evaluate: Callable


def new_model(config) -> Transformer:
    """The model of a config with its initial parameters."""
    return Transformer(config.model, nnx.Rngs(random_key(config.seed, "parameters")))


def abstract_model(config) -> Transformer:
    """The model of a config with shapes in place of values: costs nothing, however large."""
    return nnx.eval_shape(lambda: new_model(config))


def split_batch(array: Shaped[Array, "B ..."], parts: int) -> Shaped[Array, "parts rows ..."]:
    """The microbatches of a batch: the m-th has rows m, m + parts, ..., so that every device has its share of each.

    Raises:
        UserError: if they don't divide the batch.
    """
    if len(array) % parts:
        raise UserError(f"microbatches: must divide the batch ({len(array)} examples), but it is {parts}")
    return array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)


def loss_and_gradient(
    graph: nnx.GraphDef, params: dict, tokens: Int[Array, "B S"], keys: Key[Array, "B"] | None, microbatches: int = 1
) -> tuple[Float[Array, ""], dict]:
    """The mean next-token loss of a batch in nats, and its gradient, a tree like `params`.

    The depth weights are generated once. Each microbatch is differentiated with respect to these weights
    and to the other parameters; their cotangents add up in fp32, and the generator is pulled back once.
    Over several devices, each microbatch still reduces the cotangents of the weights.

    Args:
        params: of the model whose structure is `graph`.
        keys: one dropout key per example, or None.
        microbatches: parts of the batch taken one after the other.

    Raises:
        UserError: if the microbatches don't divide the batch.
    """
    times = nnx.merge(graph, params).times()
    others = {name: value for name, value in params.items() if name != "depth"}
    layers, pull_back = jax.vjp(
        lambda depth: nnx.merge(graph, {**others, "depth": depth}).depth(times), params["depth"]
    )

    def loss_of(others, layers, tokens, keys):
        model = nnx.merge(graph, {**others, "depth": params["depth"]})
        return token_losses(model(tokens, model.stack(layers, times), keys), tokens)[:, :-1].mean()

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1))
    if microbatches == 1:
        loss, (d_others, d_layers) = differentiate(others, layers, tokens, keys)
    else:
        parts = jax.tree.map(lambda array: split_batch(array, microbatches), (tokens, keys))

        def add(total, part):
            return jax.tree.map(jnp.add, total, differentiate(others, layers, *part)), None

        like = (jnp.float32(0.0), (others, layers))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        total, _ = jax.lax.scan(add, zeros, parts)
        mean = jax.tree.map(lambda leaf, sum: (sum / microbatches).astype(leaf.dtype), like, total)
        loss, (d_others, d_layers) = mean
    return loss, {**d_others, "depth": pull_back(d_layers)[0]}


def make_program(config, mesh: Mesh) -> Program:
    """Prepare, without compiling yet, the functions of a run of `config` on `mesh`."""
    graph, abstract = nnx.split(abstract_model(config), nnx.Param)
    param_shardings = nnx.to_pure_dict(nnx.map_state(lambda _, variable: sharding(mesh, *variable.axes), abstract))
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def init():
        params = nnx.to_pure_dict(nnx.state(new_model(config), nnx.Param))
        return {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    replicated = sharding(mesh)
    optimizer_shardings = optax.tree_map_params(
        optimizer,
        lambda _, param_sharding: param_sharding,
        jax.eval_shape(init)["optimizer"],
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
    state_shardings = {"params": param_shardings, "optimizer": optimizer_shardings, "step": replicated}
    by_example = sharding(mesh, "batch", None)

    def train_step(state, tokens):
        keys = dropout_keys(config.seed, state["step"], len(tokens)) if config.model.dropout else None
        loss, grads = loss_and_gradient(graph, state["params"], tokens, keys, config.microbatches)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        scalars = {"loss": loss, "gradient_norm": optax.global_norm(grads), "learning_rate": schedule(state["step"])}
        return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}, scalars

    def weights(params, num_steps):
        model = nnx.merge(graph, params)
        return model.weights(model.times(num_steps))

    def evaluate(params, weights, tokens, valid):
        losses = token_losses(nnx.merge(graph, params)(tokens, weights), tokens)
        targets = losses[:, :-1]
        return metrics.Average.from_model_output(targets, mask=jnp.broadcast_to(valid, targets.shape))

    return Program(
        graph,
        state_shardings,
        by_example,
        init=jax.jit(init, out_shardings=state_shardings),
        train_step=jax.jit(
            train_step,
            in_shardings=(state_shardings, by_example),
            out_shardings=(state_shardings, None),
            donate_argnums=0,
        ),
        weights=jax.jit(weights, in_shardings=(param_shardings,), static_argnames="num_steps"),
        evaluate=jax.jit(evaluate, in_shardings=(param_shardings, None, by_example, by_example)),
    )
