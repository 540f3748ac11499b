"""The progress of a run: lines on the terminal, and curves in TensorBoard."""

import struct
import time
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath
from google.protobuf.message import DecodeError
from tensorboardX import record_writer, summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from diffeqformer.console.results import markdown_table
from diffeqformer.console.terminal import print_progress
from diffeqformer.errors import reachable

FLUSH_SECONDS = 30  # maximum delay before curves appear in TensorBoard
BITS_AT = "bits_per_byte_at_"  # begins the names of a validation's scalars for other steps than `model.num_steps`


def read_curves(workdir: epath.PathLike) -> dict[str, dict[int, float]]:
    """The curves that TensorBoard shows: the values of every scalar by step; empty if nothing was written.

    This doesn't import TensorFlow, which takes TensorBoard's own reader seconds. A file that is damaged or still being
    written is read up to that point.
    """
    curves = {}
    folder = epath.Path(workdir) / "tensorboard"
    with reachable("--workdir", workdir):
        files = sorted(folder.glob("*.tfevents.*")) if folder.is_dir() else []
        contents = [file.read_bytes() for file in files]  # in the order of their names, as TensorBoard does
    for event in (event for content in contents for event in _events(content)):
        if event.session_log.status == SessionLog.START:
            for series in curves.values():
                for step in [step for step in series if step >= event.step]:
                    del series[step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: dict(sorted(series.items())) for tag, series in curves.items() if series}


def _events(content: bytes) -> Iterator[Event]:
    """The events of a file. Each follows its length (8 bytes) and a checksum (4), and precedes its own checksum (4)."""
    at = 0
    while at + 12 <= len(content):
        [length] = struct.unpack_from("<Q", content, at)
        if at + 12 + length + 4 > len(content):
            return
        try:
            yield Event.FromString(content[at + 12 : at + 12 + length])
        except DecodeError:
            return
        at += 12 + length + 4


class TensorBoard:
    """Curves in `<workdir>/tensorboard`, without TensorFlow. If they can't be written, this is printed once.

    Every process writes a file of its own. Files are read in the order of their names, so a number goes before the time
    in them: clocks can be set back. tensorboardX's usual writer isn't used: it writes in a thread, and its `flush`
    doesn't wait for that thread.

    Args:
        first_step: the step from which this process trains; values that earlier processes wrote after it are dropped.
        resumes: whether there is a checkpoint; if not, what earlier processes wrote is of another start, and dropped.
        depths: other steps of depth at which the run is validated. TensorBoard shows all of them in one chart.
    """

    def __init__(self, workdir: epath.PathLike, first_step: int, resumes: bool = True, depths: tuple[int, ...] = ()):
        self.first_step, self.flushed, self.failed = first_step, time.monotonic(), False
        earlier = read_curves(workdir) if resumes else {}  # what earlier processes wrote at the first step
        self.written = {tag for tag, values in earlier.items() if first_step in values}
        with reachable("--workdir", workdir):
            folder = epath.Path(workdir) / "tensorboard"
            record_writer.directory_check(str(folder))
            number = len(list(folder.glob("*.tfevents.*")))
            self.writer = EventsWriter(f"{folder}/events{number:05d}", f".{first_step}")
            begin = SessionLog(status=SessionLog.START)  # what earlier files have from its step on is dropped
            step = (first_step + 1) * resumes
            self.writer.write_event(Event(wall_time=time.time(), step=step, session_log=begin))
        if depths:
            tags = [f"validation/{name}" for name in ("bits_per_byte", *(f"{BITS_AT}{depth}" for depth in depths))]
            self._write(0, summary.custom_scalars({"depth": {"bits per byte": ["Multiline", tags]}}))

    def config(self, fields: dict) -> None:
        """Write the fields as a table, for TensorBoard's page of texts."""
        rows = [[name, str(value).replace("|", "&#124;")] for name, value in fields.items()]
        self.text(self.first_step, "config", markdown_table(["field", "value"], rows))

    def scalars(self, step: int, group: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            if step == self.first_step and f"{group}/{name}" in self.written:
                continue  # a validation that was left over, and whose process ended before it was saved
            self._write(step, summary.scalar(f"{group}/{name}", value))
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._write(step, summary.text(name, text))

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._write(step, summary.image(name, pixels, dataformats="HWC"))

    def flush(self) -> None:
        """Return when everything written so far is on disk."""
        self.flushed = time.monotonic()
        self._put("flush")

    def finish(self) -> None:
        self._put("close")

    def _write(self, step: int, written: summary.Summary) -> None:
        self._put("write_event", Event(wall_time=time.time(), step=step, summary=written))

    def _put(self, method: str, *event: Event) -> None:
        try:
            getattr(self.writer, method)(*event)
        except Exception as error:  # from the file system or a cloud client
            if not self.failed:
                print(f"the curves can't be written: {error}; the run continues without them", flush=True)
            self.failed = True


class Progress:
    """Prints the scalars of a run that trains from `first_step` on, and hands them to its trackers.

    Only one process of a run has these (`diffeqformer.training.trackers`).
    """

    def __init__(self, first_step: int, steps: int, tokens_per_step: int, trackers: Sequence = ()):
        self.first_step, self.steps, self.tokens_per_step = first_step, steps, tokens_per_step
        self.trackers = trackers
        self.start = self.last_time = time.monotonic()
        self.last_step = self.timed_from = first_step
        self.seconds_at_peak = 0.0  # of the steps since the last line

    def first(self, step: int, loss: float, seconds: float) -> None:
        """Report the first step of this process, `seconds` after its start; most of that time is compilation.

        Rates are measured from here.
        """
        self.start = self.last_time = time.monotonic()
        self.timed_from = self.last_step = step
        self.seconds_at_peak = 0.0
        print(f"step {step:,}/{self.steps:,}  loss {loss:.4f}  first step {seconds:.1f} s after the start", flush=True)

    def pause(self, seconds: float) -> None:
        """Exclude from the rate the time that wasn't training."""
        self.last_time += seconds

    def compiled(self, seconds: float) -> None:
        """Exclude from the rate and the time left what won't come again."""
        self.pause(seconds)
        self.start += seconds

    def step(self, seconds_at_peak: float) -> None:
        """Count a step that would take that many seconds at the devices' peak; NaN if that isn't known."""
        self.seconds_at_peak += seconds_at_peak

    def train(self, step: int, scalars: dict[str, float]) -> None:
        """Print a line after `step` steps: loss, rate, utilisation if it is known, and time left.

        `scalars` belong to this step. Rate and utilisation are those of all steps since the last line.
        """
        if step > self.last_step:
            now = time.monotonic()
            seconds = max(now - self.last_time, 1e-9)
            rate = (step - self.last_step) * self.tokens_per_step / seconds
            left = (self.steps - step) * (now - self.start) / (step - self.timed_from)
            self.last_step, self.last_time = step, now
            scalars = {**scalars, "tokens_per_second": rate}
            said = f"step {step:,}/{self.steps:,}  loss {scalars['loss']:.4f}"
            if self.seconds_at_peak > 0:
                scalars["utilisation"] = self.seconds_at_peak / seconds
                said += f"  {scalars['utilisation']:.1%} of peak"
            self.seconds_at_peak = 0.0
            print_progress(said, rate, left)
        self._track(step, "train", scalars)

    def validation(self, step: int, scalars: dict[str, float]) -> None:
        """Print and track the results of an evaluation, with bits per byte at other depths, if any."""
        self._track(step, "validation", scalars)
        at = [f"at {name.removeprefix(BITS_AT)}: {x:.4f}" for name, x in scalars.items() if name.startswith(BITS_AT)]
        others = f" ({', '.join(at)})" if at else ""
        print(
            f"step {step:,}/{self.steps:,}  validation: loss {scalars['loss']:.4f}  "
            f"perplexity {scalars['perplexity']:.2f}  bits/byte {scalars['bits_per_byte']:.4f}{others}",
            flush=True,
        )

    def flush(self) -> None:
        """Return when the curves that are files of the run are on disk."""
        for tracker in self.trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()

    def _track(self, step: int, group: str, scalars: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.scalars(step, group, scalars)
