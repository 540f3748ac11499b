"""Training at many depths: which one each step draws, and that it is then a step of that depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer import inspect
from diffeqformer.depth.depths import drawn_depth, shares_of_depths
from diffeqformer.errors import Stopped, UserError
from diffeqformer.training import loop, room
from diffeqformer.training.step import Program, training_grid
from helpers import ONE_DEVICE, build_model, first_state, lively_model, tokens_of, toy_config
from runs import curves


def test_shares_add_up_and_wrong_lists_are_refused():
    assert shares_of_depths("") == {}
    assert shares_of_depths("4,2,8") == {2: 1 / 3, 4: 1 / 3, 8: 1 / 3}
    assert shares_of_depths("2:1,4:3,8:0.5, 3") == {2: 2 / 11, 3: 2 / 11, 4: 6 / 11, 8: 1 / 11}
    for wrong in ("a", "2,", "2.5", "0", "2,2", "2:0", "2:nan", "2:inf"):
        with pytest.raises(ValueError):
            shares_of_depths(wrong)


def test_each_step_draws_for_itself_and_in_proportion():
    shares = shares_of_depths("2:1,4:3,8:4")
    drawn = [drawn_depth(shares, 7, step) for step in range(4000)]
    for depth, share in shares.items():
        assert np.mean(np.equal(drawn, depth)) == pytest.approx(share, abs=0.02)
    pairs = np.mean(np.equal(drawn[1:], drawn[:-1]))
    assert pairs == pytest.approx(sum(share**2 for share in shares.values()), abs=0.02)  # independent
    assert drawn[:10] == [drawn_depth(shares, 7, step) for step in range(10)]
    assert drawn[:40] != [drawn_depth(shares, 8, step) for step in range(40)]


@pytest.mark.parametrize("kind, times", [("diffeqformer", "shifted"), ("shared", "fixed")])
def test_a_step_at_a_drawn_depth_is_one_of_a_model_with_that_depth(kind, times):
    changes = dict(model__training_times=times, optimizer__warmup_fraction=0.0)
    program = Program(toy_config(kind, **changes, model__training_depths="2,3"), ONE_DEVICE)
    for depth in (2, 3):
        alone = Program(toy_config(kind, **changes, model__num_steps=depth), ONE_DEVICE)
        tokens = tokens_of(0, alone.config)
        expected, scalars = alone.train_step(first_state(alone), tokens, depth)
        found, found_scalars = program.train_step(first_state(program), tokens, depth)
        jax.tree.map(np.testing.assert_array_equal, (found, found_scalars), (expected, scalars))


def test_random_times_depend_on_the_seed():
    """As they always did, for runs that are resumed with a later version."""
    model = lively_model("diffeqformer")
    times = [np.asarray(training_grid(model, "shifted", seed, jnp.int32(3)).times) for seed in (0, 7)]
    assert np.abs(times[0] - times[1]).max() > 1e-3
    np.testing.assert_allclose(times[1][:2], [0.0508169, 0.2174836], atol=1e-6)


@pytest.mark.long
def test_kernels_and_memory_have_room_for_the_deepest(monkeypatch):
    sizes = dict(model__time_embed_dim=8, model__width=128, model__mlp=256, kernels="pallas")
    for times, most in (("fixed", 260), ("shifted", 261)):
        with pytest.raises(UserError, match=f"T = {most} is more than 256"):
            Program(toy_config(**sizes, model__training_depths="2,260", model__training_times=times), ONE_DEVICE)
    needed, bytes_of_program = [], room.bytes_of_program
    monkeypatch.setattr(room, "bytes_of_program", lambda step: needed.append(bytes_of_program(step)) or needed[-1])
    for changes in ({"model__training_depths": "1,40"}, {"model__num_steps": 40}):
        room.check_memory(Program(toy_config(**changes), ONE_DEVICE), True)
    # Of train steps, and of the weights and the evaluation: in the first at 6 steps and at 40
    two_depths, deep = needed[:5], needed[5:]
    assert two_depths[0] == deep[0] > 0 and two_depths[3:] == deep[1:] and deep[1] > two_depths[1] > 0


@pytest.mark.long
def test_a_run_draws_its_depths_and_goes_on_as_if_it_had_not_stopped(
    tmp_path, short_stores, monkeypatch, one_device_loop
):
    options = {"seed": 1, "data__dir": str(short_stores), "model__training_depths": "1,2,6:2"}
    config = toy_config(steps=8, eval_every=4, **options)
    expected_depths = [drawn_depth(shares_of_depths("1,2,6:2"), config.seed, step) for step in range(8)]
    assert set(expected_depths[:4]) != {6} and len(set(expected_depths)) == 3
    asked, seen = [], []
    monkeypatch.setattr(loop, "drawn_depth", lambda *of: asked.append(drawn_depth(*of)) or asked[-1])
    whole = nnx.state(loop.train(config, tmp_path / "whole"))
    assert asked == expected_depths
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="saved at step 3"):
        patch.setattr(loop.hosts.Notice, "now", lambda notice, wait: seen.append(notice) or len(seen) == 3)
        loop.train(config, tmp_path / "stopped")
    again = nnx.state(loop.train(config, tmp_path / "stopped"))
    assert asked[8:] == expected_depths
    jax.tree.map(np.testing.assert_array_equal, again, whole)

    found = curves(tmp_path / "whole")
    assert curves(tmp_path / "stopped")["train/loss"] == found["train/loss"]
    assert {name for name in found if "_at_" in name} == {f"validation/bits_per_byte_at_{depth}" for depth in (1, 2)}
    assert found["validation/bits_per_byte_at_1"] != found["validation/bits_per_byte"]
    assert "bits/byte    at 1    at 2\n  4 " in inspect.text(inspect.inspect_run(tmp_path / "whole"))


def test_a_transformer_is_interpolated_weights_at_their_knots_over_a_span_of_its_layers():
    """To the last bit, and without a copy of its weights; between the knots, weights are in a straight line."""
    gpt = lively_model("gpt", num_steps=3)
    ours = build_model("interpolated", "gpt", num_steps=3, time_embed_dim=3, span=3.0)
    nnx.update(ours, nnx.state(gpt, nnx.Param))
    tokens = jnp.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(ours(tokens, ours.weights()), gpt(tokens, gpt.weights()))
    assert not jax.make_jaxpr(lambda params: nnx.merge(nnx.graphdef(ours), params).depth(ours.grid(3)))(
        nnx.state(ours)
    ).eqns
    knots, between = (ours.weights(ours.grid(steps)).layers["qkv"]["kernel"] for steps in (3, 6))
    np.testing.assert_array_equal(between[1::2], knots)
    np.testing.assert_array_equal(between[0], knots[0])
    np.testing.assert_allclose(between[2::2], (knots[:-1] + knots[1:]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(ours.weights(ours.grid(6)).step_sizes, np.float32(0.5))
