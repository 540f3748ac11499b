"""Does a model learn faster from a teacher? The recipe of tiny.py in few steps, beside a run of more steps.

    python experiments/teacher.py

The teacher is the same model, trained for longer. Each student has 1,000 steps, alone or with the teacher, or alone
some more, for a taught one's time, at the config's rate. Rows that --results holds aren't trained again.
"""

import itertools

from absl import app, flags
from common import curve, define_flags, folder_of, run_rows, table, train

from diffeqformer.console.results import spread

define_flags("teacher", at_once=2)

STEPS = {"teacher": 3000, "alone": 1000, "taught": 1000, "alone for longer": 1300}


def bits(row: str, cores: list[int] | None) -> dict:
    """Train a row, named by its kind and its seed; its bits/byte by step."""
    kind, seed = row.split(", seed ")
    options = ["--config=configs/tiny.py", f"--config.steps={STEPS[kind]}", f"--config.seed={seed}"]
    if kind == "taught":
        options += [f"--config.teacher={folder_of('teacher, seed 0')}", "--config.teacher_weight=1"]
    train(folder_of(row), [*options, "--config.eval_every=500", "--config.checkpoints_kept=1"], cores)
    return curve(folder_of(row), "validation/bits_per_byte")


def main(_) -> None:
    run_rows(["teacher, seed 0"], str, bits)
    students = itertools.product(range(flags.FLAGS.seeds), list(STEPS)[1:])
    results = run_rows([f"{kind}, seed {seed}" for seed, kind in students], str, bits)
    lines = []
    for kind, steps in STEPS.items():
        rows = [row for name, row in results.items() if name.startswith(f"{kind}, seed")]
        ends = [row[max(row, key=int)] for row in rows]
        lines.append({"": kind, "steps": f"{steps:,}", "bits/byte": spread(ends, 3)})
    print(table(lines))


if __name__ == "__main__":
    app.run(main)
