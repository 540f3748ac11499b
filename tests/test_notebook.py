"""The notebook runs from top to bottom in a kernel of its own, on a tiny checkpoint."""

import nbformat
from nbclient import NotebookClient

from flags import FAST_COMPILATION
from helpers import ROOT


def test_the_notebook_runs_from_top_to_bottom(run, monkeypatch):
    notebook = nbformat.read(ROOT / "colab" / "inspect_checkpoint.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    monkeypatch.setenv("WORKDIR", str(run))
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILATION)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells]
    printed = "".join(shown)
    assert "toy: diffeqformer" in printed and "there are no curves" in printed and "as trained" not in printed
    assert printed.count("data:image/png;base64,") == 3 + 1 + 1  # spectra, sensitivity, perplexity
    assert "Lyapunov sensitivity" in printed and "{3: " in shown[-1] and ", 12: " in shown[-1]
