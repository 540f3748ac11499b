"""lm-evaluation-harness: scores equal a plain loop's, and what is written ends where it should."""

import jax
import lm_eval.api.model
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from scipy.special import log_softmax

from diffeqformer import transformer
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.tokenizers import ByteTokenizer, GPT2Tokenizer, SentencePieceTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference import reader, scoring
from diffeqformer.inference.lm_eval_model import HarnessModel
from diffeqformer.inference.sampling import Choice, generate, write_tokens
from diffeqformer.parallel import memory
from helpers import ONE_DEVICE, forward, lively_model, toy_config

BYTES = ByteTokenizer()
WINDOW = 40
PAIRS = [
    ("A cat sat on", " the mat"),
    ("", "No context at all"),
    ("spaces after it  ", "belong to the continuation"),
    ("  ", "a context of spaces alone"),
    ("é and ж", " are bytes ß"),
    ("a context much longer than the window of the model, which loses its beginning", " end"),
    ("short", " and a continuation that is longer than the window, so that it needs several of them"),
    *((f"number {n}", n * " n" + ".") for n in range(3)),
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


def log_likelihoods(model, pairs=PAIRS):
    return model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def rolling(model, texts=TEXTS):
    return model.loglikelihood_rolling(requests("loglikelihood_rolling", [(t,) for t in texts]), disable_tqdm=True)


def write(model, *arguments):
    return model.generate_until(requests("generate_until", arguments), disable_tqdm=True)


def plain_score(model, context, continuation):
    """A continuation's log-probability and greediness, given a context, from the logits of at most WINDOW inputs."""
    ids = (context + continuation)[-(WINDOW + 1) :]
    inputs = np.array([(ids[:-1] + [99] * WINDOW)[:WINDOW]])
    logits = np.asarray(forward(model, inputs))[0, : len(ids) - 1]
    log_probs = log_softmax(np.float64(logits), axis=-1)[-len(continuation) :]
    continuation = np.array(ids[-len(continuation) :])
    return float(log_probs[np.arange(len(continuation)), continuation].sum()), (
        log_probs.argmax(-1) == continuation
    ).all()


def test_scores_are_those_of_a_loop_without_batches():
    model = small_model()
    (cat, long, none, several) = log_likelihoods(harness_model(model), [PAIRS[i] for i in (0, 5, 1, 6)])
    for (total, greedy), (context, continuation) in ((cat, PAIRS[0]), (long, PAIRS[5]), (none, PAIRS[1])):
        context = BYTES.encode(context) or [BYTES.end_of_text]
        expected, likeliest = plain_score(model, context, BYTES.encode(continuation))
        assert total == pytest.approx(expected, rel=1e-5) and greedy == likeliest
    context, ids = map(BYTES.encode, PAIRS[6])
    assert 2 * WINDOW < len(ids) < 3 * WINDOW
    parts = [(context[-1:], ids[:WINDOW]), (ids[:WINDOW][-1:], ids[WINDOW : 2 * WINDOW]), (ids, ids[2 * WINDOW :])]
    parts[2] = (ids[: 2 * WINDOW], parts[2][1])
    expected = sum(plain_score(model, before, part)[0] for before, part in parts)
    assert several[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("continuation, fits", [(" b", WINDOW - 1), (" and a continuation longer than the window", 1)])
def test_contexts_that_are_cut_are_counted(continuation, fits):
    model = harness_model()
    model._score = lambda groups, *_: [(0.0, False)] * len(groups)
    log_likelihoods(model, [(length * "a", continuation) for length in (0, 1, fits, fits + 1)])
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
        log_likelihoods(model), rolling(model), write(model, ("a", {"max_gen_toks": 2}))
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
    seen = []
    model._score = lambda groups, *_: seen.extend(groups) or [(0.0, False)] * len(groups)
    log_likelihoods(model, [("see", " the"), ("see ", "the"), ("", "the"), ("", "  a"), ("  ", "a")])
    [[first], [second], [third], [fourth], [fifth]] = seen
    assert first == second and fourth == fifth and first.ids[first.first :] == [258]
    assert third.ids == [259, ord("t"), 257] and third.first == 1
    with pytest.raises(UserError, match="^continuation: 'e' after 'th'"):
        log_likelihoods(model, [("th", "e")])  # "the" is t, he: as many tokens as "th" has


@pytest.mark.long
def test_sentence_pieces_are_scored_and_written(sentencepiece_file):
    """With a tokenizer like Llama's, whose pieces mark the beginning of a word and of the text."""
    tokenizer = SentencePieceTokenizer.open(str(sentencepiece_file))
    network = small_model(vocab_size=tokenizer.vocab_size)
    model = harness_model(network, tokenizer)
    whole, context = tokenizer.encode("A cat sees the red thing."), tokenizer.encode("A cat sees")
    assert whole[: len(context)] == context
    expected, _ = plain_score(network, context, whole[len(context) :])
    for pair in (("A cat sees", " the red thing."), ("A cat sees ", "the red thing.")):
        assert log_likelihoods(model, [pair])[0][0] == pytest.approx(expected, rel=1e-5)
    alone, _ = plain_score(network, [tokenizer.end_of_text], tokenizer.encode("the red"))
    assert log_likelihoods(model, [("", "the red")])[0][0] == rolling(model, ["the red"])[0] == pytest.approx(alone)
    [text] = write(model, ("A cat", {"max_gen_toks": 3}))
    [again] = generate(network, tokenizer, "A cat", tokens=3, key=jax.random.key(0), choice=Choice(0.0))
    assert text == again


def test_an_unknown_id_is_never_what_greedy_decoding_would_give(lossy_file):
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


def test_a_batch_has_texts_chosen_alike_and_needs_room(monkeypatch):
    writer, calls = constant_writer(list(b"one. two") + [256])
    monkeypatch.setattr("diffeqformer.inference.sampling.continue_prompts", writer)
    asked = ("a", {"until": "."}), ("b", {"until": " t"}), ("c", {"until": ".", "do_sample": True})
    model = harness_model(batch_size=2)
    assert write(model, *asked) == ["one", "one.", "one"]
    assert [prompts for *prompts, _, _ in calls] == [[[97], [98]], [[99], [99]]]
    monkeypatch.setattr(memory, "free_bytes", lambda devices: 10)
    with pytest.raises(UserError, match="^batch_size: the keys and values of 2 texts"):
        write(model, *asked)


def test_models_that_answer_differently_share_no_cache(tmp_path):
    single = {bytes([b]): b for b in range(256)}
    models = [
        harness_model(),
        harness_model(num_steps=3),
        harness_model(window=WINDOW - 1),
        harness_model(small_model(width=64)),
        *(harness_model(tokenizer=GPT2Tokenizer({**single, pair: 256})) for pair in (b"<|", b"|>")),
        harness_model(reader.with_solver(small_model(), "heun", toy_config().model), num_steps=2),
        harness_model(small_model(dtype="bfloat16")),
    ]
    answers = [lm_eval.api.model.CachingLM(model, f"{tmp_path}/cache_rank0.db") for model in models]
    assert len({cache.cache_db for cache in answers}) == len(models)
    again = lm_eval.api.model.CachingLM(harness_model(batch_size=2), f"{tmp_path}/cache_rank0.db")
    asked = requests("loglikelihood", PAIRS[:1])
    expected = answers[0].loglikelihood(asked)
    again.lm.scorer = None  # it must not be asked
    assert again.loglikelihood(asked) == expected
