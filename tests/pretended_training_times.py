"""`experiments/training_times.py` with runs that only pretend to train and to be examined."""

import json
import pathlib
import sys
import types

from diffeqformer.config import check_overrides

sys.path.insert(0, "experiments")
import training_times  # noqa: E402


def train(workdir, options, cores):
    check_overrides(options)  # as `main` does
    workdir.mkdir(parents=True)  # fails for a second run in this folder
    sys.stdout.write(" ".join(["trained", *options]) + "\n")  # in one piece: runs go side by side


def examine(command, **_):
    output = pathlib.Path(command[-1].removeprefix("--output="))
    seed = int(output.parent.name[-1])
    report = {
        "smoothness": {"qkv": {"ratio": 0.5 * seed}, "mlp_up": {"ratio": 0.25}},
        "perplexities": {"as trained: 4 steps": 3 + seed, "8 steps": 20 * seed},
        "convergence": {
            "num_steps": [4, 8],
            "errors": {"euler": [seed, 1]},
            "orders": {"euler": None if seed == 2 else 1, "rk4": 3},
        },
    }
    output.mkdir()
    (output / "results.json").write_text(json.dumps(report))
    return types.SimpleNamespace(returncode=0)


CURVES = {
    "training/loss": {100: 9},
    "validation/bits_per_byte": {1000: 3, 5000: 2},
    "validation/bits_per_byte_at_2": {5000: 2.5},
}
training_times.train, training_times.read_curves = train, lambda _: CURVES
training_times.subprocess = types.SimpleNamespace(run=examine, DEVNULL=None, PIPE=None)
training_times.app.run(training_times.main)
