"""Small models to start from, as folders for the Hugging Face hub: `make models`, about an hour on two cores.

    python experiments/models.py                   # into models/
    diffeqformer push --from=models/tiny --to=hf://OWNER/diffeqformer-tiny

A folder is what `export` writes, at the depth of training, for Transformers. Its `run` is the run itself, which every
command of diffeqformer opens, at any depth. Finished models aren't made again.
"""

import pathlib
import shutil
import subprocess
import sys

from absl import app, flags
from common import train

from diffeqformer.checkpoints import checkpoint

CONFIGS = {"tiny": "tiny.py", "tiny-elastic": "tiny.py:elastic", "tiny-llama": "tiny.py:llama"}
"""The config of each model."""

FOLDER = flags.DEFINE_string("folder", "models", "Folder of the models.")
RUNS = flags.DEFINE_string("runs", "runs/models", "Folder of the runs that they are made from.")
ONLY = flags.DEFINE_list("only", list(CONFIGS), "Names of the models to make.")
STEPS = flags.DEFINE_integer("steps", None, "Steps of each run; by default the config's.", lower_bound=1)
flags.register_validator("only", CONFIGS.keys().__ge__, f"must be of {', '.join(CONFIGS)}")


def make(name: str) -> None:
    """Train a model, and write its folder."""
    folder, workdir = pathlib.Path(FOLDER.value, name), pathlib.Path(RUNS.value, name)
    if (folder / "run").exists():
        print(f"{folder} is there")
        return
    steps = [f"--config.steps={STEPS.value}"] if STEPS.value else []
    train(workdir, [f"--config=configs/{CONFIGS[name]}", *steps])
    shutil.rmtree(folder, ignore_errors=True)  # without its run, as after an interruption
    folder.parent.mkdir(parents=True, exist_ok=True)
    export = [sys.executable, "-m", "diffeqformer.export", f"--workdir={workdir}", f"--to={folder}"]
    if status := subprocess.run(export).returncode:
        sys.exit(f"{folder}: diffeqformer.export ended with status {status}; see above")
    step, partial = checkpoint.open_to_read(workdir).step, folder / "run.partial"
    shutil.copytree(workdir / "checkpoints" / str(step), partial / "checkpoints" / str(step))
    partial.rename(folder / "run")


def main(_) -> None:
    for name in ONLY.value:
        make(name)


if __name__ == "__main__":
    app.run(main)
