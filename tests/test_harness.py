"""lm-evaluation-harness: scores equal a plain loop's, batches and devices don't matter, generation, and the command."""

import jax
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffeqformer import transformer
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference import reader, scoring
from diffeqformer.inference.lm_eval_model import HarnessModel
from diffeqformer.inference.sampling import Choice, write_tokens
from diffeqformer.parallel import memory
from helpers import ONE_DEVICE, lively_model, toy_config

BYTES = ByteTokenizer()
WINDOW = 40
PAIRS = [
    ("A cat sat on", " the mat"),
    ("a context much longer than the window of the model, which loses its beginning", " end"),
    ("", "No context at all"),
    ("short", " and a continuation that is longer than the window, so that it needs several of them"),
]
TEXTS = ["", "a", "a text of forty bytes, no more, no less.", "A text that is longer than one window, twice. " * 3]


def small_model(**changes):
    return lively_model("diffeqformer", **{"vocab_size": 257, "max_length": 64, "num_steps": 2, **changes})


def harness_model(model=None, tokenizer=BYTES, **options):
    config, about = toy_config(sequence_length=16), checkpoint.About({}, "bytes")
    opened = checkpoint.Checkpoint(3, config, model or small_model(), tokenizer, about)
    return HarnessModel(opened, **{"window": WINDOW, "mesh": ONE_DEVICE, **options})


def requests(kind, arguments):
    return [Instance(kind, {}, args, i, metadata=("task", i, 1)) for i, args in enumerate(arguments)]


def log_likelihoods(model, pairs):
    return model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def rolling(model, texts=TEXTS):
    return model.loglikelihood_rolling(requests("loglikelihood_rolling", [(t,) for t in texts]), disable_tqdm=True)


def write(model, *arguments):
    return model.generate_until(requests("generate_until", arguments), disable_tqdm=True)


def stretches_of(model, pairs):
    """What a model is asked to score for each pair."""
    seen = []
    model._score = lambda groups, *_: seen.extend(groups) or [(0.0, False)] * len(groups)
    log_likelihoods(model, pairs)
    return seen


def test_a_continuation_is_scored_after_as_much_of_its_context_as_fits():
    """For a context that fits, one that doesn't, no context, and a continuation that takes three windows."""
    (cat, mat), (long, end), (_, alone), (short, several) = [map(BYTES.encode, pair) for pair in PAIRS]
    assert stretches_of(harness_model(), PAIRS) == [
        [scoring.Stretch(cat + mat, len(cat))],
        [scoring.Stretch((long + end)[-WINDOW - 1 :], WINDOW + 1 - len(end))],
        [scoring.Stretch([BYTES.end_of_text, *alone], 1)],
        [
            scoring.Stretch(short[-1:] + several[:WINDOW], 1),
            scoring.Stretch(several[WINDOW - 1 : 2 * WINDOW], 1),
            scoring.Stretch(several[-WINDOW - 1 :], WINDOW + 1 - (len(several) - 2 * WINDOW)),
        ],
    ]


@pytest.mark.parametrize("continuation, fits", [(" b", WINDOW - 1), (" and a continuation longer than the window", 1)])
def test_contexts_that_are_cut_are_counted(continuation, fits):
    model = harness_model()
    stretches_of(model, [(length * "a", continuation) for length in (0, 1, fits, fits + 1)])
    rolling(model)
    assert model.counts["task"]["contexts"] == 4 and model.counts["task"]["contexts_cut"] == 1


def test_what_is_written_is_the_likeliest_text_and_known_as_such():
    model, prompt = small_model(), "Once upon"
    options = dict(key=jax.random.key(0), choice=Choice(0.0))
    written = write_tokens(model, list(prompt.encode()), count=4, vocab_size=257, **options)
    written = [int(token[0]) for token in written]
    expected = BYTES.decode([*prompt.encode(), *written])[len(prompt) :]
    for mesh in (ONE_DEVICE, None):  # None: all eight
        both = harness_model(model, mesh=mesh)
        assert write(both, (prompt, {"max_gen_toks": 4}), (prompt, {"max_gen_toks": 4})) == [expected] * 2
    other = [*written[:3], (written[3] + 1) % 256]
    pairs = [(("", ""), list(prompt.encode()), ids) for ids in (written, other)]
    assert [greedy for _, greedy in both._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


def test_few_shapes_are_compiled_and_weights_are_made_once(monkeypatch, compilations):
    made = []
    real = transformer.weights_at
    monkeypatch.setattr(reader, "weights_at", lambda *arguments: made.append(arguments) or real(*arguments))
    model = harness_model(small_model(max_length=48), num_steps=3, batch_size=4)
    for _ in range(2):
        log_likelihoods(model, PAIRS), rolling(model), write(model, ("a", {"max_gen_toks": 2}))
    assert 1 <= compilations("target_scores") <= 2  # 32 and 48 positions
    assert len(made) == 1


def test_whole_texts_have_the_score_of_the_project_itself_and_the_windows_of_lm_eval():
    project, model = small_model(), harness_model()
    for text, total in zip(TEXTS, rolling(model)):
        stretches = list(scoring.sliding_windows(BYTES.encode(text), WINDOW, WINDOW, BYTES.end_of_text))
        parts = scoring.Scorer(project, batch_size=3, mesh=ONE_DEVICE)(stretches)
        assert total == pytest.approx(sum(part.log_probs.sum() for part in parts), rel=1e-6, abs=0)
        theirs = map(make_disjoint_window, get_rolling_token_windows(BYTES.encode(text), 256, WINDOW, 1))
        assert [(list(s.ids[: s.first]), list(s.ids[s.first :])) for s in stretches] == list(theirs)


def test_byte_pairs_are_split_where_lm_eval_splits_them():
    pieces = [bytes([b]) for b in range(256)] + [b" t", b"he", b" the"]
    model = harness_model(small_model(vocab_size=260), GPT2Tokenizer(dict(zip(pieces, range(259)))))
    pairs = [("see", " the"), ("see ", "the"), ("", "the"), ("", "  a"), ("  ", "a")]
    [[first], [second], [third], [fourth], [fifth]] = stretches_of(model, pairs)
    assert first == second and fourth == fifth and first.ids[first.first :] == [258]
    assert third.ids == [259, ord("t"), 257] and third.first == 1
    with pytest.raises(UserError, match="^continuation: 'e' after 'th' has no tokens of its own"):
        log_likelihoods(model, [("th", "e")])  # "the" is t, he: as many tokens as "th" has


def test_an_unknown_id_is_never_what_greedy_decoding_would_give(lossy_file):
    """However likely it is. What generation then writes counts as the likeliest."""
    tokenizer = SentencePieceTokenizer.open(str(lossy_file))
    network = small_model(vocab_size=tokenizer.vocab_size + 4)
    embedding = network.token_embedding[...].at[tokenizer.vocab_size].multiply(4.0)  # no token either
    network.token_embedding[...] = embedding
    network.final_norm["shift"][...] = 1e2 * (2 * embedding[tokenizer.unknown] + embedding[tokenizer.vocab_size])
    model, asked = harness_model(network, tokenizer), ("A cat", {"max_gen_toks": 1})
    [text] = write(model, asked)
    word = tokenizer.encode(f"A cat{text}")[-1:]
    pairs = [(("", ""), tokenizer.encode("A cat"), ids) for ids in (tokenizer.encode("Кот"), word)]
    assert pairs[0][2][-1] == tokenizer.unknown and tokenizer.unknown not in word
    (unknown, greedy), (known, likeliest) = model._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert (greedy, likeliest) == (False, True)


def test_what_the_tokenizer_loses_is_counted_by_task(lossy_file):
    """Whatever is asked. Whole texts with unknown ids have no likelihood, from which bits per byte would be made."""
    tokenizer = SentencePieceTokenizer.open(str(lossy_file))
    model = harness_model(small_model(vocab_size=tokenizer.vocab_size), tokenizer)
    counts = model.counts["task"]
    log_likelihoods(model, [("A cat", " sees the"), ("A cat\n", "sees"), ("Кот", " sees"), ("", "the thing")])
    assert (counts["unknown_tokens"], counts["altered_texts"]) == (1, 2)
    assert np.isnan(rolling(model, ["A cat", "A\ncat", "Кот Кот"])).tolist() == [False, False, True]
    assert (counts["unknown_tokens"], counts["altered_texts"]) == (3, 4)
    write(model, ("A cat", {"max_gen_toks": 1}), ("Кот", {"max_gen_toks": 1}))
    assert (counts["unknown_tokens"], counts["altered_texts"]) == (4, 5)
    assert model.get_model_info()["model_unknown_tokens"] == 4


def constant_writer(tokens):
    """A `continue_prompts` that yields these ids in each text and records arguments. Reading past end-of-text fails."""
    calls = []

    def writer(*arguments, count, choice, **options):
        calls.append((*arguments[2], count, choice[:3]))
        for token in tokens[:count]:
            yield np.full(len(arguments[2]), token)
            assert token != 256

    return writer, calls


def test_writing_stops_and_truncates(monkeypatch):
    model = harness_model(batch_size=1)
    writer, calls = constant_writer(list(b"one\ntwo. three") + [256] + list(b"more"))
    monkeypatch.setattr("diffeqformer.inference.sampling.continue_prompts", writer)
    assert write(
        model,
        ("a", {"until": ["\n", ".", ""]}),
        ("a", {"until": ". t"}),
        ("a", {"until": [], "max_gen_toks": 5}),
        ("a", {}),
        ("x" * 99 + "yz", {"max_gen_toks": 30, "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9}),
        ("", {"do_sample": True}),
    ) == ["one", "one\ntwo", "one\nt", "one\ntwo. three", "one\ntwo. three", "one\ntwo. three"]
    greedy = (0.0, 0, 1.0)
    assert calls[0] == ([97], 20, greedy) and calls[2] == ([97], 5, greedy)
    assert model.counts["task"]["contexts"] == 6 and model.counts["task"]["contexts_cut"] == 1
    assert calls[4] == (list(b"x" * 8 + b"yz"), 30, (0.5, 3, 0.9)) and calls[5] == ([256], 20, (1.0, 0, 1.0))


def test_a_batch_ends_with_its_last_text_and_needs_room(monkeypatch):
    writer, calls = constant_writer(list(b"one. two") + [256])
    monkeypatch.setattr("diffeqformer.inference.sampling.continue_prompts", writer)
    asked = ("a", {"until": "."}), ("b", {"until": " t"}), ("c", {"until": ".", "do_sample": True})
    model = harness_model(batch_size=2)
    assert write(model, *asked) == ["one", "one.", "one"]
    assert [prompts for *prompts, _, _ in calls] == [[[97], [98]], [[99], [99]]]
    monkeypatch.setattr(memory, "free_bytes", lambda devices: 10)
    with pytest.raises(UserError, match="^batch_size: the keys and values of 2 texts would take "):
        write(model, *asked)
