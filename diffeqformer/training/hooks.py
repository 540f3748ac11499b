"""What happens after each train step: hooks that log, stop, trace, validate and save."""

import collections
import dataclasses
import math
import time

import jax

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import newest
from diffeqformer.config import field_names, get_field
from diffeqformer.config_fields import traced_steps
from diffeqformer.console.progress import BITS_AT, Progress
from diffeqformer.errors import UserError
from diffeqformer.parallel import hosts
from diffeqformer.rules import decay_start
from diffeqformer.training.profile import Trace
from diffeqformer.training.run import Run
from diffeqformer.training.trackers import open_trackers
from diffeqformer.training.validation import validate


@dataclasses.dataclass
class Step:
    """A train step that was dispatched, and what is known of it so far.

    number: counted from 1.
    state: after it.
    validates, saves: whether a validation or a checkpoint is due.
    stops: whether the run was told to stop.
    validation: its results, if there was one.
    """

    number: int
    state: dict
    validates: bool
    saves: bool
    stops: bool = False
    validation: dict[str, float] | None = None


class Hooks:
    """What happens after each train step, in the order of `all`.

    Args:
        run: see `Run`.
        first: the step from which this process trains.
        notice: of a stop.
    """

    def __init__(self, run: Run, first: int, notice: hosts.Notice):
        config = run.config
        tokens, resumes = config.batch_size * config.sequence_length, newest(run.checkpoints) is not None
        self.run, self.clock, self.notice = run, run.clock, notice
        trackers = []
        if hosts.is_first():
            trackers = open_trackers(config.tracker, run.folder, first, resumes, run.other_depths())
        self.progress = Progress(first, config.steps, tokens, trackers)
        self.progress.config({name: get_field(config, name) for name in field_names(config)})
        self.tracer = Trace(traced_steps(config.profile_steps) if hosts.is_first() else range(0), run.folder, run.clock)
        self.compiled, self.pending = set(), collections.deque()
        self.all = self.log, self.stop, self.trace, self.validate, self.save, self.check

    def train_step(self, number: int, state: dict) -> Step:
        """Dispatch a step of training. The state is donated."""
        run, config = self.run, self.run.config
        self.progress.pause(self.tracer.before(number, state))
        num_steps, batch = run.num_steps(number), run.batch(number)
        if new := num_steps not in self.compiled:
            self.clock.lap("steps")
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, scalars = run.program.train_step(state, batch, num_steps)
        if new:
            self.compiled.add(num_steps)
            self.progress.compiled(self.clock.lap("compilation"))
        self.pending.append((number, run.seconds_at_peak[num_steps], scalars))
        last = number == config.steps
        return Step(
            number,
            state,
            validates=last or number % config.eval_every == 0,
            saves=last or number % config.checkpoint_every == 0 or number == decay_start(config),
        )

    def log(self, step: Step) -> None:
        """Show the scalars of the step before, so that dispatch never waits; of this one, if more is due after it."""
        first = step.number == self.progress.first_step + 1
        if first:
            jax.block_until_ready(step.state)  # raises an error if memory ran out
        self.show_scalars(0 if first or step.validates or step.saves else 1)

    def stop(self, step: Step) -> None:
        """Ask for a stop, after the wait of `log`: a notice during the step prevents its validation."""
        last = step.number == self.run.config.steps
        step.stops = self.notice.now(step.validates or step.saves)
        step.validates = step.validates and (last or not step.stops)
        step.saves = step.saves or step.stops

    def trace(self, step: Step) -> None:
        """End the trace after its last step."""
        self.progress.pause(self.tracer.after(step.number, step.state, step.stops))

    def validate(self, step: Step) -> None:
        """Validate, if it is due, once all steps have ended."""
        if step.validates or step.saves:
            self.show_scalars(0)
            self.clock.lap("steps")
        if step.validates:
            step.validation = self.show_validation(step.number, step.state["params"])

    def save(self, step: Step) -> None:
        """Start saving, if it is due: now that the step's scalars are finite, and no curve lags behind the checkpoint.

        The token store's check is awaited, unless the run stops: then the next process has it.
        """
        if not step.saves:
            return
        run, config, progress = self.run, self.run.config, self.progress
        run.check_store(wait=not step.stops)
        progress.pause(self.clock.lap("start-up"))  # the wait, if there was one
        progress.flush()
        trained = {**step.state, "params": run.program.trained(step.state["params"])}  # without frozen parameters
        due = step.validation is None and step.number % config.eval_every == 0
        about = dataclasses.replace(run.about, validation_due=due, time_spent=self.clock.record())
        checkpoint.save(run.checkpoints, step.number, trained, about, step.validation)
        progress.pause(self.clock.lap("saves"))

    def check(self, step: Step) -> None:
        """Raise what went wrong in the background."""
        checkpoint.check(self.run.checkpoints)
        self.run.check_store()

    def show_scalars(self, left: int) -> None:
        """Wait for steps and show their scalars, until `left` of them are pending.

        Raises:
            UserError: if the loss or the gradient isn't finite.
        """
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
        """Show the validation after a step.

        Returns:
            its results (`validate`), with bits per byte at the other depths of training.

        Raises:
            UserError: if the loss isn't finite.
        """
        run, config, split = self.run, self.run.config, self.run.splits["validation"]
        results = validate(run.program, params, split, config)
        if not math.isfinite(results["loss"]):
            raise UserError(self.diverged(f"it is {results['loss']} in the validation at step {number:,}"))
        for depth in run.other_depths():
            results[f"{BITS_AT}{depth}"] = validate(run.program, params, split, config, depth)["bits_per_byte"]
        self.progress.validation(number, results)
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
