"""Traces of chosen steps, utilisation, and where a run's time goes."""

import types
from unittest import mock

import jax
import pytest

from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.store import Split
from diffeqformer.depth.depths import drawn_depth, trained_depths
from diffeqformer.errors import UserError
from diffeqformer.training import goodput, hooks, loop, profile, run, utilisation
from helpers import toy_config
from runs import curves

SCORES = {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0}


def test_a_run_traces_its_steps_and_knows_its_utilisation(tmp_path, short_stores, monkeypatch, one_device_loop, capsys):
    monkeypatch.setattr(utilisation, "PEAKS", {"cpu": 1e12})  # of a pretended device
    monkeypatch.setattr(hooks, "validate", lambda *_: SCORES)
    config = toy_config(
        "shared", steps=5, log_every=4, profile_steps="3-4", data__dir=str(short_stores), model__dtype="bfloat16",
        model__training_depths="1,2",
    )  # fmt: skip
    loop.train(config, tmp_path)
    [file] = (tmp_path / "tensorboard" / "plugins" / "profile" / "steps-3-4").glob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    events = [event for line in lines for event in line.events]
    assert [dict(event.stats)["step_num"] for event in events if event.name == "train"] == [3, 4]
    assert not any(event.name.startswith("$") for event in events)  # calls of Python functions

    found, shares = curves(tmp_path), trained_depths(config.model)
    assert found["train/utilisation"].keys() == {4, 5} and capsys.readouterr().out.count("% of peak") == 2
    for steps, depths in (((2, 3, 4), [1, 1, 2]), ((5,), [2])):  # rates are measured from the first step
        assert [drawn_depth(shares, config.seed, step - 1) for step in steps] == depths
        flops = sum(utilisation.step_flops(config, depth) for depth in depths)
        seconds = len(steps) * 8 * 16 / found["train/tokens_per_second"][steps[-1]]
        assert found["train/utilisation"][steps[-1]] == pytest.approx(flops / seconds / 1e12, rel=1e-5)


def test_the_flops_of_a_step_follow_the_solver_and_what_is_frozen():
    tokens, width, mlp, length = 8 * 16, 32, 64, 16

    def block(kind="diffeqformer", **changes):
        four, three = (toy_config(kind, model__num_steps=n, **{"model__mlp": mlp, **changes}) for n in (4, 3))
        return (utilisation.step_flops(four) - utilisation.step_flops(three)) / tokens

    attention, feed_forward = 4 * width**2 + width * length, 2 * width * mlp
    for solver, evaluations in {"euler": (1, 1), "heun": (2, 2), "rk4": (4, 4), "strang": (4, 2)}.items():
        expected = 6 * (evaluations[0] * attention + evaluations[1] * feed_forward)
        assert block(model__solver=solver) == expected
    lora = {"model__lora_rank": 3, "model__lora_layers": "mlp_up", "model__mlp": mlp}
    adapters = 6 * 3 * (width + mlp)  # of one layer
    frozen = 4 * (4 * width**2 + feed_forward) + 6 * width * length + adapters
    assert block("discretized", **lora) == frozen
    config = toy_config("discretized", model__num_steps=4, **lora)
    head = 6 * width * config.model.vocab_size  # which trains
    assert utilisation.step_flops(config) == tokens * (4 * frozen + head)


def test_a_trace_waits_for_devices_around_its_steps(tmp_path):
    """Until the state of the step before is ready, and that of the last one; also where a process begins among them."""
    trace, waited = profile.Trace(range(4, 7), tmp_path, goodput.Stopwatch(0.0)), []
    with mock.patch.object(jax, "block_until_ready", waited.append):
        for step in (5, 6, 7):
            trace.before(step, {"after": step - 1})
            trace.after(step, {"after": step}, stopping=False)
    assert waited == [{"after": 4}, {"after": 6}]


def test_a_run_goes_on_if_its_trace_can_not_be_written(tmp_path, capsys):
    (tmp_path / "tensorboard").touch()
    trace = profile.Trace(range(4, 5), tmp_path, goodput.Stopwatch(0.0))
    trace.before(4, {})
    trace.after(4, {}, stopping=False)
    said = capsys.readouterr().out
    assert "steps-4-4: the trace can't be written: " in said and said.endswith("; the run continues\n")


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes only where a test lets it."""
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: now.seconds))
    return now


def test_goodput_counts_repeated_steps_once(tmp_path, short_stores, monkeypatch, one_device_loop, clock, capsys):
    """A batch takes a second, compilation 100, a validation 10, a save 5, and the run is down for 50."""
    config = toy_config("gpt", steps=6, eval_every=4, checkpoint_every=2, data__dir=str(short_stores))
    dies, read, save = [4], Split.batch, checkpoint.save

    def passes(seconds, result=None):
        clock.seconds += seconds
        return result

    def batch(split, index, *args, **rows):
        passes(1)
        if index + 1 in dies:
            raise UserError(f"died at step {dies.pop()}")
        return read(split, index, *args, **rows)

    monkeypatch.setattr(Split, "batch", batch)
    monkeypatch.setattr(run, "check_memory", lambda *_, **__: passes(100))
    monkeypatch.setattr(hooks, "validate", lambda *_: passes(10, SCORES))
    monkeypatch.setattr(checkpoint, "save", lambda *args: passes(5, save(*args)))
    with pytest.raises(UserError, match="died at step 4"):
        loop.train(config, tmp_path, started=clock.seconds)
    assert "goodput:" not in capsys.readouterr().out
    passes(50)
    loop.train(config, tmp_path, started=clock.seconds)
    # Lost to restarts: the save after step 2, steps 3 and 4, and 50 seconds.
    spent = "compilation 68.3%, restarts 19.5%, evaluation 6.8%, saves 3.4%"
    line = f"goodput: train steps took 2.0% of the 4:53 since the run began; {spent}\n"
    out = capsys.readouterr().out
    assert out.count("goodput:") == 1 and line in out
    assert checkpoint.load(tmp_path).about.time_spent["steps"] == 6
