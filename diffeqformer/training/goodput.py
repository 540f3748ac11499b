"""Where a run's time goes, over all of its processes, and its goodput: the share of that time that train steps took."""

import time

from diffeqformer.console.terminal import duration

CAUSES = ("steps", "start-up", "compilation", "evaluation", "saves", "profiling")


class Stopwatch:
    """Counts all time of a process under one cause after another, and adds it to that of earlier processes.

    Each checkpoint records the sums. So steps that were lost with a process, and are repeated, count once. What no
    process on the way to this state has counted, such steps and the time between two processes, was lost to restarts.

    Args:
        started: `time.monotonic()` when this process began.
    """

    def __init__(self, started: float):
        self.started = self.last = started
        self.seconds = dict.fromkeys(CAUSES, 0.0)  # of this process
        self.resume(None, 0)

    def resume(self, saved: dict | None, step: int) -> None:
        """Take the record of a checkpoint, saved at a step, as what was before this process; None: nothing is known."""
        began = time.time() - (time.monotonic() - self.started)
        self.earlier = {"began": began, "from_step": step, **(saved or {})}

    def lap(self, cause: str) -> float:
        """Count the time since the last lap under a cause, and return it in seconds."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        self.seconds[cause] += seconds
        return seconds

    def record(self) -> dict:
        """What a checkpoint keeps: seconds by cause, and from the first process's start until now (`elapsed`).

        The clock of the first process can be ahead of this one's. No cause takes longer than all the time, though.
        """
        began, from_step = self.earlier["began"], self.earlier["from_step"]
        seconds = {cause: self.earlier.get(cause, 0.0) + own for cause, own in self.seconds.items()}
        elapsed = max(time.time() - began, sum(seconds.values()))
        return {"began": began, "from_step": from_step, "elapsed": elapsed, **seconds}


def goodput(record: dict) -> dict[str, float]:
    """The share of the time by cause, that of restarts included, from `Stopwatch.record`."""
    seconds = {cause: record.get(cause, 0.0) for cause in CAUSES}
    seconds["restarts"] = max(record.get("elapsed", 0.0) - sum(seconds.values()), 0.0)
    whole = max(sum(seconds.values()), 1e-9)
    return {cause: value / whole for cause, value in seconds.items()}


def describe(record: dict) -> str:
    """The goodput and what took the rest, in one line. Causes below a thousandth are left out."""
    shares = goodput(record)
    since = f"step {record['from_step']:,}" if record.get("from_step") else "the run began"
    whole = duration(record.get("elapsed", 0.0))
    steps = f"goodput: train steps took {shares.pop('steps'):.1%} of the {whole} since {since}"
    others = sorted(((share, cause) for cause, share in shares.items() if share >= 0.0005), reverse=True)
    return "; ".join([steps, *([", ".join(f"{cause} {share:.1%}" for share, cause in others)] if others else [])])
