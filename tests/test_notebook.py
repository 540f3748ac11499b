"""The notebook runs from top to bottom in its own kernel, on a tiny checkpoint."""

import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from diffeqformer.console.progress import Progress
from flags import FAST_COMPILATION
from helpers import ROOT


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(run, tmp_path, monkeypatch):
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    progress = Progress(tmp_path, 0, steps=12, tokens_per_step=8)
    for step, value in ((6, 9.5), (12, 8.25)):
        progress.validation(step, {"loss": 2.0, "perplexity": value, "bits_per_byte": 3.0})
    progress.close()
    notebook = nbformat.read(ROOT / "colab" / "inspect_checkpoint.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    monkeypatch.setenv("WORKDIR", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILATION)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells]
    printed = "".join(shown)
    assert "toy: diffeqformer" in printed and "8.25" in printed
    assert printed.count("data:image/png;base64,") == 1 + 3 + 1 + 1  # history, spectra, sensitivity, perplexity
    assert "Lyapunov sensitivity" in printed and "{3: " in shown[-1] and ", 12: " in shown[-1]
