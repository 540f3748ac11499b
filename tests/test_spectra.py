"""Spectra of every kind of model, compared with the dense product."""

import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.analysis.spectra import Spectrum, spectra
from diffeqformer.transformer import weights_at
from helpers import FAMILY, lively_model


def test_effective_rank_counts_equal_directions_and_the_share_those_that_keep_their_sign():
    values = np.array([[[3.0, 3.0, 3.0, 0.0]], [[5.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    assert np.allclose(Spectrum(values.astype(np.complex64), values).effective_rank()[:, 0], [3, 1, 1])
    turned = np.array([[[2, 0.5 + 1j, 0.5 - 1j, -0.25]]])
    assert Spectrum(turned, np.abs(turned)).positive_share()[0, 0] == 0.75


@pytest.mark.parametrize("kind, field", [model for model in FAMILY if model[0] in ("diffeqformer", "shared", "llama")])
def test_every_head_of_every_kind_has_the_spectrum_of_its_dense_product(kind, field):
    """Heads are sliced from the block's kernels by hand here; a GPT's are [head, (query, key, value), width].

    Of the Llama's, two share a key and a value.
    """
    model = lively_model(kind, field, key_value_heads=2 if kind == "llama" else 0)
    found = spectra(model, model.grid().ends)
    layers = weights_at(model).layers
    heads, width = model.field.heads, model.field.width

    def last(name):
        return np.asarray(layers[name]["kernel"] if kind == "shared" else layers[name]["kernel"][-1])

    size = width // heads
    for head in range(heads):
        here = slice(head * size, (head + 1) * size)
        other = head // 2 if kind == "llama" else head
        shared = slice(other * size, (other + 1) * size)
        if field in ("gpt", "neox"):
            query, key, value = (last("qkv")[:, (3 * head + i) * size : (3 * head + i + 1) * size] for i in range(3))
        else:
            query, key, value = last("query")[:, here], last("key")[:, shared], last("value")[:, shared]
        for name, dense in (("QK", query @ key.T), ("OV", value @ last("attention_out")[here])):
            expected = np.linalg.eigvals(dense.astype(np.float64))
            expected = expected[np.argsort(-np.abs(expected))][:size]
            values = found[name].eigenvalues[-1, head]
            assert np.abs(values[:, None] - expected).min(0).max() < 1e-4 * np.abs(expected[0])
            singular = np.linalg.svd(dense, compute_uv=False)[:size]
            assert np.allclose(found[name].singular_values[-1, head], singular, atol=1e-4 * singular[0])
    names = {"up·down": "mlp_up"} | ({"gate·down": "mlp_gate"} if field == "llama" else {})
    assert set(found) == {"QK", "OV", *names}
    for name, first in names.items():
        largest = np.abs(np.linalg.eigvals(last(first) @ last("mlp_down"))).max()
        assert found[name].radius()[-1, 0] == pytest.approx(largest, rel=1e-4)
    assert len(found["QK"].eigenvalues) == (1 if kind == "shared" else model.num_steps)


def test_adapters_count():
    model = lively_model("discretized", lora_rank=2)
    found = spectra(model, model.grid().ends)["QK"].radius()
    qkv = model.depth.layers["qkv"]
    qkv.b[...] = jnp.zeros_like(qkv.b[...])
    assert not np.allclose(spectra(model, model.grid().ends)["QK"].radius(), found)
