"""`experiments/elastic.py` with runs that only pretend to train and to be scored."""

import json
import pathlib
import sys
import types

sys.path.insert(0, "experiments")
import elastic  # noqa: E402


def train(workdir, options, cores):
    workdir.mkdir(parents=True)  # fails for a second run in this folder
    (workdir / "scores").mkdir()  # of an interrupted scoring
    (workdir / "scores" / "results.json").write_text("{}")
    print(" ".join(["trained", *options]))


BEST = {"specialist": 1.5e-3, "gpt": 3e-3, "drawn": 3e-3, "drawn-step_features": 6e-3}


def score(command, **_):
    """Better with depth and with training steps. Each kind has its best rate; outside of training it is another."""
    options = dict(option.split("=", 1) for option in command if "=" in option)
    name = pathlib.Path(options["--workdir"]).name
    kind = name.partition("_at_")[0] if "_at_" in name else name.partition("-5000")[0].partition("-28261")[0]
    rate = float(name.partition("rate_")[2].partition("-seed")[0])
    rows = []
    for depth in map(int, options["--num_steps"].split(",")):
        best = 1.5e-3 if kind.startswith("drawn") and depth not in elastic.TRAINED else BEST[kind]
        rows.append(
            {"num_steps": depth, "bits_per_byte": 2 + 1 / depth + 10 * abs(rate - best) * (1 + 9 * (best == 1.5e-3))}
        )
    folder = pathlib.Path(options["--output"])
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"rows": rows}))
    return types.SimpleNamespace(returncode=0)


elastic.train = train
elastic.subprocess = types.SimpleNamespace(run=score, DEVNULL=None, PIPE=None)
elastic.app.run(elastic.main)
