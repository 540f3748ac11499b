"""A wheel in an empty environment: it trains from an empty folder, and its light installation does what it says."""

import re
import subprocess
import zipfile

import pytest

from diffeqformer.__main__ import COMMANDS
from environments import LIGHT, build_wheel, environment_variables, make_environment, requirements_of, run
from hub import parquet
from newcomer import PAGES

LEFT_OUT = {"seqio", "tensorflow", "tensorflow-datasets", "tensorflow-text"}
SHORT = ["--config=tiny", "--config.steps=3", "--config.log_every=1"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The options that name a little text of our own."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(3):
        (folder / f"{number}.txt").write_text("def main():\n    return 1\n" * (30 + number))
    return [f"--config.data.train_files={folder}/[01].txt", f"--config.data.validation_files={folder}/2.txt"]


@pytest.fixture(scope="module")
def trained(wheel, texts, tmp_path_factory):
    """The Python of the whole package, the folder in which it has trained, and what it printed."""
    needs = requirements_of(wheel)
    assert {re.match(r"[\w.-]+", text)[0] for text in needs} >= LEFT_OUT
    python = make_environment(tmp_path_factory.mktemp("whole"), needs, wheel)
    folder = tmp_path_factory.mktemp("empty")
    return python, folder, run(python, folder, "main", *SHORT, *texts).stdout


@pytest.mark.slow
def test_a_wheel_trains_from_an_empty_folder(wheel, trained):
    assert "diffeqformer/inference/task_files/logiqa.yaml" in zipfile.ZipFile(wheel).namelist()
    _, folder, said = trained
    assert "Preparing python_stdlib into token_stores/python_stdlib-bytes" in said and "tiny: interpolated, " in said
    assert sorted(path.name for path in folder.iterdir()) == ["runs", "token_stores"]
    assert (folder / "runs" / "tiny" / "checkpoints" / "3").is_dir()


@pytest.mark.slow
def test_the_light_installation_does_what_it_says(trained, wheel, texts, tmp_path_factory, monkeypatch):
    python = make_environment(tmp_path_factory.mktemp("light"), LIGHT, wheel)
    where = [python, "-c", "import diffeqformer; print(diffeqformer.__file__); import tensorflow"]
    done = subprocess.run(where, cwd="/", env=environment_variables(), capture_output=True, text=True)
    assert done.stdout.startswith(str(python.parent.parent)) and "No module named 'tensorflow'" in done.stderr
    _, folder, said = trained
    lines = run(python, folder).stdout.splitlines()
    assert lines[0].startswith("main ") and len(lines) == len(COMMANDS) + 2

    workdir = "--workdir=runs/tiny"
    assert run(python, folder, "inspect", workdir).stdout.startswith("tiny: interpolated")
    assert "def " in run(python, folder, "generate", workdir, "--prompt=def ", "--tokens=4").stdout
    assert "bits/byte" in run(python, folder, "evaluate", workdir).stdout
    run(python, folder, "analyze", workdir, "--parts=spectra", "--nofeed_forward")
    run(python, folder, "ode", workdir, "--windows=2", "--refinements=2")
    run(python, folder, "materialize", workdir)

    empty = tmp_path_factory.mktemp("light_empty")
    data = re.compile("^data: .*", re.MULTILINE)
    again = run(python, empty, "main", *SHORT, *texts).stdout
    assert data.findall(again) == data.findall(said)  # with the hash of all ids
    manual = empty / "tfds" / "downloads" / "manual" / "openwebtext"
    manual.mkdir(parents=True)
    (manual / "0.parquet").write_bytes(parquet(PAGES))
    monkeypatch.setenv("TFDS_DATA_DIR", str(empty / "tfds"))
    small = "--config.sequence_length=64", "--config.data.processes=1"
    said = run(python, empty, "prepare", "--config=tiny", "--config.data.task=openwebtext", *small).stdout
    assert f"of {len(PAGES) - 2:,} documents" in said
    for arguments, sentence in [
        (
            ["prepare", "--config=tiny", "--config.data.task=mine", "--config.data.module=mine"],
            "config.data.module: mine needs seqio, which",
        ),
        (["downstream", workdir], "lm_eval: lm-evaluation-harness isn't installed"),
        (["harness", "run"], "harness needs lm-evaluation-harness"),
        (["inspect", "--workdir=gs://bucket/run"], "--workdir: gs://bucket/run needs a package"),
    ]:
        done = run(python, folder, *arguments, status=1)
        assert done.stderr.startswith(f"diffeqformer: {sentence}") and done.stderr.count("\n") == 1, done.stderr
