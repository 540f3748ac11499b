"""The faults of tests/test_faults.py, and the work that they interrupt."""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from flags import for_a_process
from helpers import ROOT
from runs import start_command

EXPECTED = r".* Using GOOGLE_AUTH_TOKEN_FOR_TESTING\n|\n*stopping after what is in progress.*\n"  # on standard error
LONGEST = 400  # seconds of a process, after which it is said to hang; the machine may be busy


def newest(workdir: pathlib.Path) -> int:
    """The newest checkpoint that has its final name, 0 for none."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def set_aside(workdir: pathlib.Path) -> set[str]:
    """The names of what was set aside as damaged."""
    return {path.name for path in (workdir / "damaged").glob("*")}


@dataclasses.dataclass
class Campaign:
    """Where faults happen, and what came of them."""

    at: random.Random
    folder: pathlib.Path
    stores: pathlib.Path
    injected: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failed: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def fail(self, what: str, said: str) -> None:
        """Count a failure, and show it."""
        self.failed[what] += 1
        print(f"{what}: {said}", file=sys.__stderr__, flush=True)


@dataclasses.dataclass
class Life:
    """One piece of work that faults interrupt until it is done.

    folder: where it works, or its copy on this machine.
    command: of one process.
    done: whether the work is done.
    check: compares the result with undisturbed work, which raises an AssertionError if it differs.
    processes: how many share the work.
    environment: added to that of its processes.
    """

    folder: pathlib.Path
    command: list[str]
    done: Callable[[], bool]
    check: Callable[[], None]
    processes: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def start(self, limit: int | None = None) -> list[subprocess.Popen]:
        """Start it, or let it go on. `limit` is that of the sizes of its files."""
        module, *given = self.command
        if self.processes > 1:
            return start_command(module, self.processes, 1, [[*given, "--join_timeout=120"]] * self.processes)

        before = ["env", "--default-signal=INT"]  # what a shell starts in the background ignores it
        if limit is not None:
            before += ["prlimit", f"--fsize={limit}"]
        return [
            subprocess.Popen(
                [*before, sys.executable, "-m", f"diffeqformer.{module}", *given], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "XLA_FLAGS": for_a_process(1), **self.environment},
            )
        ]  # fmt: skip


def end(
    campaign: Campaign, life: Life, running: list[subprocess.Popen], statuses: tuple[int, ...], cause: str = ""
) -> None:
    """Wait for processes to end, and check what they say: nothing, or one sentence, which names the cause (a pattern).

    A bucket's errors can be unforeseen.
    """
    if life.environment:
        statuses += (1,)  # a bucket that fails too often
    for process in running:
        try:
            output, errors = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            campaign.fail("hangs", f"{life.folder.name}: {output[-500:]} {errors[-500:]}")
            continue
        errors = re.sub(EXPECTED, "", errors)
        alone = life.processes == 1  # JAX reports the loss of another process at length
        if alone and (process.returncode not in statuses or errors.count("\n") > 1 or "Traceback" in errors):
            campaign.fail("not one sentence", f"{life.folder.name}: status {process.returncode}: {errors[-2000:]}")
        named = re.search(cause, errors) and "TRACEBACK" not in errors and "not enough memory" not in errors
        if alone and process.returncode == 1 and not life.environment and not named:
            campaign.fail("wrong causes", f"{life.folder.name}: {errors[-2000:]}")


def wait_for_a_moment(campaign: Campaign, running: subprocess.Popen) -> None:
    """Wait until a moment in imports, in compilation, or in training, which is full of saves and evaluations."""
    when = campaign.at.choice(["imports", "compilation", "training", "training"])
    if when != "training":
        time.sleep(campaign.at.uniform(0.05, 3) if when == "imports" else campaign.at.uniform(3, 12))
        return
    too_long = threading.Timer(LONGEST, running.kill)
    too_long.start()
    for line in running.stdout:
        if "first step" in line or "documents" in line:
            break
    too_long.cancel()
    if running.poll() == -signal.SIGKILL:
        campaign.fail("hangs", "before the first step")
    time.sleep(campaign.at.uniform(0, 3))


def signalled(which: signal.Signals, campaign: Campaign, life: Life) -> bool:
    """A signal at a random moment, to one process. Several processes end if one is killed.

    Returns:
        whether the process still ran, as of all faults that come at a moment.
    """
    running = life.start()
    chosen = campaign.at.choice(running)
    wait_for_a_moment(campaign, running[0])
    met = chosen.poll() is None
    chosen.send_signal(which)
    end(campaign, life, running, (-which, 128 + which, 0))
    return met


def paused(campaign: Campaign, life: Life) -> bool:
    """A machine or disk that stands still again and again, and then a kill."""
    running, met = life.start(), False
    for _ in range(5):
        time.sleep(campaign.at.uniform(0.5, 3))
        met = met or any(process.poll() is None for process in running)
        for process in running:
            process.send_signal(signal.SIGSTOP)
        time.sleep(campaign.at.uniform(0.1, 2))
        for process in running:
            process.send_signal(signal.SIGCONT)
    for process in running:
        process.kill()
    end(campaign, life, running, (-signal.SIGKILL, 0))
    return met


def limited_files(campaign: Campaign, life: Life) -> None:
    """Files that can't grow beyond a random size."""
    size = int(2 ** campaign.at.uniform(10, 21))
    end(campaign, life, life.start(limit=size), (1, 0), "File too large")


def damaged(campaign: Campaign, file: pathlib.Path) -> bytes:
    """Flip a bit of a file, or cut it; returns what it was."""
    whole = file.read_bytes()
    place = campaign.at.randrange(len(whole))
    changed = bytearray(whole)
    changed[place] ^= 1 << campaign.at.randrange(8)
    file.write_bytes(whole[:place] if campaign.at.random() < 0.2 else changed)
    return whole


def damaged_checkpoint(campaign: Campaign, life: Life) -> bool | None:
    """Damage in the newest checkpoint, after which an older one is taken; or the whole one, if it is the only one.

    Of several processes, one that can't read an array moves the checkpoint, and all end.
    """
    step = newest(life.folder)
    if not step:
        return False
    files = [path for path in (life.folder / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    file = campaign.at.choices(files, [path.stat().st_size for path in files])[0]
    whole = damaged(campaign, file)
    only = len([path for path in (life.folder / "checkpoints").iterdir() if path.name.isdecimal()]) == 1
    running = life.start()
    end(campaign, life, running, (0, 1) if only else (0,))
    if only and any(process.returncode for process in running):
        file.write_bytes(whole)


def damaged_store(campaign: Campaign, life: Life) -> None:
    """Damage in the token store, which a run must refuse before it saves anything."""
    [store], step = campaign.stores.iterdir(), newest(life.folder)
    file = campaign.at.choice([path for path in store.iterdir() if path.suffix == ".bin"])
    whole = damaged(campaign, file)
    [running] = life.start()
    end(campaign, life, [running], (1,))
    file.write_bytes(whole)
    if newest(life.folder) != step:
        campaign.fail("silent changes", f"{life.folder.name} has trained on a damaged store")


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[bool]:
    """A disk of 64 MB at a folder, if this machine lets one make it (root on Linux)."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], capture_output=True).returncode
    try:
        yield made == 0
    finally:
        if made == 0:
            subprocess.run(["umount", "-l", folder], check=True)


class Bucket:
    """A bucket that fails now and then (tests/bucket_process.py)."""

    def __init__(self, seed: int):
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "bucket_process.py", str(seed), "0.03"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        address = self.process.stdout.readline().strip()
        self.environment = {
            "STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address, "FSSPEC_GS_TOKEN": "anon",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }  # fmt: skip

    def fetch(self, name: str, folder: pathlib.Path) -> None:
        """Copy a folder of the bucket to one of the same name, in another process, which has its environment."""
        copy = "import fsspec, sys; fsspec.filesystem('gs').get(sys.argv[1], sys.argv[2], recursive=True)"
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-c", copy, f"gs://bucket/{name}", f"{folder.parent}/"]
        subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True)

    def failures(self) -> int:
        """End it, and return how many requests failed."""
        return int(self.process.communicate(timeout=60)[0])


def filled_disk(campaign: Campaign, life: Life) -> bool | None:
    """A disk on which some kilobytes are free."""
    disk = life.folder.parent
    if not os.path.ismount(disk):
        return False
    free = shutil.disk_usage(disk).free - int(2 ** campaign.at.uniform(8, 21))
    (disk / "filler").write_bytes(bytes(max(0, free)))
    end(campaign, life, life.start(), (1, 0), "No space left on device")
    (disk / "filler").unlink()


def read_only_disk(campaign: Campaign, life: Life) -> bool | None:
    """A disk that can't be written."""
    disk = life.folder.parent
    if not os.path.ismount(disk):
        return False
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    end(campaign, life, life.start(), (1,), "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


SIGNALS = {which.name: functools.partial(signalled, which) for which in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)}
OF_DISKS = {"full disk": filled_disk, "limit on file sizes": limited_files, "read-only disk": read_only_disk}
OF_RUNS = {
    **SIGNALS, **OF_DISKS, "pauses": paused, "damaged checkpoint": damaged_checkpoint, "damaged store": damaged_store,
}  # fmt: skip
