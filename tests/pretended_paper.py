"""`experiments/paper.py` with commands that only write one file into their new folders, and may fail then."""

import json
import os
import pathlib
import sys
import types

sys.path.insert(0, "experiments")
import paper  # noqa: E402


def run(command):
    options = dict(option.split("=", 1) for option in command if "=" in option)
    sys.stdout.write(" ".join(["ran", *command[2:]]) + "\n")
    if folder := options.get("--output"):
        pathlib.Path(folder).mkdir(parents=True)  # as commands do, fails if it is there
        (pathlib.Path(folder) / "results.json").write_text(json.dumps({"rows": [{"paper_perplexity": 20}]}))
    return types.SimpleNamespace(returncode=int(bool(folder) and "FAILS" in os.environ))


paper.subprocess = types.SimpleNamespace(run=run)
paper.app.run(paper.main)
