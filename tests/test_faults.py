"""A run survives what people, machines and disks do to it, bit for bit.

`make test-faults` injects faults for an hour; `make test-faults MINUTES=10` for ten minutes. Then it prints how many
there were, and how many runs were changed silently, couldn't go on, hung or said more than one sentence. The seed of
the draws is printed, too; SEED=3 repeats them. The suite has two kills, each in the middle of a save.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from diffeqformer import checkpoint
from diffeqformer.console.terminal import printable
from diffeqformer.data.store import read_about
from diffeqformer.training import loop
from flags import for_a_process
from helpers import ROOT
from runs import TINY, curves, finish, start, start_command

SAVING = ["--config.checkpoint_every=3", "--config.steps=30", "--config.eval_every=10"]
LONGEST = 200  # seconds of a process, after which it is said to hang; the machine may be busy


def newest(workdir: pathlib.Path) -> int:
    """The newest checkpoint that has its final name, 0 for none."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def saved_state(workdir: pathlib.Path) -> dict:
    """Parameters and optimizer state of the last step."""
    items = {name: checkpoint.ocp.args.StandardRestore() for name in ("params", "optimizer")}
    with checkpoint.open_to_read(workdir) as (manager, step, _, _):
        assert step == 30
        return dict(manager.restore(step, args=checkpoint.ocp.args.Composite(**items)).items())


def check_same(ours: pathlib.Path, undisturbed: pathlib.Path) -> None:
    """Curves, parameters and Adam moments of two finished runs are equal."""
    found, expected = curves(ours), curves(undisturbed)
    assert set(expected["train/loss"]) == set(range(1, 31)) and {10, 20, 30} <= set(expected["validation/loss"])
    assert {tag for tag in expected if found[tag] != expected[tag]} <= {"train/tokens_per_second"}
    jax.tree.map(np.testing.assert_array_equal, saved_state(ours), saved_state(undisturbed))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save(tmp_path, short_stores):
    killed, alone = tmp_path / "killed", tmp_path / "alone"

    def saves_begun() -> set:
        return {(path.name, path.stat().st_ino) for path in (killed / "checkpoints").glob("*tmp*")}

    in_a_save = False
    while not in_a_save:  # a save may be faster
        before, step = saves_begun(), newest(killed)
        [running] = start(1, 1, [killed], short_stores, *SAVING)
        while not saves_begun() - before:
            assert running.poll() is None
        in_a_save = bool(saves_begun() - before)
        running.send_signal(signal.SIGKILL)
        output, errors = running.communicate()
        assert running.returncode == -signal.SIGKILL and errors == "" and newest(killed) >= step
        assert step == 0 or f"from its checkpoint at step {step}\n" in output
    [(output, _)] = finish(start(1, 1, [killed], short_stores, *SAVING))
    [(expected, _)] = finish(start(1, 1, [alone], short_stores, *SAVING))
    assert output[output.index("--- sample ---") :] == expected[expected.index("--- sample ---") :]
    check_same(killed, alone)

    [(again, _)] = finish(start(1, 1, [alone], short_stores, *SAVING))
    assert "has already finished its 30 steps" in again and "first step" not in again
    opened = checkpoint.load(alone)  # by itself: config, model and tokenizer come from the checkpoint
    text = loop.sample(opened.config, opened.model, opened.tokenizer)
    assert f"--- sample ---\n{printable(text)}\n" in again


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

    command: of one process; its folder is `folder`.
    done: whether the work is done.
    check: compares the result with undisturbed work, which raises an AssertionError if it differs.
    processes: how many share the work.
    """

    folder: pathlib.Path
    command: list[str]
    done: Callable[[], bool]
    check: Callable[[], None]
    processes: int = 1

    def start(self, *options: str, prelude: str = "", limit: int | None = None) -> list[subprocess.Popen]:
        """Start it, or let it go on.

        Args:
            prelude: what a single process does first.
            limit: of the sizes of its files.
        """
        module, *given = *self.command, *options
        if self.processes > 1:
            return start_command(module, self.processes, 1, [given] * self.processes)

        def before():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        how = ["-m", f"diffeqformer.{module}"]
        if prelude:
            how = ["-c", f"{prelude}\nimport runpy\nrunpy.run_module('{how[1]}', run_name='__main__', alter_sys=True)"]
        return [
            subprocess.Popen(
                [sys.executable, *how, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                env={**os.environ, "XLA_FLAGS": for_a_process(1)}, preexec_fn=before,
            )
        ]  # fmt: skip


def end(campaign: Campaign, life: Life, running: list[subprocess.Popen], statuses: tuple[int, ...]) -> list[str]:
    """Wait for processes to end, and check what they say: nothing, or one sentence."""
    outputs = []
    for process in running:
        try:
            output, errors = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            campaign.fail("hangs", f"{life.folder.name}: {output[-500:]} {errors[-500:]}")
            continue
        outputs.append(output)
        alone = life.processes == 1  # JAX reports the loss of another process at length
        if alone and (process.returncode not in statuses or errors.count("\n") > 1 or "Traceback" in errors):
            campaign.fail("not one sentence", f"{life.folder.name}: status {process.returncode}: {errors[-2000:]}")
    return outputs


def wait_for_a_moment(campaign: Campaign, running: subprocess.Popen) -> None:
    """Wait until a moment in imports, in compilation, or in training, which is full of saves and evaluations."""
    when = campaign.at.choice(["imports", "compilation", "training"])
    if when != "training":
        time.sleep(campaign.at.uniform(0.05, 3) if when == "imports" else campaign.at.uniform(3, 12))
        return
    for line in running.stdout:
        if "first step" in line or "documents" in line:
            break
    time.sleep(campaign.at.uniform(0, 3))


def signalled(which: signal.Signals, campaign: Campaign, life: Life) -> None:
    """A signal at a random moment, to one process. Several processes end if one is killed."""
    running = life.start()
    chosen = campaign.at.choice(running)
    wait_for_a_moment(campaign, running[0])
    chosen.send_signal(which)
    end(campaign, life, running, (-which, 128 + which, 0))


def paused(campaign: Campaign, life: Life) -> None:
    """A machine or disk that stands still again and again, and then a kill."""
    running = life.start()
    for _ in range(5):
        time.sleep(campaign.at.uniform(0.5, 3))
        for process in running:
            process.send_signal(signal.SIGSTOP)
        time.sleep(campaign.at.uniform(0.1, 2))
        for process in running:
            process.send_signal(signal.SIGCONT)
    for process in running:
        process.kill()
    end(campaign, life, running, (-signal.SIGKILL, 0))


def full_disk(campaign: Campaign, life: Life) -> None:
    """Files that can't grow beyond a random size."""
    size = int(2 ** campaign.at.uniform(10, 21))
    end(campaign, life, life.start(limit=size), (1, 0))


def clock(campaign: Campaign, life: Life) -> None:
    """A clock that goes wrong by up to two hours, and then a kill."""
    shift = campaign.at.uniform(-7200, 7200)
    prelude = f"import time; real = time.time; time.time = lambda: real() + {shift}\n"
    [running] = life.start(prelude=prelude)
    wait_for_a_moment(campaign, running)
    running.kill()
    end(campaign, life, [running], (-signal.SIGKILL, 0))


def damaged(campaign: Campaign, file: pathlib.Path) -> bytes:
    """Flip a bit of a file, or cut it; returns what it was."""
    whole = file.read_bytes()
    place = campaign.at.randrange(len(whole))
    changed = bytearray(whole)
    changed[place] ^= 1 << campaign.at.randrange(8)
    file.write_bytes(whole[:place] if campaign.at.random() < 0.2 else changed)
    return whole


def damaged_checkpoint(campaign: Campaign, life: Life) -> bool | None:
    """Damage in the newest checkpoint, after which an older one is taken; or the whole one, if it is the only one."""
    step = newest(life.folder)
    if not step:
        return False
    files = [path for path in (life.folder / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    file = campaign.at.choices(files, [path.stat().st_size for path in files])[0]
    whole = damaged(campaign, file)
    only = len([path for path in (life.folder / "checkpoints").iterdir() if path.name.isdecimal()]) == 1
    [running] = life.start("--config.on_damage=older")
    end(campaign, life, [running], (0, 1) if only else (0,))
    if only and running.returncode == 1:
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


def filled_disk(campaign: Campaign, life: Life) -> bool | None:
    """A disk on which some kilobytes are free."""
    disk = life.folder.parent
    if not os.path.ismount(disk):
        return False
    free = shutil.disk_usage(disk).free - int(2 ** campaign.at.uniform(8, 21))
    (disk / "filler").write_bytes(bytes(max(0, free)))
    end(campaign, life, life.start(), (1, 0))
    (disk / "filler").unlink()


def read_only_disk(campaign: Campaign, life: Life) -> bool | None:
    """A disk that can't be written."""
    disk = life.folder.parent
    if not os.path.ismount(disk):
        return False
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    end(campaign, life, life.start(), (1,))
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


SIGNALS = {which.name: functools.partial(signalled, which) for which in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)}
OF_DISKS = {"full disk": filled_disk, "limit on file sizes": full_disk, "read-only disk": read_only_disk}
OF_RUNS = {
    **SIGNALS, **OF_DISKS, "pauses": paused, "wrong clock": clock, "damaged checkpoint": damaged_checkpoint,
    "damaged store": damaged_store,
}  # fmt: skip


def lives(campaign: Campaign, disk: pathlib.Path) -> Iterator[tuple[Life, dict[str, Callable]]]:
    """One life after another, with the faults that it can meet. Undisturbed work is done once, when it is needed."""
    home, text = campaign.folder, campaign.folder / "text.txt"
    text.write_text("Depth is time. " * 400_000)
    options = ["main", *TINY, f"--config.data.dir={campaign.stores}", *SAVING]
    tuning = [*options, f"--config.base={home / 'alone'}", "--config.model.num_steps=3"]
    files = [f"--config.data.{split}_files={text}" for split in ("train", "validation")]
    preparing = ["prepare", "--config=tiny", "--config.data.task=mine", *files]

    def undisturbed(command: list[str], folder: pathlib.Path, processes: int = 1) -> pathlib.Path:
        if not folder.exists():
            finish(Life(folder, [*command, str(folder)], bool, bool, processes).start())
        return folder

    def run(name: str, given: list[str], alone: str, processes: int = 1) -> Life:
        folder, command = disk / name, [*given, "--workdir"]

        def check():
            check_same(folder, undisturbed(command, home / alone, processes))

        return Life(folder, [*command, str(folder)], lambda: newest(folder) == 30, check, processes)

    def preparation(name: str) -> Life:
        folder, command = disk / name, [*preparing, "--config.data.dir"]
        store = folder / "mine-bytes"

        def check():
            expected = read_about(undisturbed(command, home / "stored") / "mine-bytes")
            assert read_about(store)["splits"] == expected["splits"]

        return Life(folder, [*command, str(folder)], store.exists, check)

    undisturbed([*options, "--workdir"], home / "alone")  # the base of others
    of_many = {"SIGKILL": SIGNALS["SIGKILL"], "SIGTERM": SIGNALS["SIGTERM"], "pauses": paused}
    of_texts = SIGNALS | OF_DISKS | {"pauses": paused}
    for number in itertools.count(1):
        yield run(f"run-{number}", options, "alone"), OF_RUNS
        yield preparation(f"store-{number}"), of_texts
        yield run(f"tuned-{number}", tuning, "tuned"), OF_RUNS
        count = 4 if number % 4 == 0 else 2
        yield run(f"run-of-{count}-{number}", options, f"alone-{count}", count), of_many


def live(campaign: Campaign, life: Life, faults: dict[str, Callable], deadline: float) -> None:
    """Inject faults, let the work be done, and check the result."""
    for _ in range(campaign.at.randint(2, 5)):
        name = campaign.at.choice(list(faults))
        if life.done() or time.monotonic() > deadline:
            break
        if faults[name](campaign, life) is False:  # it can't be had here, or now
            continue
        campaign.injected[name] += 1
        print(f"{life.folder.name}: {name}, now at {newest(life.folder)}", file=sys.__stderr__, flush=True)
    running = life.start()
    end(campaign, life, running, (0,))
    try:
        assert all(process.returncode == 0 for process in running) and life.done()
    except AssertionError:
        campaign.fail("unusable folders", str(life.folder))
        return
    try:
        life.check()
    except AssertionError as error:
        campaign.fail("silent changes", f"{life.folder}: {error}")
        return
    shutil.rmtree(life.folder)


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_happens_nothing_is_lost_or_changed(tmp_path, short_stores, capsys):
    minutes, seed = float(os.environ.get("MINUTES") or 60), int(os.environ.get("SEED") or time.time())
    shutil.copytree(short_stores, tmp_path / "stores")
    campaign = Campaign(random.Random(seed), tmp_path, tmp_path / "stores")
    with small_disk(tmp_path / "disk") as is_one, capsys.disabled():
        print(f"seed {seed}, {minutes:g} minutes, {'' if is_one else 'without '}a disk of its own", flush=True)
        deadline = time.monotonic() + 60 * minutes
        for life, faults in lives(campaign, tmp_path / "disk"):
            live(campaign, life, faults, deadline)
            if time.monotonic() > deadline:
                break
        each = ", ".join(f"{name} {count}" for name, count in sorted(campaign.injected.items()))
        print(f"faults injected: {campaign.injected.total()} ({each})")
        for what in ("silent changes", "unusable folders", "hangs", "not one sentence"):
            print(f"{what}: {campaign.failed[what]}")
    assert campaign.injected.total() >= 5 and not campaign.failed.total(), re.sub("Counter", "", str(campaign.failed))
