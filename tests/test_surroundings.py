"""Whatever JAX's variables, the output's encoding and the names of folders are, commands do the same."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from diffeqformer import harness
from diffeqformer.console.results import write_json
from diffeqformer.console.surroundings import at_home, set_up
from diffeqformer.transformer import split_model
from helpers import ONE_DEVICE, lively_model, logits_of, run_steps, toy_config
from runs import command


def test_no_variable_of_jax_changes_what_commands_compute():
    try:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        set_up()
        assert (jnp.arange(2) / np.float64(2)).dtype == jnp.float32
    finally:
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_numpy_dtype_promotion", "standard")


def test_models_keep_their_types_where_a_program_has_enabled_others():
    model, tokens = lively_model("diffeqformer"), np.arange(6)[None]
    config = toy_config(model__dropout=0.1, model__training_times="shifted", batch_size=2)
    results = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            logits = logits_of(*split_model(model), model.weights(), jnp.asarray(tokens, jnp.int32))
            _, state, scalars = run_steps(config, ONE_DEVICE, 1)
            types = {str(leaf.dtype) for leaf in jax.tree.leaves((state, logits))}
            results.append((np.asarray(logits), scalars, types))
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5) if isinstance(ours, np.ndarray) else None
    assert results[0][2] == results[1][2] <= {"float32", "int32"}


def test_a_tilde_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for given, expected in (
        ("~", "/home/me"),
        ("runs/a, ~/b,~root/c", "runs/a,/home/me/b,/root/c"),
        ("gs://bucket/~/a,a~/~b,./~", "gs://bucket/~/a,a~/~b,./~"),
    ):
        assert at_home(given) == expected
        assert harness.argument_at_home(f"--use_cache={given}") == f"--use_cache={expected}"
    assert harness.argument_at_home("--system_instruction=~") == "--system_instruction=~"


def test_options_and_fields_know_the_home_folder_and_texts_do_not(run, tmp_path):
    home = {"HOME": str(tmp_path)}
    (tmp_path / "run").symlink_to(run)
    done = command("generate", "--workdir=~/run", "--prompt=~/", "--tokens=1", environment=home, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("~/"), done.stderr
    (tmp_path / "mine.py").write_text(
        "from diffeqformer.config import base_config\ndef get_config(model='gpt'):\n"
        "    config = base_config('mine', model)\n    config.data.tokenizer_file = '~/absent'\n    return config"
    )
    done = command("prepare", "--config=~/mine.py", environment=home, folder=tmp_path)
    assert done.stderr.startswith(f"diffeqformer: config.data.tokenizer_file: {tmp_path}/absent")
    assert not list(tmp_path.glob("~*"))


def test_what_the_outputs_encoding_lacks_is_escaped_and_a_variable_of_jax_changes_nothing(run, tmp_path):
    (tmp_path / "prompts").write_text("é 🙂\n", encoding="utf-8")
    options = [f"--workdir={run}", f"--prompts_file={tmp_path / 'prompts'}", "--tokens=4"]
    done = command("generate", *options, environment={"PYTHONIOENCODING": "ascii", "JAX_ENABLE_X64": "1"})
    assert done.returncode == 0 and "\\u00e9 \\ud83d\\ude42" in done.stdout, done.stderr
    assert json.loads(done.stdout)["prompt"] == "é 🙂"


def test_names_of_any_bytes_are_written_and_null_for_what_json_does_not_know(tmp_path):
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    write_json(tmp_path / "results.json", {"é": name, "a": [1.0, -np.inf, (np.nan,)], "b": None}, ensure_ascii=False)
    expected = {"é": name, "a": [1.0, None, [None]], "b": None}
    assert json.loads((tmp_path / "results.json").read_text("utf-8")) == expected


def test_a_work_folder_whose_path_tensorstore_cannot_read_is_refused(run, tmp_path):
    folder = tmp_path / b"caf\xe9".decode("utf-8", "surrogateescape")
    folder.mkdir()
    (folder / "run").symlink_to(run)
    done = command("generate", "--workdir=run", "--prompt=a", folder=folder)
    assert done.returncode == 1 and "its path must be UTF-8; rename the folder" in done.stderr
