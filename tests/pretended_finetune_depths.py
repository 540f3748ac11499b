"""`experiments/finetune_depths.py` with runs that only pretend to train."""

import sys

from diffeqformer.config import check_overrides

sys.path.insert(0, "experiments")
import finetune_depths  # noqa: E402


def train(workdir, options, cores):
    check_overrides(options)  # as `main` does
    workdir.mkdir(parents=True)  # fails for a second run in this folder
    sys.stdout.write(" ".join(["trained", *options]) + "\n")  # in one piece: bases run side by side


def perplexities(workdir):
    """The best at 400 steps, worse with another depth than 8; the seed is added."""
    *_, seed = workdir.name.partition("-to-")[0].split("-")
    depth = int(workdir.name.rpartition("-")[2]) if "-to-" in workdir.name else 8
    return {step: abs(step - 400) / 100 + abs(depth - 8) + 3 + int(seed) for step in range(0, 801, 100)}


finetune_depths.train, finetune_depths.perplexities = train, perplexities
finetune_depths.app.run(finetune_depths.main)
