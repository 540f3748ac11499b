"""What commands print while they work."""

import io
import json
import time
from collections.abc import Callable

from diffeqformer.errors import printable


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def json_line(record: dict) -> str:
    """A record as JSON in which control characters are escaped, so that it is safe for a terminal, and exact."""
    text = json.dumps(record, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class PrintableOutput:
    """An output that replaces control characters (`printable`). File names and checkpoints can hold any."""

    def __init__(self, output: io.TextIOBase):
        self.output = output

    def write(self, text: str) -> int:
        """Write a text, and return its length."""
        self.output.write(printable(text))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.output, name)


def print_progress(
    said: str, rate: float, seconds_left: float | None, unit: str = "tokens", output: io.TextIOBase | None = None
) -> None:
    """Print a line of progress: what is said, the rate, and the time left, if it is known."""
    speed = f"{rate:,.0f}" if rate > 10 else f"{rate:.2g}"
    left = "" if seconds_left is None else f"  {duration(seconds_left)} left"
    print(f"{said}  {speed} {unit}/s{left}", file=output, flush=True)


def show_progress(
    what: str, unit: str = "tokens", output: io.TextIOBase | None = None, before: int = 0
) -> Callable[..., None]:
    """Prints, every five seconds, the finished number and the total, the rate and the time left.

    It returns a function of the two numbers and, where there are any, other facts for the line, which then also comes
    at the end. `output` is by default the standard output. What was finished `before` doesn't count in the rate.
    """
    start = shown = time.monotonic()

    def show(done: int, total: int, facts: str = "") -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 5 or (facts and done == total):
            shown, rate = now, (done - before) / (now - start)
            left = (total - done) / rate if rate else None
            print_progress(f"  {what}: {done:,}/{total:,} {unit}{facts}", rate, left, unit, output)

    return show
