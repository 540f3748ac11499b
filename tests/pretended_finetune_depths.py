"""`experiments/finetune_depths.py` with runs that only pretend to train."""

import math
import re
import sys

from diffeqformer.config import check_overrides

sys.path.insert(0, "experiments")
import finetune_depths  # noqa: E402
import published  # noqa: E402

NAME = re.compile(r"\w+-\w+-(\d)-rate-([\d.]+)(?:-(full|lora)-(\d)-rate-([\d.]+))?")
BEST = {None: 4e-3, "full": 2e-3, "lora": 8e-3}


def train(workdir, options, cores):
    check_overrides(options)  # as `main` does
    workdir.mkdir(parents=True)  # fails for a second run in this folder
    sys.stdout.write(" ".join(["trained", workdir.name, *options]) + "\n")  # in one piece: rows side by side


def perplexities(workdir):
    """The best at 200 steps, worse with another depth than 8 or another rate than `BEST`; the seed is added."""
    seed, pretraining, mode, depth, rate = NAME.fullmatch(workdir.name).groups()
    worse = abs(math.log2(float(rate or pretraining) / BEST[mode])) + abs(int(depth or 8) - 8)
    return {step: abs(step - 200) / 100 + worse + 3 + int(seed) for step in range(0, 401, 100)}


def draw_published(axis, outputs):
    print("published", axis.get_subplotspec().rowspan.start, *outputs)
    published.draw_published(axis, outputs)


finetune_depths.train, finetune_depths.perplexities = train, perplexities
finetune_depths.draw_published = draw_published
finetune_depths.app.run(finetune_depths.main)
