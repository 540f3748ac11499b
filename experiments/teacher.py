"""Does a model learn faster from a teacher? The recipe of tiny.py in few steps, beside a run of more steps.

    python experiments/teacher.py

The teacher is the same model, trained for longer. Each student has 1,000 steps, alone or with the teacher, or alone
some more, for a taught one's time, at the config's rate. Rows that --results holds aren't trained again.
"""

import itertools

from absl import app, flags
from common import curve, define_flags, folder_of, run_rows, table, train

from diffeqformer.console.results import spread

WEIGHTS = flags.DEFINE_list("weights", ["1"], "Values of config.teacher_weight.")
define_flags("teacher", at_once=2)

STEPS = {"teacher": 3000, "alone": 1000, "taught": 1000, "alone for longer": 1300}


def bits(row: str, cores: list[int] | None) -> dict:
    """Train a row, named by its kind, its weight of a teacher if it has one, and its seed; its bits/byte by step."""
    kind, *weight, seed = row.split(", ")
    options = ["--config=configs/tiny.py", f"--config.steps={STEPS[kind]}", f"--config.seed={seed.split()[1]}"]
    if weight:
        options += [f"--config.teacher={folder_of('teacher, seed 0')}", f"--config.teacher_weight={weight[0]}"]
    train(folder_of(row), [*options, "--config.eval_every=500", "--config.checkpoints_kept=1"], cores)
    return curve(folder_of(row), "validation/bits_per_byte")


def main(_) -> None:
    kinds = ["alone", *(f"taught, {weight}" for weight in WEIGHTS.value), "alone for longer"]
    seeds = range(flags.FLAGS.seeds)
    run_rows(["teacher, seed 0"], str, bits)
    results = run_rows([f"{kind}, seed {seed}" for seed, kind in itertools.product(seeds, kinds)], str, bits)
    lines = []
    for kind in ("teacher", *kinds):
        rows = [row for name, row in results.items() if name.startswith(f"{kind}, seed")]
        ends = [row[max(row, key=int)] for row in rows]
        lines.append({"": kind, "steps": str(STEPS[kind.split(",")[0]]), "bits/byte": spread(ends, 3)})
    print(table(lines))


if __name__ == "__main__":
    app.run(main)
