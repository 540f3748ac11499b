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
    return as_pixels(figure)


@dataclasses.dataclass
class Dispatched:
    """A train step that has been dispatched, and what is due after it, which `stop` may change."""

    number: int
    state: dict
    scalars: dict  # still on the devices
    num_steps: int  # of depth
    validates: bool
    saves: bool
    stops: bool = False
    validation: dict[str, float] | None = None


class Hooks:
    """What happens around each train step of a run, from step `first` on, until a notice to stop.

    after: the hooks for a step that was dispatched, in their order.
    """

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

    def dispatched(self, number: int, state: dict, scalars: dict, num_steps: int) -> Dispatched:
        """A step, and what is due after it."""
        config, last = self.run.config, number == self.run.config.steps
        validates = last or number % config.eval_every == 0
        saves = last or number % config.checkpoint_every == 0 or number == decay_start(config)
        return Dispatched(number, state, scalars, num_steps, validates, saves)

    def time(self, step: Dispatched) -> None:
        """End the time of a compilation, if this number of steps of depth was new."""
        if step.num_steps not in self.compiled:
            self.compiled.add(step.num_steps)
            self.progress.compiled(self.clock.lap("compilation"))

    def log(self, step: Dispatched) -> None:
        """Show the scalars of the step before, so that dispatch never waits; of this one, if more is due after it."""
        self.pending.append((step.number, self.seconds_at_peak[step.num_steps], step.scalars))
        first = step.number == self.progress.first_step + 1
        if first:
            jax.block_until_ready(step.state)  # raises an error if memory ran out
        self.show_scalars(0 if first or step.validates or step.saves else 1)

    def stop(self, step: Dispatched) -> None:
        """Heed a notice to stop, also one that came during the step: no validation then, but after the last step."""
        step.stops = self.notice.now(step.validates or step.saves)
        step.validates &= not step.stops or step.number == self.run.config.steps
        step.saves |= step.stops

    def trace(self, step: Dispatched) -> None:
        """End a trace after its last step."""
        self.progress.pause(self.tracer.after(step.number, step.state, step.stops))

    def validate(self, step: Dispatched) -> None:
        """Validate if that is due, once all scalars are shown."""
        if step.validates or step.saves:
            self.show_scalars(0)
            self.clock.lap("steps")
        if step.validates:
            step.validation = self.show_validation(step.number, step.state["params"])

    def save(self, step: Dispatched) -> None:
        """Start saving if that is due: now that the step's scalars are finite, and no curve lags behind the checkpoint.

        The token store's check is awaited, unless the run stops: then the next process has it.
        """
        if not step.saves:
            return
        run, progress = self.run, self.progress
        run.check_store(wait=not step.stops)
        progress.pause(self.clock.lap("start-up"))  # the wait, if there was one
        progress.flush()
        trained, _ = run.program.loss.trained_and_frozen(step.state["params"])
        due = step.validation is None and step.number % run.config.eval_every == 0
        about = dataclasses.replace(run.about, validation_due=due, time_spent=self.clock.record())
        checkpoint.save(run.checkpoints, step.number, {**step.state, "params": trained}, about, step.validation)
        progress.pause(self.clock.lap("saves"))

    def check(self, step: Dispatched) -> None:
        """Notice a save or a check of the token store that failed meanwhile."""
        checkpoint.check(self.run.checkpoints)
        self.run.check_store()

    # `log` waits for the step, so `stop` heeds a notice during it; `validate` finds all that is saved finite.
    after = (time, log, stop, trace, validate, save, check)

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
