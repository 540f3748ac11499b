"""The record of a model's dynamics during training, on one device and on many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer.analysis.clustering import relative_distances
from diffeqformer.analysis.spectra import spectra
from diffeqformer.data.store import open_store
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.training.dynamics import Recorder, first_windows
from diffeqformer.training.step import Program
from diffeqformer.transformer import split_model
from helpers import ONE_DEVICE, lively_model, toy_config


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, changes",
    [("diffeqformer", "gpt", {}), ("shared", "llama", {}), ("discretized", "gpt", {"model__lora_rank": 2})],
)
def test_the_record_is_what_the_analysis_finds_on_any_mesh(kind, field, changes, small_store):
    config = toy_config(kind, field, model__vocab_multiple=16, **changes)
    text = open_store(small_store, "bytes", 16)["validation"]
    params = split_model(lively_model(**config.model))[1]
    records = []
    for mesh in (ONE_DEVICE, make_mesh((2, 2, 2))):
        program = Program(config, mesh)
        placed = jax.device_put(params, program.state_shardings["params"])
        records.append(Recorder(program, first_windows(text, 16))(placed))
    assert records[0] == pytest.approx(records[1], rel=1e-3)
    model = nnx.merge(program.graph, params)
    found = spectra(model, model.grid().ends, feed_forward=False)
    assert records[0]["qk_radius"] == pytest.approx(found["QK"].radius().max(), rel=1e-3)
    assert records[0]["ov_radius"] == pytest.approx(found["OV"].radius().max(), rel=1e-3)
    tokens = jnp.asarray(text.evaluation_batch(0, 4, 16))
    states = np.asarray(model.trajectory(tokens, model.weights()))[[0, -1]]
    quantiles, _ = relative_distances(states[1] / np.linalg.norm(states[1], axis=-1, keepdims=True))
    assert records[0]["closest"] == pytest.approx(quantiles[:, 0].mean(), rel=1e-3)
    assert records[0]["median_distance"] == pytest.approx(quantiles[:, 2].mean(), rel=1e-3)
    first, last = (relative_distances(at_time)[1] for at_time in states)
    assert records[0]["spread"] == pytest.approx(np.mean(last / first), rel=1e-3)
