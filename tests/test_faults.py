"""A run survives what people, machines and disks do to it, bit for bit.

`make test-faults` injects faults for an hour; `make test-faults MINUTES=10` for ten minutes. Then it prints how many
there were, and how many runs were changed silently, lost an intact checkpoint, couldn't go on, hung or said more than
one sentence. The seed of the draws is printed, too; SEED=3 repeats them. The suite has two kills, each in the middle of
a save.
"""

import dataclasses
import itertools
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from faults import OF_DISKS, OF_RUNS, SIGNALS, Bucket, Campaign, Life, end, newest, paused, set_aside, small_disk

from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.store import read_about
from diffeqformer.errors import printable
from diffeqformer.training import loop
from runs import TINY, curves, finish, start

FORBIDDEN = ("silent changes", "lost checkpoints", "unusable folders", "hangs", "not one sentence", "wrong causes")
SAVING = ["--config.checkpoint_every=3", "--config.steps=30", "--config.eval_every=10"]


def last_checksums(workdir: pathlib.Path) -> dict[str, str]:
    """Those of parameters and optimizer state after the last step, which are what is stored."""
    opened = checkpoint.load(workdir)
    assert opened.step == 30 and checkpoint.damage_of(checkpoint.folder_of(workdir), 30) is None
    return opened.about.checksums


def check_same(ours: pathlib.Path, undisturbed: pathlib.Path) -> None:
    """Curves, parameters and Adam moments of two finished runs are equal."""
    found, expected = curves(ours), curves(undisturbed)
    assert set(expected["train/loss"]) == set(range(1, 31)) and {10, 20, 30} <= set(expected["validation/loss"])
    assert {tag for tag in expected if found[tag] != expected[tag]} <= {"train/tokens_per_second"}
    assert last_checksums(ours) == last_checksums(undisturbed)


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


def lives(campaign: Campaign, disk: pathlib.Path, bucket: Bucket) -> Iterator[tuple[Life, dict[str, Callable]]]:
    """One life after another, with the faults that it can meet. Undisturbed work is done once, when it is needed."""
    home = campaign.folder
    texts = {split: home / f"{split}.txt" for split in ("train", "validation")}
    for split, text in texts.items():
        text.write_text(f"Depth is time in {split}. " * 300_000)
    options = ["main", *TINY, f"--config.data.dir={campaign.stores}", *SAVING]
    tuning = [option.replace("tiny.py", "tiny.py:discretized") for option in options]
    tuning += [f"--config.base={home / 'alone'}", "--config.model.num_steps=3"]
    files = [f"--config.data.{split}_files={text}" for split, text in texts.items()]
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

    def in_bucket(name: str) -> Life:
        life, folder = run(name, options, "alone"), home / name

        def done() -> bool:
            bucket.fetch(name, folder)
            return newest(folder) == 30

        command = [*options, f"--workdir=gs://bucket/{name}"]
        return dataclasses.replace(
            life,
            folder=folder,
            command=command,
            done=done,
            environment=bucket.environment,
            check=lambda: check_same(folder, home / "alone"),
        )

    undisturbed([*options, "--workdir"], home / "alone")  # the base of others
    of_many = {name: OF_RUNS[name] for name in ("SIGKILL", "SIGTERM", "pauses", "damaged checkpoint")}
    of_texts = SIGNALS | OF_DISKS | {"pauses": paused}
    for number in itertools.count(1):
        yield run(f"run-{number}", options, "alone"), OF_RUNS
        yield preparation(f"store-{number}"), of_texts
        yield run(f"tuned-{number}", tuning, "tuned"), OF_RUNS
        yield in_bucket(f"gs-{number}"), SIGNALS | {"pauses": paused}
        count = 4 if number % 3 == 2 else 2
        yield run(f"run-of-{count}-{number}", options, f"alone-{count}", count), of_many


def live(campaign: Campaign, life: Life, faults: dict[str, Callable], deadline: float) -> None:
    """Inject faults, let the work be done, and check the result."""
    for _ in range(campaign.at.randint(2, 5)):
        name = campaign.at.choice(list(faults))
        if life.done() or time.monotonic() > deadline:
            break
        step, before = newest(life.folder), set_aside(life.folder)
        met = faults[name](campaign, life)
        hurt = step if name == "damaged checkpoint" else None
        if lost := [aside for aside in set_aside(life.folder) - before if aside.split("-")[0] != str(hurt)]:
            campaign.fail("lost checkpoints", f"{life.folder.name}: {', '.join(lost)} set aside after {name}")
        if met is False:  # it can't be had here, or the work was done before it
            continue
        campaign.injected[name] += 1
        print(f"{life.folder.name}: {name}, now at {newest(life.folder)}", file=sys.__stderr__, flush=True)
    for _ in range(5 if life.environment else 1):  # a bucket can fail too often
        running = life.start()
        end(campaign, life, running, (0,))
        if all(process.returncode == 0 for process in running):
            break
    try:
        assert all(process.returncode == 0 for process in running) and life.done()
    except AssertionError:
        campaign.fail("unusable folders", str(life.folder))
        return
    try:
        life.check()
    except Exception as error:  # a result that can't be read is another one, too
        campaign.fail("silent changes", f"{life.folder}: {error}")
        return
    shutil.rmtree(life.folder)


@pytest.mark.faults
def test_whatever_happens_nothing_is_lost_or_changed(tmp_path, short_stores, capsys):
    minutes, seed = float(os.environ.get("MINUTES") or 60), int(os.environ.get("SEED") or time.time())
    shutil.copytree(short_stores, tmp_path / "stores")
    campaign = Campaign(random.Random(seed), tmp_path, tmp_path / "stores")
    with small_disk(tmp_path / "disk") as is_one, capsys.disabled():
        print(f"seed {seed}, {minutes:g} minutes, {'' if is_one else 'without '}a disk of its own", flush=True)
        deadline = time.monotonic() + 60 * minutes
        bucket = Bucket(seed)
        for life, faults in lives(campaign, tmp_path / "disk", bucket):
            live(campaign, life, faults, deadline)
            if time.monotonic() > deadline:
                break
        campaign.injected["failed request of a bucket"] = bucket.failures()
        each = ", ".join(f"{name} {count}" for name, count in sorted(campaign.injected.items()))
        print(f"faults injected: {campaign.injected.total()} ({each})")
        for what in FORBIDDEN:
            print(f"{what}: {campaign.failed[what]}")
    assert campaign.injected.total() >= 5 and not any(campaign.failed[what] for what in FORBIDDEN), campaign.failed
