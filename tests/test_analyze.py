"""The report on a checkpoint: all of its parts, and invalid options."""

import dataclasses
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer import analyze
from diffeqformer.analysis import induction, lyapunov, report, sensitivity, spectra
from diffeqformer.checkpoints import checkpoint
from diffeqformer.console.results import write_json
from diffeqformer.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from helpers import lively_model, toy_config
from runs import command

PARTS = [name for name, analysis in analyze.ANALYSES.items() if analysis.by_default]


@pytest.mark.long
def test_the_command_writes_a_report_that_stands_alone(run, tmp_path):
    done = command("analyze", "--workdir", run, "--output", tmp_path / "out", "--text=a <b> & $_$ a", "--flow=4")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    sources = re.findall(r'(?:src|href|data)="?([^" >]*)', page)
    assert len(sources) == 7 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "a &lt;b&gt; &amp; $_$ a" in page and "<b>" not in page and "url(" not in page and "@import" not in page
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    model = checkpoint.load(run).model
    tokens = np.asarray(ByteTokenizer().encode("a <b> & $_$ a"))
    with np.load(tmp_path / "out" / "arrays.npz") as arrays:
        added = arrays["sensitivity/exponents"]
        np.testing.assert_allclose(added, lyapunov.exponents(model, jnp.asarray(tokens)), atol=1e-3)
        found = spectra.spectra(model, model.grid().ends)
        np.testing.assert_allclose(arrays["spectra/OV/singular_values"], found["OV"].singular_values, rtol=1e-3)
    measures = numbers["sensitivity"]["measures"]
    assert len(measures) == 4 and all(len(values) == len(tokens) for values in measures.values())
    largest = measures["Lyapunov sensitivity: largest exponent of equation (7)"]
    assert largest == pytest.approx(added.sum(0).max(-1).tolist())
    assert sum(measures["attention rollout"]) == pytest.approx(1)
    np.testing.assert_allclose(numbers["spectra"]["QK"]["radius"], found["QK"].radius(), rtol=1e-3)
    assert len(numbers["flow"]["exponents"]) == 4 and len(numbers["clustering"]["states"]) == model.num_steps + 1


def opened_model(kind, field="gpt", **changes):
    model, config = lively_model(kind, field, vocab_size=257, **changes), toy_config(kind, field)
    return checkpoint.Checkpoint(1, config, model, ByteTokenizer(), checkpoint.About({}, "bytes"))


def open_instead(opened, monkeypatch):
    monkeypatch.setattr(analyze.checkpoint, "load", lambda *_, **__: opened)


def options_of(**changes):
    default = {
        "workdir": "runs/x", "step": None, "feed_forward": True, "parts": PARTS, "text": None,
        "text_file": None, "num_steps": None, "times": None,
        "flow": 4, "published_pairing": False, "output": None,
    }  # fmt: skip
    return types.SimpleNamespace(**{**default, **changes})


@pytest.mark.parametrize(
    "kind, changes, sentence",
    [
        ("diffeqformer", {"text": "x" * 17}, "^--text: must have .* at most 16, .* it has 17$"),
        ("diffeqformer", {"text": "a", "text_file": "b"}, "^--text_file: can't be given together with --text"),
        ("diffeqformer", {"parts": ["spectre"]}, "^--parts: must be of spectra, .* is 'spectre'$"),
        ("gpt", {"num_steps": 3}, "^num_steps: this model has weights for 6 steps and for no other number"),
        ("gpt", {"times": 12}, "^--times: must be left out for this model"),
        ("gpt", {"published_pairing": True}, "needs generated weights and Euler"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_before_anything_is_written(
    kind, changes, sentence, monkeypatch, tmp_path
):
    open_instead(opened_model(kind), monkeypatch)
    with pytest.raises(UserError, match=sentence) as caught:
        analyze.analyze(options_of(output=str(tmp_path / "out"), **changes))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, changes, parts",
    [
        ("gpt", "gpt", {"dtype": "bfloat16"}, ["induction", "sharpness", "flow", "clustering"]),
        ("shared", "llama", {"solver": "midpoint"}, ["spectra", "sensitivity"]),
    ],
)
def test_every_kind_of_model_has_a_report(kind, field, changes, parts, monkeypatch, tmp_path):
    opened = opened_model(kind, field, num_steps=2, **changes)
    open_instead(opened, monkeypatch)
    done = analyze.analyze(options_of(output=str(tmp_path / "out"), parts=parts, text="some text"))
    assert [section.name for section in done] == parts
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img ") == 4 and ("<th>layer" in page) == (kind == "gpt")
    assert ("within a step of this solver" in page) == (kind == "shared")
    for section in done:
        assert all(np.isfinite(values).all() for values in section.arrays.values()), section.name


@pytest.mark.long
def test_options_reach_what_they_are_for(monkeypatch, tmp_path):
    """A model in bfloat16 is analyzed in fp32 and not modified."""
    opened = opened_model("diffeqformer", dtype="bfloat16")
    open_instead(opened, monkeypatch)
    (tmp_path / "text.txt").write_text("some text\n")
    changes = {"times": 12, "feed_forward": False, "published_pairing": True, "num_steps": 3}
    changes |= {"text_file": str(tmp_path / "text.txt"), "output": str(tmp_path / "out")}
    spectral, sensitive = analyze.analyze(options_of(**changes, parts=["sensitivity", "spectra"]))
    assert spectral.arrays["OV/eigenvalues"].shape == (12, 4, 8)
    assert {*spectral.numbers} == {"times", "QK", "OV"}
    assert opened.model.dtype == jnp.bfloat16
    model = opened.model.replace(dtype=jnp.dtype(jnp.float32))
    expected = lyapunov.exponents(model, jnp.asarray(ByteTokenizer().encode("some text")), 3, published=True)
    np.testing.assert_allclose(sensitive.arrays["exponents"], expected, atol=1e-5)


def test_sections_are_of_the_depth_that_is_asked_for():
    """Those of a model that was made for it."""
    opened = opened_model("diffeqformer")
    made_for_it = dataclasses.replace(opened, model=opened.model.replace(num_steps=3))
    spectra = ("spectra", {"feed_forward": False})
    for part, options in (spectra, ("sensitivity", {}), ("flow", {"flow": 2}), ("clustering", {}), ("induction", {})):
        section, text = analyze.ANALYSES[part].section, [list(b"text")] * analyze.ANALYSES[part].reads_text
        found = section(opened, *text, num_steps=3, **options)
        expected = section(made_for_it, *text, **options)
        values, wanted = ({**each.arrays, **each.numbers.get("measures", {})} for each in (found, expected))
        assert set(values) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_allclose(values[name], array, atol=1e-4, err_msg=f"{part}: {name}")
        assert part != "induction" or found.html == expected.html  # with shares of the spectra


def test_pieces_are_what_tokens_add_to_the_text(sentencepiece_file):
    assert sensitivity.text_pieces(ByteTokenizer(), [*"aé€".encode(), 7]) == ["a", "", "é", "", "", "€", "\a"]
    tokenizer = SentencePieceTokenizer.open(str(sentencepiece_file))
    pieces = sensitivity.text_pieces(tokenizer, tokenizer.encode("A cat sees the red thing."))
    assert "".join(pieces) == "A cat sees the red thing." and " sees" in pieces


def test_tokens_that_a_text_can_consist_of(sentencepiece_file):
    ids = induction.readable_ids(ByteTokenizer())
    assert set(ids) == {*b"\n\t", *range(32, 127)}
    tokenizer = SentencePieceTokenizer.open(str(sentencepiece_file))
    ids = induction.readable_ids(tokenizer)
    assert tokenizer.end_of_text not in ids and set(tokenizer.encode("A cat sees")) <= set(ids)


def test_the_default_text_is_cut_to_the_models_positions():
    assert len(analyze.text_tokens(options_of(), opened_model("gpt"))) == 16


def test_what_json_does_not_know_is_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.0, -np.inf, (np.nan,)], "b": "x", "c": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.0, None, [None]], "b": "x", "c": None}


def test_shares_of_values_with_infinite_ones():
    """The last value isn't included."""
    assert report.shares(np.array([1.0, 3.0, -np.inf, 2.0, 50.0])).tolist() == [0.0, 1.0, 0.0, 0.5, 0.0]
    assert report.shares(np.full(2, -np.inf)).tolist() == [0, 0]
