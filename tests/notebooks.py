"""The notebook, with other values in its forms, and its execution."""

import os

import nbformat
from nbclient import NotebookClient

from helpers import ROOT

TRAIN, FOLDER = 'FROM = "train one for a minute"', 'CHECKPOINT = "runs/tiny"'


def opened_notebook(**changes: str) -> nbformat.NotebookNode:
    """The notebook, with the texts of some code replaced."""
    notebook = nbformat.read(ROOT / "colab" / "inspect_checkpoint.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in changes.items():
            cell.source = cell.source.replace(old, new)
    return notebook


def executed(notebook: nbformat.NotebookNode, folder: os.PathLike) -> list[str]:
    """What each cell shows when all are run in a folder, from top to bottom."""
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [str(cell.get("outputs")) for cell in notebook.cells]
