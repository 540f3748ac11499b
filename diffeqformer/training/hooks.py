"""What happens around each train step: logs, a stop, traces, validation and saves."""

import collections
import dataclasses
import math
import time

import jax
import numpy as np

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import newest
from diffeqformer.config import fields_of
from diffeqformer.config_fields import traced_steps
from diffeqformer.console.figures import as_pixels, new_figure
from diffeqformer.console.progress import BITS_AT, Progress, TensorBoard
from diffeqformer.errors import UserError
from diffeqformer.parallel import hosts
from diffeqformer.rules import decay_start
from diffeqformer.training.profile import Trace
from diffeqformer.training.run import Run
from diffeqformer.training.trackers import SERVICES, InThread
from diffeqformer.training.utilisation import utilisation
from diffeqformer.training.validation import validate


def by_depth(results: dict[str, float], num_steps: int) -> np.ndarray:
    """The bits per byte of a validation over the steps of depth as an image, uint8 [height, width, 3]."""
    bits = {num_steps: results["bits_per_byte"]}
    bits |= {int(name.removeprefix(BITS_AT)): each for name, each in results.items() if name.startswith(BITS_AT)}
    figure, [[axis]] = new_figure(1, 1, (5, 3.5))
    axis.plot(*zip(*sorted(bits.items())), "o-")
    axis.set(title="validation", xlabel="steps of depth", ylabel="bits per byte", xticks=list(bits))
    axis.grid(alpha=0.3)
    return as_pixels(figure)


class Hooks:
    """What happens around each train step of a run, from step `first` on, until a notice to stop."""

    def __init__(self, run: Run, first: int, notice: hosts.Notice):
        config = run.config
        tokens, resumes = config.batch_size * config.sequence_length, newest(run.checkpoints) is not None
        self.run, self.clock, self.notice = run, run.clock, notice
        trackers = [
            InThread(name, run.folder, resumes)
            if name in SERVICES
            else TensorBoard(run.folder, first, resumes, run.other_depths())
            for name in (config.tracker.split(",") if hosts.is_first() else ())
        ]
        self.progress = Progress(first, config.steps, tokens, trackers)
        for tracker in trackers:
            tracker.config(fields_of(config))
            tracker.text(first, "parameters", f"```\n{(run.folder / 'parameters.txt').read_text()}\n```")
        self.tracer = Trace(traced_steps(config.profile_steps) if hosts.is_first() else range(0), run.folder, run.clock)
        devices = list(run.program.mesh.devices.flat)
        self.seconds_at_peak = {depth: utilisation(config, 1.0, devices, depth) for depth in run.program.depths}
        self.compiled, self.pending = set(), collections.deque()

    def before_step(self, num_steps: int) -> None:
        """Begin the time of a compilation, if this number of steps of depth is new."""
        if num_steps not in self.compiled:
            self.clock.lap("steps")

    def after_step(self, number: int, state: dict, scalars: dict, num_steps: int) -> bool:
        """Log, trace, validate and save after a step was dispatched, and return whether the run was told to stop."""
        config = self.run.config
        if num_steps not in self.compiled:
            self.compiled.add(num_steps)
            self.progress.compiled(self.clock.lap("compilation"))
        self.pending.append((number, self.seconds_at_peak[num_steps], scalars))
        first, last = number == self.progress.first_step + 1, number == config.steps
        validates = last or number % config.eval_every == 0
        saves = last or number % config.checkpoint_every == 0 or number == decay_start(config)
        if first:
            jax.block_until_ready(state)  # raises an error if memory ran out
        # The scalars of the step before, so that dispatch never waits; of this one, if more is due after it.
        self.show_scalars(0 if first or validates or saves else 1)
        stops = self.notice.now(validates or saves)  # after the wait: a notice during the step prevents its validation
        validates, saves = validates and (last or not stops), saves or stops
        self.progress.pause(self.tracer.after(number, state, stops))
        if validates or saves:
            self.show_scalars(0)
            self.clock.lap("steps")
        validation = self.show_validation(number, state["params"]) if validates else None
        if saves:
            self.save(number, state, validation, stops)
        checkpoint.check(self.run.checkpoints)
        self.run.check_store()
        return stops

    def save(self, number: int, state: dict, validation: dict | None, stops: bool) -> None:
        """Start saving: now that the step's scalars are finite, and no curve lags behind the checkpoint.

        The token store's check is awaited, unless the run stops: then the next process has it.
        """
        run, progress = self.run, self.progress
        run.check_store(wait=not stops)
        progress.pause(self.clock.lap("start-up"))  # the wait, if there was one
        progress.flush()
        trained = {**state, "params": run.program.trained(state["params"])}  # without frozen parameters
        due = validation is None and number % run.config.eval_every == 0
        about = dataclasses.replace(run.about, validation_due=due, time_spent=self.clock.record())
        checkpoint.save(run.checkpoints, number, trained, about, validation)
        progress.pause(self.clock.lap("saves"))

    def show_scalars(self, left: int) -> None:
        """Wait for steps and show their scalars, until `left` of them are pending; a UserError if one isn't finite."""
        while len(self.pending) > left:
            number, seconds_at_peak, scalars = self.pending.popleft()
            scalars = {name: float(value) for name, value in scalars.items()}
            if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["gradient_norm"])):
                found = f"it is {scalars['loss']} with a gradient norm of {scalars['gradient_norm']} at step {number:,}"
                raise UserError(self.diverged(found))
            self.progress.step(seconds_at_peak)
            if number == self.progress.first_step + 1:
                self.progress.first(number, scalars["loss"], time.monotonic() - self.clock.started)
            if number % self.run.config.log_every == 0 or number == self.run.config.steps:
                self.progress.train(number, scalars)

    def show_validation(self, number: int, params: dict) -> dict[str, float]:
        """Show and return the validation after a step, with bits per byte at the other depths of training.

        A UserError says if its loss isn't finite.
        """
        run, split = self.run, self.run.splits["validation"]
        results = validate(run.program, params, split)
        if not math.isfinite(results["loss"]):
            raise UserError(self.diverged(f"it is {results['loss']} in the validation at step {number:,}"))
        for depth in run.other_depths():
            results[f"{BITS_AT}{depth}"] = validate(run.program, params, split, depth)["bits_per_byte"]
        self.progress.validation(number, results)
        for tracker in self.progress.trackers if run.other_depths() else ():
            tracker.picture(number, "bits_per_byte_by_depth", by_depth(results, run.config.model.num_steps))
        self.progress.pause(self.clock.lap("evaluation"))
        return results

    def diverged(self, found: str) -> str:
        """The message when the loss or the gradient is no longer finite."""
        checkpoint.check(self.run.checkpoints, wait=True)
        saved = newest(self.run.checkpoints)
        good = f"the last good checkpoint is step {saved or 0:,} in {self.run.folder}"
        if saved is None:
            good = "no checkpoint had been saved yet"
        return f"loss: {found}; {good}; start again in another --workdir with a lower config.optimizer.learning_rate"
