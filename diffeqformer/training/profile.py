"""Traces of train steps, for TensorBoard's profiler."""

import contextlib
import tempfile

import jax
from etils import epath

from diffeqformer.errors import reason_of
from diffeqformer.training.goodput import Stopwatch


class Trace(contextlib.AbstractContextManager):
    """Writes a trace of some train steps to `<workdir>/tensorboard/plugins/profile/steps-<first>-<last>`.

    Devices are waited for before the first of these steps and after the last one, and at no other time. So the trace
    holds exactly these steps and what comes between them. If it can't be written, the run continues, and a message is
    printed. `before` and `after` return the seconds that they took, without the wait.

    Args:
        steps: of training, counted from 1; empty: none. Those before the first call of `before` aren't traced.
    """

    def __init__(self, steps: range, workdir: epath.PathLike, clock: Stopwatch):
        self.steps, self.clock, self.first = steps, clock, None
        self.folder = epath.Path(workdir) / "tensorboard" / "plugins" / "profile"

    def before(self, step: int, state: dict) -> float:
        """Begin the trace before its first step, once the state of the step before is ready."""
        if self.first is not None or step not in self.steps:
            return 0.0
        jax.block_until_ready(state)
        self.clock.lap("steps")
        # JAX would name the folder by the second, and reach gs:// by another client than everything else here.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of a Python function would slow the host down and fill the trace
        try:
            self.local = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(self.local.name, profiler_options=options)
            self.first = step
        except Exception as error:  # from the profiler or the file system
            self.steps = range(0)
            print(f"config.profile_steps: the trace can't begin: {reason_of(error)}; the run continues", flush=True)
        return self.clock.lap("profiling")

    def after(self, step: int, state: dict, stopping: bool) -> float:
        """End and write the trace after its last step, or if the run stops, once the state is ready."""
        if self.first is None or not (stopping or step == self.steps[-1]):
            return 0.0
        jax.block_until_ready(state)
        self.clock.lap("steps")
        folder = self.folder / f"steps-{self.first}-{step}"
        try:
            self._end(folder)
        except Exception as error:  # from the profiler, the file system or a cloud client
            print(f"{folder}: the trace can't be written: {reason_of(error)}; the run continues", flush=True)
        return self.clock.lap("profiling")

    def _end(self, folder: epath.Path | None) -> None:
        """End the trace, and write it to a folder, if there is one, in place of an earlier trace."""
        self.first, self.steps = None, range(0)
        with self.local as local:
            jax.profiler.stop_trace()
            if folder:
                folder.rmtree(missing_ok=True)
                folder.mkdir(parents=True)
                for file in epath.Path(local).glob("plugins/profile/*/*"):
                    (folder / file.name).write_bytes(file.read_bytes())

    def __exit__(self, *_) -> None:
        if self.first is not None:  # the run has failed, with an error that matters more
            with contextlib.suppress(Exception):
                self._end(None)
