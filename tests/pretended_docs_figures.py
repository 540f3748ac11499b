"""`experiments/docs_figures.py` with trainings and commands that only say what they were, and leave their files."""

import base64
import pathlib
import sys
import types

sys.path.insert(0, "experiments")
import docs_figures  # noqa: E402

folder = pathlib.Path(sys.argv.pop())


def train(workdir, options):
    sys.stdout.write(f"trained {workdir} {' '.join(options)}\n")


def run(command):
    sys.stdout.write(f"ran {' '.join(command[1:])}\n")
    options = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    if "-m" in command:
        output = pathlib.Path(options["--output"])
        output.mkdir()
        images = [base64.b64encode(f"{alt} {n}".encode()).decode() for n in range(3) for alt in ("QK", "particles")]
        alts = ("spectrum of QK", "simulated particles") * 3
        text = "".join(f'<img alt="{alt}" src="data:image/png;base64,{image}">' for alt, image in zip(alts, images))
        for name, content in (("report.html", text), ("ode.png", "ode"), ("perplexity.png", "perplexity")):
            (output / name).write_text(content)
    return types.SimpleNamespace(returncode=0)


docs_figures.PICTURES = folder
docs_figures.train = train
docs_figures.OF_STUDIES = {
    name: study._replace(file=str(folder.with_name("of_a_study"))) for name, study in docs_figures.OF_STUDIES.items()
}
docs_figures.shutil = types.SimpleNamespace(copy=lambda source, to: to.write_text(pathlib.Path(source).read_text()))
docs_figures.subprocess = types.SimpleNamespace(run=run)
docs_figures.app.run(docs_figures.main)
