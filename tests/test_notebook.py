"""The notebook runs from top to bottom in an environment that has what a fresh Colab runtime has."""

import json
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from environments import LIGHT, build_wheel, make_environment
from flags import FAST_COMPILATION
from helpers import ROOT
from hub import Hub

HUB, FOLDER = 'FROM = "hub"', 'CHECKPOINT = "runs/tiny"'


def opened_notebook(**changes: str) -> nbformat.NotebookNode:
    """The notebook, with the texts of some code replaced."""
    notebook = nbformat.read(ROOT / "colab" / "inspect_checkpoint.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in changes.items():
            cell.source = cell.source.replace(old, new)
    return notebook


COLAB = {  # what the notebook asks of Colab
    "__init__.py": "",
    "output.py": "",  # JAX imports this
    "files.py": """
import glob, os, shutil

def upload():
    [path] = glob.glob("../computer/*")
    shutil.move(path, ".")
    return {os.path.basename(path): b""}
""",
    "drive.py": "def mount(path):\n    print('mounted', path)\n",
    "auth.py": "def authenticate_user():\n    print('signed in')\n",
}


@pytest.mark.slow
def test_the_notebook_starts_in_a_fresh_runtime(tmp_path, monkeypatch):
    """As in Colab: an uploaded wheel is installed; a model is trained when there is none, or comes from elsewhere."""
    folder, computer, kernels = tmp_path / "content", tmp_path / "computer", tmp_path / "kernels" / "fresh"
    colab, gcsfs = tmp_path / "stubs" / "google" / "colab", tmp_path / "stubs" / "gcsfs.py"
    for made in (folder, computer, kernels, colab, tmp_path / "wheel"):
        made.mkdir(parents=True)
    shutil.move(build_wheel(tmp_path / "wheel"), computer)
    for name in ("text.txt", "other.txt"):
        (folder / name).write_text("def main():\n    return 1\n" * 40)
    for name, content in COLAB.items():
        (colab / name).write_text(content)
    gcsfs.touch()
    hub = Hub()
    python = make_environment(tmp_path / "runtime", [*LIGHT, "ipykernel", "pip"], None)
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "fresh"}
    kernel["env"] = {
        "PYTHONPATH": str(tmp_path / "stubs"),
        "PIP_NO_INDEX": "1",
        "XLA_FLAGS": FAST_COMPILATION,
        "JAX_PLATFORMS": "cpu",
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "hub"),
        "NO_PROXY": "127.0.0.1",
    }
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    where = {"timeout": 600, "kernel_name": "fresh", "resources": {"metadata": {"path": str(folder)}}}

    def printed(until="", **changes):
        notebook = opened_notebook(**changes)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("import google.colab"))
        ends = [number for number, cell in enumerate(notebook.cells) if until and until in cell.source]
        notebook.cells = notebook.cells[: 1 + ends[0]] if ends else notebook.cells
        NotebookClient(notebook, **where).execute()
        return "".join(str(cell.get("outputs")) for cell in notebook.cells)

    files = "--config.data.train_files=text.txt --config.data.validation_files=other.txt"
    said = printed(**{"--config.steps=1000": f"--config.steps=2 {files}"})  # as the hub has no model yet
    assert "Upload a wheel" in said and not list(computer.iterdir())
    assert "tiny: interpolated" in said and "step 2 of 2" in said and "Lyapunov sensitivity" in said
    assert said.count("data:image/png;base64,") == 1 + 4 + 1  # history, spectra, perplexity

    saved = [path for path in (folder / "runs" / "tiny" / "checkpoints").rglob("*") if path.is_file()]
    files = {f"run/{path.relative_to(folder / 'runs' / 'tiny')}": path.read_bytes() for path in saved}
    hub.repositories["us/diffeqformer-tiny"] = {"main": files}
    said = printed("inspect_run", **{"OWNER/diffeqformer-tiny": "us/diffeqformer-tiny"})
    assert "The checkpoint is in /" in said and "step 2 of 2" in said

    shutil.make_archive(computer / "mine", "zip", folder / "runs")
    (folder / "uploaded" / "earlier" / "checkpoints").mkdir(parents=True)  # of another upload
    said = printed("inspect_run", **{HUB: 'FROM = "upload a zip"'})
    assert "The checkpoint is in uploaded/tiny" in said and "step 2 of 2" in said
    said = printed("inspect_run", **{HUB: 'FROM = "Google Drive"'})
    assert "mounted /content/drive" in said and "step 2 of 2" in said
    said = printed("FROM =", **{HUB: 'FROM = "folder"', FOLDER: 'CHECKPOINT = "gs://bucket/runs/large"'})
    assert "signed in" in said and "The checkpoint is in gs://bucket/runs/large" in said
