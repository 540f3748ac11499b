"""Where the curves of a run go (`config.tracker`): TensorBoard's files, Weights & Biases, Trackio.

Every tracker has the same methods:

    config(fields)                  the config's fields, by name
    scalars(step, group, values)    a point of each curve `<group>/<name>`
    text(step, name, text)          Markdown
    picture(step, name, pixels)     uint8 [height, width, 3]
    flush()                         before a checkpoint, so that the run's own files don't lag behind it
    finish()
"""

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import queue
import secrets
import sys
import threading

import numpy as np
from etils import epath

from diffeqformer.console.results import write_whole
from diffeqformer.errors import UserError, reason_of

FINISH_SECONDS = 30  # maximum wait for a service at the end of a run
PROJECT = "diffeqformer"


class Wandb:
    """A run of Weights & Biases. Its files, with links, are in ./wandb or WANDB_DIR: a work folder may hold no link.

    It drops what belongs to an earlier row than the last, so the curves are over a scalar of their own, `step`.
    """

    def __init__(self, workdir: epath.Path, run_id: str) -> None:
        import wandb

        self.shown = {"text": str, "picture": wandb.Image}
        # Its console would wrap standard output, so that its errors would be those of `print`.
        settings = wandb.Settings(console="off", finish_timeout=FINISH_SECONDS - 10)
        same = {"id": run_id, "resume": "allow", "reinit": "create_new"}
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = wandb.init(project=project, name=workdir.name, settings=settings, **same)
        self.run.define_metric("*", step_metric="step")
        self.config = functools.partial(self.run.config.update, allow_val_change=True)

    def log(self, step: int, values: dict) -> None:
        row = max(step, self.run.step)  # a validation left over at the step of the last row gets the next one
        self.run.log({"step": step, **values}, step=row, commit=row > step)


class Trackio:
    """A run of Trackio. Its files are in the user's cache or TRACKIO_DIR. It appends whatever it is given."""

    def __init__(self, workdir: epath.Path, run_id: str) -> None:
        import trackio

        self.shown = {"text": trackio.Markdown, "picture": trackio.Image}
        self.run = trackio.init(PROJECT, name=f"{workdir.name}-{run_id}", resume="allow", embed=False)
        self.config = self.run.config.update

    def log(self, step: int, values: dict) -> None:
        self.run.log(values, step)


SERVICES = {"wandb": Wandb, "trackio": Trackio}


class InThread:
    """A service in a thread of its own, so that it can't delay training; its first error ends the tracker.

    `<workdir>/trackers/<name>.json` has the id of its run and the last step of each group of curves, text or picture.
    A resumed training goes on with that run, and what it repeats is left out.

    Args:
        resumes: whether there is a checkpoint; if not, the tracked run is a new one.
    """

    def __init__(self, name: str, workdir: epath.PathLike, resumes: bool) -> None:
        self.name, self.workdir, self.resumes, self.failed = name, epath.Path(workdir), resumes, False
        self.file, self.calls = self.workdir / "trackers" / f"{name}.json", queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def config(self, fields: dict) -> None:
        self._send("config", None, "", fields)

    def scalars(self, step: int, group: str, values: dict[str, float]) -> None:
        self._send("scalars", step, group, values)

    def text(self, step: int, name: str, text: str) -> None:
        self._send("text", step, name, text)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._send("picture", step, name, pixels)

    def flush(self) -> None:
        """Do nothing: a checkpoint doesn't wait for a service."""

    def finish(self) -> None:
        self._send("finish", None, "", None)
        self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive():
            self._say(f"it didn't finish within {FINISH_SECONDS} s")

    def _send(self, *call) -> None:
        if self.thread.is_alive():
            self.calls.put(call)

    def _run(self) -> None:
        try:
            self.record = {"id": secrets.token_hex(4), "last": {}}
            if self.resumes and self.file.exists():
                self.record = json.loads(self.file.read_text())
            self._save()
            service, what = SERVICES[self.name](self.workdir, self.record["id"]), ""
            while what != "finish":
                what, step, name, value = self.calls.get()
                if what == "config":
                    service.config(value)
                elif what != "finish" and step > self.record["last"].get(name, -1):
                    self.record["last"][name] = step  # not sent again, even if this process is killed
                    self._save()
                    curves = what == "scalars"
                    shown = {f"{name}/{key}": each for key, each in value.items()} if curves else None
                    service.log(step, shown or {name: service.shown[what](value)})
            service.run.finish()
        except Exception as error:
            self._say(reason_of(error))

    def _save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record)
        if "://" in str(self.file):
            self.file.write_text(text)  # which is atomic there
        else:
            write_whole(pathlib.Path(self.file), text)

    def _say(self, what: str) -> None:
        said, self.failed = self.failed, True
        if said:
            return  # of a service that was given up
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the output is full, or closed
            print(f"{self.name}: {what}; the run continues without it", file=sys.stderr, flush=True)


def check_installed(names: str) -> None:
    """Check that there are the packages of a config's trackers."""
    for name in set(names.split(",")) & set(SERVICES):
        found = importlib.util.find_spec(name)
        if not (found and found.origin):  # a folder of that name, such as wandb's own, would be found without one
            raise UserError(f"config.tracker: {name} isn't installed; pip install 'diffeqformer[{name}]' installs it")
