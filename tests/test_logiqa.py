"""LogiQA's own task file, against lm-eval's."""

import json
import pathlib

import lm_eval
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from diffeqformer.inference import tasks


def test_logiqa_from_a_local_file_asks_what_lm_eval_asks(tmp_path, monkeypatch):
    """Rows of our own, in the columns of the original release."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    theirs = load_yaml(pathlib.Path(lm_eval.__file__).parent / "tasks/logiqa/logiqa.yaml")
    ours = load_yaml(tasks.OURS / "logiqa.yaml")
    data, prompt = {"dataset_path", "dataset_name", "dataset_kwargs"}, {"doc_to_text", "doc_to_target"}
    assert theirs.keys() - ours.keys() == {"dataset_name", "training_split", "validation_split"}
    assert all(ours[name] == theirs[name] for name in (ours.keys() & theirs.keys()) - data - prompt)

    rows = [
        {"label": "a", "context": "All cats purr {{x}}", "question": "Tom?", "options": ["“Yes”", "it's", "no", "D"]},
        {"label": " d\n", "context": " Two\nlines ", "question": "\\n <b>?", "options": ['"1"', "2\n", " 3", "é & ü"]},
        {"label": "c", "context": "", "question": "Which?", "options": ["A one", "B two", "C three", "D", "fifth"]},
    ]  # fmt: skip
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("test", "train")}
    for path in files.values():
        pathlib.Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "logiqa.yaml").write_text(
        f"include: {tasks.OURS}/logiqa.yaml\nfewshot_split: train\ndataset_kwargs: {json.dumps({'data_files': files})}"
    )
    task = tasks.load_tasks([], str(tmp_path), [0, 3], 64).rows["logiqa"]["tasks"]["logiqa"]
    assert list(task.test_docs()) == list(task.fewshot_docs()) == rows
    for row in rows:
        number = theirs["doc_to_target"](row)
        assert task.doc_to_text(row) == theirs["doc_to_text"](row) and task.doc_to_choice(row) == row["options"]
        assert task.doc_to_target(row) == task.doc_to_target({**row, "label": number}) == number
    for label in ("e", "", 4, -1):
        with pytest.raises(ValueError, match="not in list"):
            task.doc_to_target({**rows[0], "label": label})
