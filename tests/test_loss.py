"""The chunked loss and the fast attentions equal the plain ones, and microbatches the whole batch, in less memory."""

import functools
import importlib
import re
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from diffeqformer import cross_entropy
from diffeqformer.fields import attention, layers
from diffeqformer.parallel.mesh import divide_generator, make_mesh
from diffeqformer.training.loss import ShardedLoss, split_batch
from diffeqformer.training.step import Program, dropout_keys
from diffeqformer.transformer import split_model
from helpers import first_state, lively_model, loss_and_gradient, normal, tokens_of, toy_config


def plain_cross_entropy(x, matrix, targets, weights, vocab_size, soft=None):
    logits = jnp.einsum("nd,vd->nv", x, matrix, preferred_element_type=jnp.float32)[:, :vocab_size]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if soft:
        theirs = jax.nn.log_softmax((soft.states @ soft.matrix.T)[:, :vocab_size])
        losses += soft.weight * optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), theirs)
    return jnp.sum(weights * losses)


def example(rows: int, dtype, size: float = 3):
    """Of size 3, some logits exceed their target's by more than the exponential of a float32 can hold."""
    random = np.random.RandomState(0)
    x, matrix = (np.asarray(size * normal(random, shape), jnp.dtype(dtype)) for shape in [(rows, 16), (48, 16)])
    targets = random.randint(41, size=rows, dtype=np.int32)
    weights = np.float32(np.where(np.arange(rows) % 7 == 0, 0.0, random.rand(rows)))
    return jax.device_put((x, matrix, targets, weights))


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize(
    "rows, dtype, size, close",
    [(24, "float32", 3, 2e-6), (24, "float32", 1, 2e-6), (20, "bfloat16", 3, 1e-2), (5, "float32", 1, 2e-6)],
)
def test_chunks_give_the_loss_and_gradient_of_all_logits(rows, dtype, size, close, taught, monkeypatch):
    """Whole chunks, a part of one, and less than one; also with the divergence from a teacher."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 8)
    monkeypatch.setattr(cross_entropy, "MANY", 48)
    x, matrix, targets, weights = example(rows, dtype, size)
    states, head = (jnp.float32(normal(np.random.RandomState(1), shape)) for shape in [(rows, 8), (48, 8)])
    soft, results = cross_entropy.SoftTargets(states, head, 0.7) if taught else None, []
    for function in (cross_entropy.cross_entropy, plain_cross_entropy):
        thrice = jax.value_and_grad(
            lambda x, m, function=function: 3 * function(x, m, targets, weights, 41, soft), (0, 1)
        )
        value, gradient = jax.jit(thrice)(x, matrix)
        assert gradient[0].dtype == x.dtype and gradient[1].dtype == matrix.dtype
        results.append((value, *gradient))
    alone = jax.jit(cross_entropy.cross_entropy, static_argnums=4)(x, matrix, targets, weights, 41, soft)
    assert 3 * alone == pytest.approx(float(results[0][0]), rel=1e-5)
    for ours, plain in zip(*results):
        ours, plain = np.float32(ours), np.float32(plain)
        assert np.linalg.norm(ours - plain) <= close * np.linalg.norm(plain)
    assert not np.any(results[0][2][41:])  # rows that fill up the vocabulary learn nothing


@pytest.mark.parametrize("size", [1, 3])
def test_scores_are_those_of_all_logits(size, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 8)
    monkeypatch.setattr(cross_entropy, "MANY", 48)
    x, matrix, targets, _ = example(20, "float32", size)
    logits = jnp.einsum("nd,vd->nv", x, matrix)[:, :41]
    scores, likeliest = jax.jit(cross_entropy.log_probabilities, static_argnums=3)(x, matrix, targets, 41)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    np.testing.assert_array_equal(likeliest, logits.argmax(axis=1) == targets)


@pytest.mark.parametrize("many, size, overflows", [(49, 1, False), (48, 1, False), (48, 3, True)])
def test_losses_are_those_of_log_softmax(many, size, overflows, monkeypatch):
    """To the bit with few entries, and where the sum of exponentials less the target's logit overflows."""
    monkeypatch.setattr(cross_entropy, "MANY", many)
    x, matrix, targets, _ = example(24, "float32", size)
    logits = jnp.where(jnp.arange(48) < 41, jnp.einsum("nd,vd->nv", x, matrix), -jnp.inf)
    of_targets = jnp.take_along_axis(logits, targets[:, None], axis=1)
    assert np.isinf(jnp.exp(logits - of_targets).sum(axis=1)).any() == overflows
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    one_by_one = jax.vmap(lambda weights: cross_entropy.cross_entropy(x, matrix, targets, weights, 41))
    np.testing.assert_allclose(one_by_one(jnp.eye(24)), expected, rtol=0 if overflows or many > 48 else 1e-6)


def test_all_logits_never_exist():
    """According to the compiler's figures for the loss and its gradient at 16 chunks."""
    rows = 16 * cross_entropy.CHUNK
    sizes = ((rows, 8), "float32"), ((2000, 8), "float32"), ((rows,), "int32"), ((rows,), "float32")
    shapes = [jax.ShapeDtypeStruct(*size) for size in sizes]

    def temporaries(function):
        gradient = jax.grad(lambda *arguments: function(*arguments, 2000), (0, 1))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * rows * 2000
    assert temporaries(plain_cross_entropy) > logits
    assert temporaries(cross_entropy.cross_entropy) < 0.3 * logits


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, width, shared, close",
    [("bfloat16", 64, 1, 2e-2), ("float32", 128, 1, 1e-5), ("float32", 64, 2, 1e-5)],
)
def test_splash_attention_is_plain_attention(dtype, width, shared, close):
    """Values and gradients, the kernel interpreted. A key and a value are `shared` by so many heads."""
    random = np.random.RandomState(0)
    heads = (3 * shared, 3, 3, 3 * shared)
    arrays = [jnp.asarray(normal(random, (2, 256, count, width)), dtype) for count in heads]

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend, query, key, value, cotangent):
        mixed, pull_back = jax.vjp(attend, query, key, value)
        return mixed, *pull_back(cotangent)

    interpreted = functools.partial(attention.splash, interpret=True)
    for ours, plain in zip(both(interpreted, *arrays), both(attention.plain, *arrays)):
        ours, plain = np.float32(ours), np.float32(plain)
        assert np.linalg.norm(ours - plain) <= close * np.linalg.norm(plain)


@pytest.mark.long
@pytest.mark.parametrize("field, mesh", [("gpt", (1, 1, 2)), pytest.param("llama", (1, 2, 1), marks=pytest.mark.slow)])
def test_a_gradient_is_the_same_with_heads_for_tpus(field, mesh, monkeypatch):
    """On devices that divide heads, or rows. Plain attention takes the place of splash."""
    config = toy_config("diffeqformer", field, model__remat="products", model__vocab_multiple=16)
    program = Program(config, make_mesh(mesh, jax.devices()[:2]), (attention.plain, "plain"))
    params, tokens = first_state(program)["params"], jnp.asarray(tokens_of(0, config))

    def gradient():
        sharded = ShardedLoss(program.graph, params, program.mesh)
        return jax.jit(lambda params: sharded.value_and_grad(params, tokens, None))(params)

    by_position = mock.Mock(wraps=layers.heads_by_position)
    monkeypatch.setattr(layers, "heads_by_position", by_position)
    expected = gradient()
    assert not by_position.called
    monkeypatch.setattr(attention, "splash", attention.plain)
    found = gradient()
    assert by_position.called
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), found, expected)


def device(platform: str, compute_capability: str = ""):
    return types.SimpleNamespace(platform=platform, compute_capability=compute_capability)


def test_attention_is_never_silently_plain_on_an_accelerator():
    assert attention.fastest(device("tpu"), "bfloat16", 1024, 64) == (attention.splash, "splash")
    assert attention.fastest(device("gpu", "8.0"), "bfloat16", 1000, 64) == (attention.cudnn, "cuDNN")
    assert attention.fastest(device("gpu", "9.0"), "bfloat16", 1000, 256) == (attention.cudnn, "cuDNN")
    assert attention.fastest(device("cpu"), "float32", 1024, 64) == (attention.plain, "plain")
    for how in (
        (device("tpu"), "bfloat16", 1000, 64),
        (device("gpu", "9.0"), "float32", 1024, 64),
        (device("gpu", "8.6"), "bfloat16", 1024, 256),
        (device("gpu", "9.0"), "bfloat16", 1023, 64),  # JAX refuses its gradient
        (device("gpu", "7.5"), "bfloat16", 1024, 64),
        (device("gpu", "gfx942"), "bfloat16", 1024, 64),
    ):
        attend, word = attention.fastest(*how)
        assert attend is attention.plain and word.startswith("plain: ")


@pytest.mark.parametrize("field, remat, forward_passes", [("gpt", "step", 2), ("llama", "products", 1)])
def test_a_train_step_for_gpus_calls_cudnn(field, remat, forward_passes, monkeypatch):
    """Lowered for GPUs that need not exist, on a mesh with all axes; `products` stores the attention's output."""
    library = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91000)
    config = toy_config(field=field, batch_size=16, sequence_length=128, microbatches=2, model__remat=remat)
    config.model.key_value_heads = 4  # a gpt has one for each head
    config.model.update(max_length=128, vocab_multiple=16, width=64, heads=8, mlp=64, dtype="bfloat16")
    program = Program(config, make_mesh((2, 2, 2)), (attention.cudnn, "cuDNN"))
    shapes = program.state_shapes, jax.ShapeDtypeStruct((16, 128), "int32")
    text = program.train_step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = [len(re.findall(rf"custom_call @__cudnn\$fmhaSoftmax{kind}\(", text)) for kind in ("", "Backward")]
    assert calls == [forward_passes, 1]


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
        weights = program.weights(params, None)
        tokens, valid = np.int32(tokens_of(3, config)), np.arange(32)[:, None] < 29
        compiled = program.evaluate.lower(params, weights, tokens, valid).compile()
        batch = jax.device_put((tokens, valid), program.shardings.batch)
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


def test_every_device_has_its_share_of_every_microbatch():
    np.testing.assert_array_equal(split_batch(jnp.arange(8), 4), [[0, 4], [1, 5], [2, 6], [3, 7]])
