"""What a run prints and writes as it goes."""

import types

from diffeqformer.console import progress as progress_module
from diffeqformer.console.progress import Progress, TensorBoard, read_curves
from runs import EventAccumulator, curves


def test_a_start_without_a_checkpoint_drops_all_that_another_start_wrote(tmp_path):
    """Which may have had another base, whose validation at step 0 is not this one's."""
    for value in (1.0, 2.0):
        progress = Progress(0, 5, 1, [TensorBoard(tmp_path, 0, resumes=False)])
        progress.validation(0, {"loss": value, "perplexity": value, "bits_per_byte": value})
        progress.close()
    assert read_curves(tmp_path)["validation/loss"] == curves(tmp_path)["validation/loss"] == {0: 2.0}


def test_curves_hold_each_step_once_whatever_the_clock_does(tmp_path, monkeypatch):
    """Clocks are set back. A validation left over at step 2 is made twice, because the process ends before it saves."""
    result = {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0}
    for hour, first in ((3, 0), (2, 2), (1, 2)):
        monkeypatch.setattr("time.time", lambda hour=hour: 1.8e9 + 3600 * hour)
        progress = Progress(first, 4, 1, [TensorBoard(tmp_path, first)])
        if first == 2:
            progress.validation(2, result)
        for step in range(first + 1, 4 if first == 0 else 5):
            progress.train(step, {"loss": float(hour)})
        progress.close()
    losses = {1: 3.0, 2: 3.0, 3: 1.0, 4: 1.0}
    assert read_curves(tmp_path)["train/loss"] == curves(tmp_path)["train/loss"] == losses
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("validation/loss")] == [2]


def test_rates_and_the_time_left_leave_out_what_does_not_come_again(monkeypatch, capsys):
    now = types.SimpleNamespace(seconds=0.0)
    clock = types.SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: now.seconds)
    monkeypatch.setattr(progress_module, "time", clock)
    progress = Progress(0, steps=103, tokens_per_step=10)
    progress.first(1, 5.0, 7.0)
    now.seconds += 2 + 100 + 30
    progress.compiled(100.0)
    progress.pause(30.0)  # a validation, which comes again
    progress.train(3, {"loss": 4.0})
    progress.close()
    assert "10 tokens/s  26:40 left" in capsys.readouterr().out


def test_the_config_is_a_text_of_tensorboard(tmp_path):
    progress = Progress(0, 1, 1, [TensorBoard(tmp_path, 0)])
    progress.config({"model.kind": "gpt", "sample.prompt": "a | b"})
    progress.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = events.Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "| model.kind | gpt |\n| sample.prompt | a &#124; b |" in text
