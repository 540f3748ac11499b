"""LoRA: the effect of adapters, which parameters are trained, and what is never held twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.fields.layers import heads, heads_by_position
from diffeqformer.inference.discretize import discretize
from diffeqformer.training.step import Program
from diffeqformer.transformer import select, split_model
from helpers import ONE_DEVICE, build_model, forward, lively_model, loss_and_gradient, run_steps, tokens_of, toy_config

LORA = dict(lora_rank=3, lora_alpha=6.0)
TOKENS = jnp.asarray(np.random.RandomState(0).randint(64, size=(4, 16)))


def is_factor(path) -> bool:
    return path[-1] in ("a", "b")


@pytest.mark.parametrize("kind, field", [("discretized", "gpt"), ("llama", "llama")])
def test_adapters_do_what_the_merged_model_does(kind, field):
    model = lively_model(kind, field, **LORA)
    config = toy_config(kind, field, **{f"model__{name}": value for name, value in LORA.items()})
    config.model.vocab_size = 64
    merged = discretize(model, config, 6, "float32")
    expected, logits = forward(merged, TOKENS), forward(model, TOKENS)
    assert np.linalg.norm(logits - expected) < 2e-6 * np.linalg.norm(expected)
    params, plain = split_model(model)[1], split_model(merged)[1]
    for name, layer in plain["depth"]["layers"].items():
        if "kernel" in layer:  # base + (alpha / rank) a b
            theirs = params["depth"]["layers"][name]
            expected = theirs["kernel"] + 2.0 * np.einsum("tir,tro->tio", theirs["a"], theirs["b"])
            np.testing.assert_allclose(layer["kernel"], expected, atol=1e-5)


@pytest.mark.parametrize("start, same", [("zero", 0.0), ("published", 1e-6)])
def test_adapters_start_without_effect(start, same):
    base = lively_model("gpt")
    model = build_model("gpt", lora_start=start, **LORA)
    factors = select(split_model(model)[1], is_factor)
    nnx.update(model, nnx.state(base, nnx.Param))
    np.testing.assert_allclose(forward(model, TOKENS), forward(base, TOKENS), atol=same, rtol=0)
    for layer in factors["depth"]["layers"].values():
        expected = (layer["a"].shape[1] ** -0.5, 0.0) if start == "zero" else (1e-6, 1e-6)
        np.testing.assert_allclose([layer["a"].std(), layer["b"].std()], expected, rtol=0.15)


def test_the_gradient_of_adapters_is_that_of_their_kernels():
    """dL/da = (alpha / rank) dL/dW b^T, dL/db = (alpha / rank) a^T dL/dW, and the embeddings' gradient is unchanged."""
    model = lively_model("gpt", "gpt", lora_layers="qkv|mlp_down", **LORA)
    graph, params = split_model(model)
    loss, gradient = loss_and_gradient(graph, params, TOKENS, None)
    config = toy_config("gpt", **{f"model__{name}": value for name, value in LORA.items()})
    config.model.vocab_size = 64
    merged_loss, whole = loss_and_gradient(*split_model(discretize(model, config, 6, "float32")), TOKENS, None)
    np.testing.assert_allclose(loss, merged_loss, rtol=1e-6)
    assert set(gradient) == {"token_embedding", "position_embedding", "depth"}

    def close(ours, theirs):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())

    close(gradient["token_embedding"], whole["token_embedding"])
    assert set(gradient["depth"]["layers"]) == {"qkv", "mlp_down"}
    for name, found in gradient["depth"]["layers"].items():
        d_kernel, factors = 2.0 * whole["depth"]["layers"][name]["kernel"], params["depth"]["layers"][name]
        close(found["a"], d_kernel @ factors["b"].swapaxes(1, 2))
        close(found["b"], factors["a"].swapaxes(1, 2) @ d_kernel)


@pytest.mark.parametrize("apply", [heads, heads_by_position])
def test_a_change_below_the_last_bit_of_a_kernel_counts(apply):
    """Merged in bfloat16, the change would be lost: 1 + 0.001 is 1."""
    weights = {"kernel": jnp.ones((2, 1)), "a": jnp.array([[0.001], [0.0]]), "b": jnp.ones((1, 1))}
    weights = {name: value.astype("bfloat16") for name, value in weights.items()}
    [y] = apply(weights, jnp.array([[[1.0, -1.0]]]), 1)
    assert float(y.squeeze()) == pytest.approx(0.001, rel=2**-8)


def test_validation_computes_as_training_does():
    """In bfloat16, adapters that are merged would be rounded with their kernels."""
    program = Program(toy_config("discretized", model__lora_rank=2, model__dtype="bfloat16"), ONE_DEVICE)
    params = split_model(lively_model(**program.config.model))[1]
    tokens = jnp.asarray(tokens_of(0, program.config))
    average = program.evaluate(params, program.weights(params, None), tokens, jnp.ones((8, 1), bool))
    loss = jax.jit(program.loss.value_and_grad)(params, tokens, None)[0]
    np.testing.assert_allclose(average.compute(), loss, rtol=1e-6)


def test_training_changes_adapters_and_embeddings_alone():
    config = toy_config("discretized", model__lora_rank=2)
    program, state, scalars = run_steps(config, ONE_DEVICE, 4)
    start = split_model(build_model(**config.model))[1]
    assert scalars[-1, 0] < scalars[0, 0]
    changed = jax.tree.map(lambda before, after: bool(np.any(before != np.asarray(after))), start, state["params"])

    def trains(path):
        return is_factor(path) or path[0] in ("token_embedding", "position_embedding")

    for path, leaf in jax.tree_util.tree_leaves_with_path(changed):
        assert leaf == trains(tuple(key.key for key in path)), path
    moments = sum(leaf.size for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim)
    assert moments == 2 * sum(leaf.size for leaf in jax.tree.leaves(select(start, trains)))


@pytest.mark.parametrize("remat, dtype, layers", [("none", "bfloat16", "qkv"), ("step", "float32", ".*")])
def test_nothing_of_the_size_of_all_kernels_is_made(remat, dtype, layers):
    """According to the compiler's figures for a train step whose kernels are much larger than everything else."""
    config = toy_config("discretized", model__lora_rank=2, model__remat=remat, model__num_steps=12, batch_size=1)
    config.model.update(width=256, mlp=1024, dtype=dtype, lora_layers=layers)
    program = Program(config, ONE_DEVICE)
    shapes = program.state_shapes, jax.ShapeDtypeStruct((1, 16), "int32")
    memory = program.train_step.lower(*shapes).compile().memory_analysis()
    kernels = 12 * 4 * 12 * 256 * 256
    assert memory.argument_size_in_bytes > kernels
    assert memory.temp_size_in_bytes < 0.35 * kernels  # a step's, its gradient, and activations
