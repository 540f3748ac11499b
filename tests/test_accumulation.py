"""Gradients accumulated over microbatches equal the whole batch's, with weights generated once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from diffeqformer.parallel.mesh import divide_generator, make_mesh
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.step import Program, dropout_keys
from diffeqformer.transformer import split_model
from helpers import first_state, lively_model, loss_and_gradient, tokens_of, toy_config


def random_tokens(examples: int):
    return jax.random.randint(jax.random.key(1), (examples, 16), 0, 64)


@pytest.mark.parametrize(
    "kind, field",
    [
        ("diffeqformer", "gpt"),
        ("llama", "llama"),
        pytest.param("alternative", "llama", marks=pytest.mark.slow),
        pytest.param("shared", "gpt", marks=pytest.mark.slow),
    ],
)
def test_microbatches_give_the_loss_and_gradient_of_the_whole_batch(kind, field):
    graph, params = split_model(lively_model(kind, field, dropout=0.2))
    tokens, keys = random_tokens(8), dropout_keys(0, jnp.int32(0), 8)
    loss, whole = loss_and_gradient(graph, params, tokens, keys, 1)
    same, parts = loss_and_gradient(graph, params, tokens, keys, 4)
    np.testing.assert_allclose(same, loss, rtol=1e-6)
    for mine, exact in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        mine, exact = np.asarray(mine), np.asarray(exact)
        assert np.linalg.norm(mine - exact) <= 1e-5 * np.linalg.norm(exact)
    other_keys = loss_and_gradient(graph, params, tokens, keys[::-1], 4)[0]
    assert abs(loss - other_keys) > 1e-3  # the keys belong to their examples


def contractions(jaxpr, sizes: set[int]) -> int:
    """Matrix products with an operand or a result of one of these sizes, none of which may be inside a loop."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += any(v.aval.size in sizes for v in [*equation.invars, *equation.outvars])
        for inner in jaxprs_in_params(equation.params):
            assert equation.primitive.name not in ("scan", "while") or contractions(inner, sizes) == 0
            count += contractions(inner, sizes)
    return count


@pytest.mark.parametrize("kind", ["diffeqformer", "alternative"])
@pytest.mark.parametrize("field, layers", [("gpt", 4), ("llama", 7)])
def test_weights_are_generated_and_pulled_back_once(kind, field, layers):
    graph, params = split_model(lively_model(kind, field))
    sizes = {layer["projection"].size for layer in params["depth"]["layers"].values() if "projection" in layer}
    jaxpr = jax.make_jaxpr(lambda params, tokens: loss_and_gradient(graph, params, tokens, None, 4))(
        params, random_tokens(8)
    )
    assert contractions(jaxpr.jaxpr, sizes) == 3 * layers  # forward, dP and dh of each kernel


@pytest.mark.long
def test_cotangents_add_up_in_float32():
    """With bf16 compute: many small parts lose no more precision than the whole batch."""

    def gradient(microbatches, dtype):
        graph, params = split_model(lively_model("diffeqformer", dtype=dtype))
        return loss_and_gradient(graph, params, random_tokens(64), None, microbatches)[1]["depth"]

    def error(ours):
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True)
        return np.mean([np.linalg.norm(np.float32(mine - true)) / np.linalg.norm(true) for mine, true in pairs])

    exact = gradient(1, "float32")
    assert error(gradient(64, "bfloat16")) < 1.2 * error(gradient(1, "bfloat16"))


@pytest.mark.parametrize(
    "remat, solver",
    [("step", "euler"), ("reversible", "reversible_euler"), pytest.param("binomial", "euler", marks=pytest.mark.slow)],
)
def test_the_gradient_of_shared_weights_adds_up_in_float32(remat, solver):
    """Over steps: with bf16 compute, that of 96 steps is as exact as that of 12."""

    def gradient(num_steps, dtype):
        graph, params = split_model(
            lively_model("shared", num_steps=num_steps, dtype=dtype, remat=remat, solver=solver)
        )
        return loss_and_gradient(graph, params, random_tokens(8), None, 1)[1]["depth"]["layers"]["mlp_up"]["kernel"]

    def error(num_steps):
        exact, mine = (np.float32(gradient(num_steps, dtype)) for dtype in ("float32", "bfloat16"))
        return np.linalg.norm(mine - exact) / np.linalg.norm(exact)

    assert error(96) < 1.25 * error(12) and error(12) > 1e-3  # the products themselves are bf16


@pytest.mark.parametrize("devices, changes", [(2, {}), (1, {"model__generate_chunk": 2, "model__remat": "step"})])
def test_validation_takes_the_microbatches_of_its_config(devices, changes):
    """The same loss, in less memory."""
    found, memory = [], []
    mesh = make_mesh((devices, 1, 1), jax.devices()[:devices])
    config = toy_config(batch_size=32, sequence_length=64, model__max_length=64, **changes)
    for config.microbatches in (1, 16):
        program = Program(config.copy_and_resolve_references(), mesh)
        params = first_state(program)["params"]
        weights = program.for_evaluation(params, None)
        tokens, valid = np.int32(tokens_of(3, config)), np.arange(32)[:, None] < 29
        compiled = program.evaluate.lower(params, weights, tokens, valid).compile()
        batch = jax.device_put((tokens, valid), program.batch_sharding)
        found.append(compiled(params, weights, *batch))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[0].total == pytest.approx(float(found[1].total), rel=1e-6)
    assert found[0].count == found[1].count == 29 * 63 and memory[1] < memory[0] / 2


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, kernels, shape, microbatches",
    [
        ("diffeqformer", "xla", (1, 1, 1), 1),
        ("diffeqformer", "xla", (4, 2, 1), 2),
        pytest.param("diffeqformer", None, (1, 1, 2), 1, marks=pytest.mark.slow),
        pytest.param("gpt", None, (2, 2, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_weights_are_made_in_the_compute_type(kind, kernels, shape, microbatches, monkeypatch):
    """They are gathered in it, too, and the gradient has the bits that weights made in fp32 would give it."""
    graph, params = split_model(lively_model(kind, "gpt", dtype="bfloat16"))
    devices = int(np.prod(shape))
    mesh = divide_generator(make_mesh(shape, jax.devices()[:devices]), max(1, shape[0] // 2))

    def gradient():
        loss = ShardedLoss(graph, params, mesh, kernels=kernels)
        differentiate = jax.jit(lambda params: loss.value_and_grad(params, random_tokens(16), None, microbatches))
        return differentiate.lower(params).as_text(), differentiate(params)

    text, found = gradient()
    if kernels:
        gathered = re.findall(r"all_gather.* -> tensor<6x\d+x\d+x(\w+)>", text)
        assert set(gathered) == ({"bf16"} if devices > 1 else set())
        made = found[1]["depth"]["layers"]["qkv"]["projection"].d_kernel
        assert made.dtype == ("float32" if devices > 1 else "bfloat16")
    monkeypatch.setattr(ShardedLoss, "types_of_weights", lambda *_: (jnp.dtype("float32"), jnp.dtype("float32")))
    for mine, exact in zip(jax.tree.leaves(found), jax.tree.leaves(gradient()[1]), strict=True):
        np.testing.assert_array_equal(np.float32(mine), np.float32(exact))
