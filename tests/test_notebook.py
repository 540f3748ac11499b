"""The notebook runs from top to bottom: in this environment, and in one that has what a fresh Colab runtime has."""

import importlib.metadata
import json
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from diffeqformer.console.progress import Progress
from environments import LIGHT, build_wheel, make_environment
from flags import FAST_COMPILATION
from helpers import ROOT

TRAIN, FOLDER = 'FROM = "train one for a minute"', 'CHECKPOINT = "runs/tiny"'


def opened_notebook(**changes: str):
    """The notebook, with the texts of some code replaced."""
    notebook = nbformat.read(ROOT / "colab" / "inspect_checkpoint.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in changes.items():
            cell.source = cell.source.replace(old, new)
    return notebook


def test_forms_show_values_and_hide_code():
    cells = opened_notebook().cells
    assert "colab-badge.svg" in cells[0].source
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        assert cell.source.startswith("# @title ") and cell.metadata["cellView"] == "form" and not cell.outputs


@pytest.mark.parametrize("source", ["https://host/user/repository", "some/diffeqformer-1-any.whl"])
def test_a_wheel_or_a_repository_is_installed(source, monkeypatch):
    ran, [cell] = [], [cell for cell in opened_notebook().cells if "REPOSITORY =" in cell.source]
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["jax", "tensorflow", "pytest; extra == 'dev'"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: getattr(sys.modules.get(name), "__version__", "1"))
    exec(cell.source.replace('SOURCE = ""', f'SOURCE = "{source}"'), {})
    git = "git+" if source.startswith("https") else ""
    assert [command[5:] for command in ran] == [["--no-deps", git + source], ["jax"]]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(run, tmp_path, monkeypatch):
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    progress = Progress(tmp_path, 0, steps=12, tokens_per_step=8)
    for step, value in ((6, 9.5), (12, 8.25)):
        progress.validation(step, {"loss": 2.0, "perplexity": value, "bits_per_byte": 3.0})
    progress.close()
    changes = {TRAIN: 'FROM = "folder"', FOLDER: f'CHECKPOINT = "{tmp_path}"', 'STEP = ""': 'STEP = "12"'}
    notebook = opened_notebook(**changes)
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILATION)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells]
    printed = "".join(shown)
    assert "toy: diffeqformer" in printed and "8.25" in printed
    assert printed.count("data:image/png;base64,") == 1 + 3 + 1 + 1  # history, spectra, sensitivity, perplexity
    assert "Lyapunov sensitivity" in printed and "{3: " in shown[-1] and ", 12: " in shown[-1]


@pytest.mark.slow
def test_the_notebook_starts_in_a_fresh_runtime(tmp_path, monkeypatch):
    """With a wheel beside it, which it installs; it trains a model when there is none, and opens an uploaded zip."""
    folder, kernels = tmp_path / "content", tmp_path / "kernels" / "fresh"
    folder.mkdir(), kernels.mkdir(parents=True), (tmp_path / "wheel").mkdir()
    shutil.move(build_wheel(tmp_path / "wheel"), folder)
    for name in ("text.txt", "other.txt"):
        (folder / name).write_text("def main():\n    return 1\n" * 40)
    python = make_environment(tmp_path / "runtime", [*LIGHT, "ipykernel", "pip"], None)
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "fresh"}
    colab = tmp_path / "colab" / "google" / "colab"  # what the notebook asks of Colab
    colab.mkdir(parents=True)
    (colab / "__init__.py").touch(), (colab / "output.py").touch()  # JAX imports this
    (colab / "files.py").write_text('def upload():\n    return {"mine.zip": b""}\n')
    kernel["env"] = {
        "PYTHONPATH": str(tmp_path / "colab"),
        "PIP_NO_INDEX": "1",
        "XLA_FLAGS": FAST_COMPILATION,
        "JAX_PLATFORMS": "cpu",
    }
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    where = {"timeout": 600, "kernel_name": "fresh", "resources": {"metadata": {"path": str(folder)}}}

    files = "--config.data.train_files=text.txt --config.data.validation_files=other.txt"
    notebook = opened_notebook(**{"--config.steps=1000": f"--config.steps=2 {files}"})
    NotebookClient(notebook, **where).execute()
    printed = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert "tiny: diffeqformer" in printed and "step 2 of 2" in printed and "Lyapunov sensitivity" in printed
    find = "import importlib.util; print(importlib.util.find_spec('tensorflow'))"
    assert subprocess.run([python, "-c", find], capture_output=True, text=True).stdout == "None\n"

    shutil.make_archive(folder / "mine", "zip", folder / "runs")
    (folder / "uploaded" / "earlier" / "checkpoints").mkdir(parents=True)  # of another upload
    notebook = opened_notebook(**{TRAIN: 'FROM = "upload a zip"'})
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import google.colab"))
    notebook.cells = notebook.cells[: 1 + next(i for i, c in enumerate(notebook.cells) if "inspect_run" in c.source)]
    NotebookClient(notebook, **where).execute()
    printed = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert "The checkpoint is in uploaded/tiny" in printed and "step 2 of 2" in printed
