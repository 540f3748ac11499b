"""Products of fp32 matrices are traced at the precision that a config asks for, in every program of a model."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.fields import attention
from diffeqformer.fields.attention import plain
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.inference.reader import Reader, padded_prompt, read_prompt, read_token
from diffeqformer.inference.scoring import target_scores
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.parallel.sharding import on_each_device
from diffeqformer.training.chunks import ChunkedLoss, Chunks
from diffeqformer.training.loss import ShardedLoss
from diffeqformer.training.step import Program
from diffeqformer.transformer import abstract_model, split_model, weights_of
from helpers import ONE_DEVICE, lively_model, toy_config

E = 24  # no other axis is as long
SHAPES = {
    "batch_size": 4, "sequence_length": 128, "model__max_length": 128, "model__width": 128, "model__heads": 2,
    "model__mlp": 256, "model__time_embed_dim": E, "model__num_steps": 4, "model__vocab_multiple": 16,
}  # fmt: skip


def equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def products(function, *arguments) -> list[SimpleNamespace]:
    """The products of a function in which an operand is fp32: their arrays, and whether they are fp32 at any cost."""
    found = []
    for equation in equations(jax.make_jaxpr(function)(*arguments)):
        arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "dot_general" and any(array.dtype == jnp.float32 for array in arrays[:2]):
            highest = equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
            shapes = ", ".join(array.str_short() for array in arrays)
            of_generator = any(E in array.shape for array in arrays)
            found.append(SimpleNamespace(arrays=shapes, highest=highest, of_generator=of_generator))
    return found


def of_training(config, mesh=(1, 1, 1), attend=None) -> list[SimpleNamespace]:
    """Those of a train step and of evaluation."""
    program = Program(config, make_mesh(mesh, jax.devices()[: np.prod(mesh)]), attend)
    tokens = np.zeros((config.batch_size, config.sequence_length), np.int32)

    def train_and_evaluate(state):
        weights = program.weights(state["params"], None)
        scores = program.evaluate(state["params"], weights, tokens, np.ones((len(tokens), 1), bool))
        return scores, program.train_step(state, tokens)

    return products(train_and_evaluate, program.state_shapes)


def of_inference(config) -> list[SimpleNamespace]:
    model, tokens, prompt = abstract_model(config), np.zeros((2, 32), np.int32), padded_prompt([1], 64)
    graph, params = split_model(model)

    def score_and_write(params):
        reader = Reader(graph, params, weights_of(graph, params, None))
        _, cache = read_prompt(reader, prompt, 1)
        made = [target_scores(reader, tokens, tokens, ONE_DEVICE)]
        made += [discretized_params(graph, params, config.model.num_steps, np.dtype("float32"), "euler")]
        return made, read_token(reader, cache, tokens[:1, 0], 1)

    return products(score_and_write, params)


@pytest.mark.parametrize(
    "kind, field, mesh, attend, changes",
    [
        ("diffeqformer", "gpt", (1, 1, 1), (attention.splash, ""), {"kernels": "pallas", "model__dropout": 0.1}),
        ("diffeqformer", "llama", (1, 2, 2), None, {"microbatches": 2, "model__remat": "products"}),
        ("discretized", "gpt", (1, 2, 1), None, {"base": "base", "model__lora_rank": 2}),
    ],
    ids=["gpt", "llama", "adapters"],
)
def test_to_compute_in_float32_is_to_multiply_in_float32(kind, field, mesh, attend, changes):
    config = toy_config(kind, field, **SHAPES, **changes)
    for found in (of_training(config, mesh, attend), of_inference(config)):
        assert len(found) >= 29
        assert not [product.arrays for product in found if not product.highest]


def test_in_bfloat16_what_reads_p_has_the_devices_precision():
    """What comes before h(t), and biases and norms, are fp32 in any case."""
    config = toy_config(**SHAPES, model__dtype="bfloat16")
    found = of_training(config) + of_inference(config)
    assert not any(each.highest and not each.of_generator for each in found)
    assert sum(each.of_generator and not each.highest for each in found) >= 28
    assert sum(each.of_generator and each.highest for each in found) >= 28


def test_adapters_are_merged_in_full_precision():
    config = toy_config("discretized", base="a run", model__lora_rank=2, model__dtype="bfloat16")
    graph, params = split_model(abstract_model(config))
    found = products(lambda params: discretized_params(graph, params, 6, np.dtype("float32"), "euler"), params)
    assert found and all(product.highest for product in found)


def test_surrounding_code_can_ask_for_more():
    """As `analyze` and `ode` do of models that were trained in bfloat16."""
    graph, params = split_model(abstract_model(toy_config(model__dtype="bfloat16")))
    with jax.default_matmul_precision("highest"):
        found = products(lambda params: weights_of(graph, params, None), params)
    assert len(found) > 4 and all(product.highest for product in found)


def test_sums_are_in_float32():
    """Of gradients over microbatches and chunks, in a model that computes in bfloat16."""
    model = lively_model("diffeqformer", dtype="bfloat16", generate_chunk=2)
    graph, params = split_model(model)
    loss = ShardedLoss(graph, params, ONE_DEVICE, kernels="xla")
    tokens = jnp.zeros((16, 16), jnp.int32)
    _, gradient = jax.eval_shape(lambda params: loss.value_and_grad(params, tokens, None, 2), params)
    assert gradient["depth"]["layers"]["qkv"]["projection"].d_kernel.dtype == jnp.float32
    loss = ChunkedLoss(graph, params, ONE_DEVICE, plain)
    layers = functools.partial(Chunks(loss, model, 2).layers, loss.chunked(model, model.grid()).features[0])
    specs = (loss.param_specs["depth"],), loss.generator_specs
    made = jax.eval_shape(on_each_device(ONE_DEVICE, layers, *specs), params["depth"])
    assert made["qkv"]["kernel"].dtype == jnp.float32  # so is its cotangent
