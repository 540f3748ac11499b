"""Generation: the cached path equals the plain one; choices and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeqformer.checkpoints.finite import NotFinite
from diffeqformer.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference import sampling
from diffeqformer.inference.reader import CHUNK, Reader, padded_prompt, read_prompt, read_token
from diffeqformer.inference.sampling import Choice, Text, draw, generate, write_tokens
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import MODELS, split_model, weights_at
from helpers import FAMILY, build_model, forward, lively_model, logits_of, long_to_compile, some_slow

BYTES = ByteTokenizer()
LENGTH = 2 * CHUNK + 20  # no multiple of a chunk


CASES = [(*row, MODELS[row[0]].solver) for row in FAMILY]
CASES += [("diffeqformer", "gpt", name) for name in SOLVERS if name != MODELS["diffeqformer"].solver]


@pytest.mark.parametrize("kind, field, solver", some_slow(CASES, long_to_compile))
def test_cached_logits_equal_the_forward_pass_at_every_position(kind, field, solver, compilations):
    """After prompts of any length, token by token; in chunks, at another depth, and with one compilation."""
    model = lively_model(kind, field, max_length=LENGTH, num_steps=3, solver=solver)
    graph, params = split_model(model)
    weights = weights_at(model, 3 if MODELS[kind].weights.fixed_depth else 5)
    ids = np.random.RandomState(0).randint(64, size=LENGTH)
    expected = logits_of(graph, params, weights, ids[None])[0]
    scale, reader = float(jnp.abs(expected).max()), Reader(graph, params, weights)
    for count in (1, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH):
        logits, _ = read_prompt(reader, padded_prompt(ids.tolist(), LENGTH), count)
        np.testing.assert_allclose(logits[0], expected[count - 1], atol=5e-6 * scale)
    logits, cache = read_prompt(reader, padded_prompt(ids[: CHUNK // 2].tolist(), LENGTH), CHUNK // 2)
    for position in range(CHUNK // 2, LENGTH):
        old = cache
        logits, cache = read_token(reader, cache, ids[position : position + 1], position)
        assert all(leaf.is_deleted() for leaf in old)  # donated
        np.testing.assert_allclose(logits[0], expected[position], atol=5e-6 * scale)
    assert compilations("read_prompt") == compilations("read_token") == 1


def test_greedy_text_is_the_likeliest_at_another_depth():
    model = lively_model("diffeqformer", vocab_size=300, max_length=20)
    how = dict(count=10, key=jax.random.key(0), vocab_size=257, choice=Choice(0.0), num_steps=2)
    written = [int(token[0]) for token in write_tokens(model, [1, 2, 3], **how)]
    logits = forward(model, jnp.array([[1, 2, 3, *written]]), 2)[0, 2:-1, :257]
    assert written == logits.argmax(-1).tolist()


def test_choices_have_their_distributions():
    probabilities = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = np.log(probabilities).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 20_000)

    def check(choice, expected):
        tokens = draw(jnp.broadcast_to(logits, (len(keys), len(logits))), keys, choice)
        found = np.bincount(tokens, minlength=len(logits)) / len(keys)
        np.testing.assert_allclose(found, expected / expected.sum(), atol=0.015)

    check(Choice(1.0), probabilities)
    check(Choice(0.5), probabilities**2)
    check(Choice(1.0, top_k=2), probabilities * [0, 1, 0, 1, 0])
    check(Choice(1.0, top_p=0.69), probabilities * [0, 1, 0, 1, 0])  # 0.4 + 0.3 reach it
    check(Choice(1.0, top_p=0.71), probabilities * [0, 1, 0, 1, 1])  # and 0.15 is needed
    check(Choice(1.0, top_k=3, top_p=0.8), probabilities * [0, 1, 0, 1, 0])  # of 0.4, 0.3, 0.15 the first two have 0.82
    check(Choice(1e-38), probabilities * [0, 1, 0, 0, 0])
    check(Choice(2.0, top_p=0.5), np.sqrt(probabilities) * [0, 1, 0, 1, 0])  # the temperature comes first


def test_a_cache_is_no_longer_than_a_text_needs(monkeypatch):
    """A token would read all of a pretrained model's thousands of positions."""
    lengths, model, read = [], lively_model("diffeqformer", "llama", max_length=600), sampling.read_prompt
    monkeypatch.setattr(sampling, "read_prompt", lambda *of: lengths.append(of[1].shape[1]) or read(*of))
    for count in (20, 598):
        next(write_tokens(model, [1, 2], count=count, key=jax.random.key(0), vocab_size=64))
    assert lengths == [256, 640]  # in whole chunks


def test_text_stops_at_its_end_and_never_leaves_the_vocabulary():
    model = build_model("diffeqformer", vocab_size=300, generator_start="varying", num_steps=2)

    def write(**options):
        return generate(model, BYTES, "ab", tokens=14, key=jax.random.key(0), choice=Choice(1.0), **options)

    embedding = model.token_embedding[...]
    model.final_norm["shift"][...] = embedding[256] * 1e4  # everything asks for the end of the text
    assert write() == [""]
    model.token_embedding[...] = embedding.at[299].set(10.0 * embedding[122])  # likelier than z, but no token
    model.final_norm["shift"][...] = embedding[122] * 1e4
    assert write(samples=2) == [14 * "z", 14 * "z"]
    model.token_embedding[...] = jnp.zeros_like(embedding)  # all tokens are as likely
    assert len(set(write()[0])) > 8


def most_likely(model, token: int, scale: float = 1e4):
    """The model, which now expects a token everywhere."""
    model.final_norm["shift"][...] = model.token_embedding[...][token] * scale
    return model


def test_an_unknown_id_is_never_written():
    model = most_likely(lively_model("diffeqformer", vocab_size=64, num_steps=2), 7, 9.0)
    options = dict(count=12, key=jax.random.key(0), vocab_size=64)
    assert 7 in list(write_tokens(model, [1], choice=Choice(0.0), **options))
    for choice in (Choice(0.0), Choice(1.0, top_p=0.1)):
        assert 7 not in list(write_tokens(model, [1], unknown=7, choice=choice, **options))


def test_logits_that_are_not_finite_are_refused():
    model = most_likely(lively_model("diffeqformer", vocab_size=64, num_steps=2), 7, 1e25)
    model.token_embedding[...] *= 1e15  # the product of both is more than fp32 holds
    options = dict(count=3, key=jax.random.key(0), vocab_size=64)
    for choice in (Choice(0.0), Choice(1.0)):
        with pytest.raises(NotFinite):
            list(write_tokens(model, [1], choice=choice, **options))


def test_a_text_is_decoded_token_by_token_as_at_once(sentencepiece_file):
    pieces = SentencePieceTokenizer.open(str(sentencepiece_file))
    random = np.random.default_rng(0)
    drawn = random.integers(0, 256, 300).tolist() + list("süß, 漢字 \U0001f642".encode()) + [0xE6, 0xBC]
    for tokenizer, ids in ((BYTES, drawn), (pieces, random.integers(3, pieces.vocab_size, 200).tolist())):
        for prompt in (ids[:1], ids[:20]):
            text = Text(tokenizer, prompt)
            for number, token in enumerate(ids, 1):
                text.add(token)
                whole = tokenizer.decode(prompt + ids[:number])
                assert text.text() == whole[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize(
    "prompt, options, said",
    [
        (16 * [1], {"count": None}, "prompt: .* but it has 16"),
        (12 * [1], {}, "tokens: .* there is room for 4"),
        ([1], {"count": 0}, "tokens: must be at least 1"),
        ([1], {"choice": Choice(-1.0)}, "temperature"),
        ([1], {"num_steps": 7}, "num_steps: this model has weights for 6 steps"),
    ],
)
def test_impossible_wishes_are_refused_at_once(prompt, options, said):
    options = {"count": 5, "key": jax.random.key(0), "vocab_size": 64, **options}
    with pytest.raises(UserError, match=f"^{said}"):
        write_tokens(build_model("gpt"), prompt, **options)
