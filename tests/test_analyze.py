"""The report on a checkpoint: all of its parts, and invalid options. Attention, clusters: results known in advance."""

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffeqformer import analyze
from diffeqformer.analysis import attention_maps, induction, lyapunov, sensitivity, sharpness
from diffeqformer.analysis.clustering import relative_distances
from diffeqformer.analysis.spectra import spectra
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.fields.layers import Context
from diffeqformer.transformer import split_model, weights_at
from helpers import build_model, lively_model, toy_config
from runs import command

TOKENS = jnp.arange(3, 11)
PARTS = list(analyze.ANALYSES)


@pytest.mark.long
def test_the_command_writes_a_report_that_stands_alone(run, tmp_path):
    out = tmp_path / "out"
    done = command("analyze", "--workdir", run, "--output", out, "--text=a <b> & $_$ a", "--flow=4")
    assert done.returncode == 0, done.stderr
    page = (out / "report.html").read_text()
    sources = re.findall(r'(?:src|href|data)="?([^" >]*)', page)
    assert len(sources) == 7 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "a &lt;b&gt; &amp; $_$ a" in page and "<b>" not in page and "url(" not in page and "@import" not in page
    numbers, arrays = json.loads((out / "results.json").read_text()), np.load(out / "arrays.npz")
    measures, added = numbers["sensitivity"]["measures"], arrays["sensitivity/exponents"]
    assert all(len(values) == 13 for values in measures.values())
    largest = measures["Lyapunov sensitivity: largest exponent of equation (7)"]
    assert largest == pytest.approx(added.sum(0).max(-1).tolist())
    assert sum(measures["attention rollout"]) == pytest.approx(1)
    values = np.abs(arrays["spectra/QK/eigenvalues"][..., 0])
    np.testing.assert_allclose(numbers["spectra"]["QK"]["radius"], values, rtol=1e-6)
    assert len(numbers["flow"]["exponents"]) == 4 and len(numbers["clustering"]["states"]) == 7


def opened_model(monkeypatch, kind, field="gpt", **changes):
    """A checkpoint, which `analyze` opens."""
    model, config = lively_model(kind, field, vocab_size=257, **changes), toy_config(kind, field)
    opened = checkpoint.Checkpoint(1, config, model, ByteTokenizer(), checkpoint.About({}, "bytes"))
    monkeypatch.setattr(analyze.checkpoint, "load", lambda *_, **__: opened)
    return opened


def options_of(**changes):
    default = {"workdir": "runs/x", "feed_forward": True, "parts": PARTS, "flow": 4, "published_pairing": False}
    default |= dict.fromkeys(("step", "text", "num_steps", "times"))
    return types.SimpleNamespace(**{**default, **changes})


@pytest.mark.parametrize(
    "kind, changes, sentence",
    [
        ("diffeqformer", {"text": "x" * 17}, "^--text: must have .* at most 16, .* it has 17$"),
        ("diffeqformer", {"parts": ["spectre"]}, "^--parts: .* 'spectre'$"),
        ("gpt", {"times": 12}, "^--times: must be left out"),
        ("gpt", {"published_pairing": True}, "needs generated weights and Euler"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(kind, changes, sentence, monkeypatch, tmp_path):
    opened_model(monkeypatch, kind)
    with pytest.raises(UserError, match=sentence):
        analyze.analyze(options_of(output=str(tmp_path / "out"), **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, field, changes, parts",
    [
        ("gpt", "gpt", {"dtype": "bfloat16"}, ["induction", "sharpness", "flow", "clustering"]),
        ("shared", "llama", {"solver": "midpoint"}, ["spectra", "sensitivity"]),
    ],
)
def test_every_kind_of_model_has_a_report(kind, field, changes, parts, monkeypatch, tmp_path):
    opened_model(monkeypatch, kind, field, num_steps=2, **changes)
    done = analyze.analyze(options_of(output=str(tmp_path / "out"), parts=parts))  # the default text, of 16 tokens
    assert [section.name for section in done] == parts
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img ") == 4 and ("<th>layer" in page) == (kind == "gpt")
    assert ("within a step of this solver" in page) == (kind == "shared")
    for section in done:
        assert all(np.isfinite(values).all() for values in section.arrays.values()), section.name


@pytest.mark.long
def test_options_reach_what_they_are_for(monkeypatch, tmp_path):
    """A model in bfloat16 is analyzed in fp32 and not modified."""
    opened = opened_model(monkeypatch, "diffeqformer", dtype="bfloat16")
    changes = {"times": 18, "feed_forward": False, "published_pairing": True, "num_steps": 3}
    changes |= {"text": "some text", "output": str(tmp_path / "out"), "parts": ["sensitivity", "spectra"]}
    spectral, sensitive = analyze.analyze(options_of(**changes))
    assert {*spectral.numbers} == {"times", "QK", "OV"} and opened.model.dtype == jnp.bfloat16
    model = opened.model.replace(dtype=jnp.dtype(jnp.float32))
    expected = spectra(model, model.grid(6).ends, feed_forward=False)["OV"].singular_values  # at every third time
    np.testing.assert_allclose(spectral.arrays["OV/singular_values"][2::3], expected, rtol=1e-4)
    expected = lyapunov.exponents(model, jnp.asarray(ByteTokenizer().encode("some text")), 3, published=True)
    np.testing.assert_allclose(sensitive.arrays["exponents"], expected, atol=1e-5)


def test_sections_are_of_the_depth_that_is_asked_for(monkeypatch):
    opened = opened_model(monkeypatch, "diffeqformer")
    made_for_it = dataclasses.replace(opened, model=opened.model.replace(num_steps=3))
    parts = {"spectra": {"feed_forward": False}, "sensitivity": {}, "flow": {"flow": 2}, "clustering": {}}
    for part, options in {**parts, "induction": {}}.items():
        section, text = analyze.ANALYSES[part].section, [list(b"text")] * analyze.ANALYSES[part].reads_text
        found = section(opened, *text, num_steps=3, **options)
        expected = section(made_for_it, *text, **options)
        values, wanted = ({**each.arrays, **each.numbers.get("measures", {})} for each in (found, expected))
        assert set(values) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_allclose(values[name], array, atol=1e-4, err_msg=f"{part}: {name}")
        assert part != "induction" or found.html == expected.html  # with shares of the spectra


def test_pieces_are_what_tokens_add_to_the_text_and_readable_ones_can_make_one(sentencepiece_file):
    assert sensitivity.text_pieces(ByteTokenizer(), [*"aé€".encode(), 7]) == ["a", "", "é", "", "", "€", "\a"]
    assert {*induction.readable_ids(ByteTokenizer())} == {*b"\n\t", *range(32, 127)}
    tokenizer, text = SentencePieceTokenizer.open(str(sentencepiece_file)), "A cat sees the red thing."
    pieces, ids = sensitivity.text_pieces(tokenizer, tokenizer.encode(text)), induction.readable_ids(tokenizer)
    assert "".join(pieces) == text and " sees" in pieces
    assert tokenizer.end_of_text not in ids and {*tokenizer.encode(text)} <= {*ids}


@pytest.mark.parametrize("kind, field, shared", [("diffeqformer", "gpt", 4), ("llama", "llama", 2)])
def test_maps_are_the_attention_that_mixes_values(kind, field, shared):
    """Measured from outside: with one-hot values, the mixed values are the attention."""
    model = lively_model(kind, field, num_steps=2, key_value_heads=shared)
    found = attention_maps.maps(model, TOKENS[None])
    assert found.shape == (2, 1, 4, 8, 8) and np.allclose(found.sum(-1), 1, atol=1e-5)
    assert not np.triu(np.asarray(found), 1).any() and np.ptp(np.asarray(found)[..., -1, :]) > 0.05
    one_hot = jnp.tile(jnp.eye(8)[None, :, None], (1, 1, shared, 1))
    states, seen = model.trajectory(TOKENS[None], weights_at(model)), []

    def attend(query, key, value):
        seen.append(jax.nn.dot_product_attention(query, key, one_hot, is_causal=True))
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    layers, dt = weights_at(model).at_step(1, 1)
    model.solver.step(model.field, layers, states[1], dt, Context(attend=attend))
    np.testing.assert_allclose(found[1], seen[0].swapaxes(1, 2), atol=1e-5)


def test_induction_scores_of_an_induction_head_and_of_an_even_one():
    size = 6
    known = np.zeros((1, 2, 2 * size, 2 * size), np.float32)
    for token in range(2 * size):
        known[0, 0, token, token + 1 - size if token >= size else token] = 1
        known[0, 1, token, : token + 1] = 1 / (token + 1)
    even = np.mean([1 / (token + 1) for token in range(size, 2 * size)])
    assert np.allclose(induction.to_successor(jnp.asarray(known)), [1, even])
    scores = induction.induction_scores(lively_model("diffeqformer", num_steps=3), range(10, 40), 8, examples=4)
    assert scores.shape == (3, 4) and (0 < scores).all() and (scores < 1).all()


def test_entropy_is_a_share_of_uniform_attentions():
    known = np.zeros((1, 3, 4, 4), np.float32)
    known[0, :, 0, 0] = known[0, 0, np.arange(4), np.arange(4)] = 1  # head 0: each token looks at itself
    known[0, 1] = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    known[0, 2, 1:, :2] = 0.5  # head 2: 1 bit of 1, log2(3) and 2
    expected = [0, 1, np.mean([1, 1 / np.log2(3), 1 / 2])]
    np.testing.assert_allclose(sharpness.relative_entropy(jnp.asarray(known)), expected, atol=1e-6)


def test_rollout_multiplies_steps_from_the_last_to_the_first(monkeypatch):
    """Two steps: the last token takes half from token 1, which took half from token 0 before."""
    first, second = np.eye(3), np.eye(3)
    first[1], second[2] = [1, 0, 0], [0, 1, 0]
    monkeypatch.setattr(attention_maps, "maps", lambda *_: np.stack([first, second]))
    np.testing.assert_allclose(attention_maps.rollout(build_model("gpt"), jnp.arange(3)), [0.25, 0.25, 0.5])


@pytest.mark.long
def test_input_gradients_are_those_of_the_embeddings():
    """For distinct tokens, each of whose rows is read once; a Llama's separate head isn't involved."""
    model = lively_model("llama", "llama", num_steps=2)
    graph, params = split_model(model)

    def log_probability(table):
        here = nnx.merge(graph, {**params, "token_embedding": table})
        return jax.nn.log_softmax(here(TOKENS[None], here.weights())[0, -1])[5]

    slopes = jax.jit(jax.grad(log_probability))(params["token_embedding"])[TOKENS]
    found = attention_maps.input_gradients(model, TOKENS, target=5)
    np.testing.assert_allclose(found, np.linalg.norm(slopes, axis=-1), rtol=1e-4)


def test_relative_distances_see_clusters_but_neither_size_nor_place():
    random = np.random.RandomState(1)
    swarm = random.randn(60, 3)
    clusters = np.repeat(random.randn(3, 3), 20, axis=0) + 1e-3 * swarm
    quantiles, sizes = relative_distances(np.stack([swarm, 5 * swarm + 7, clusters, np.zeros((60, 3))]))
    np.testing.assert_allclose(quantiles[0], quantiles[1], rtol=1e-9)
    assert sizes[1] == pytest.approx(5 * sizes[0]) and (quantiles[3] == 0).all() and sizes[3] == 0
    assert quantiles[0, 0] > 0.3
    assert quantiles[2, 1] < 0.01 < 0.5 < quantiles[2, 2]  # 19 of 59 others are in one's own cluster
    pairs = np.linalg.norm(swarm[:, None] - swarm, axis=-1)[np.triu_indices(60, 1)]
    assert sizes[0] == pytest.approx(np.sqrt((pairs**2).mean()))
    assert quantiles[0, 2] == pytest.approx(np.median(pairs) / sizes[0])
