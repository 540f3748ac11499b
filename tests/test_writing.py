"""Writing beyond the model's positions, and after many prompts at once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import options_of

from diffeqformer import generate as generate_command
from diffeqformer.checkpoints import checkpoint
from diffeqformer.data.tokenizers import ByteTokenizer
from diffeqformer.errors import UserError
from diffeqformer.inference import reader, sampling
from diffeqformer.inference.reader import check_room, split_reader, with_solver
from diffeqformer.inference.sampling import Choice, continue_prompts, generate, write_texts, write_tokens
from diffeqformer.inference.scoring import Scorer, Stretch
from diffeqformer.parallel import memory
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import random_key
from helpers import ONE_DEVICE, forward, lively_model, some_slow
from runs import command

BYTES = ByteTokenizer()
LENGTH = 24  # positions of the model


def small_model(field: str = "gpt", **changes):
    """Of one shape, so that tests share compiled programs."""
    return lively_model("diffeqformer", field, vocab_size=257, max_length=LENGTH, num_steps=2, **changes)


def windows(prompt: list[int], text: list[int]) -> list[list[int]]:
    """What each written token of a text sees: its last half from where all positions are full."""
    start, seen = (len(prompt) - LENGTH // 2 if len(prompt) >= LENGTH else 0), []
    for end in range(len(prompt), len(text)):
        start = end - LENGTH // 2 if end - start == LENGTH else start
        seen.append(text[start:end])
    return seen


QUICK = [("llama", "euler"), ("gpt", "heun"), ("gpt", "adams_bashforth"), ("gpt", "reversible_euler")]
OTHERS = [("gpt", solver) for solver in SOLVERS if ("gpt", solver) not in QUICK]


@pytest.mark.parametrize("field, solver", [*QUICK, *some_slow(OTHERS, lambda case: True)])
def test_every_token_is_chosen_from_the_forward_pass_over_its_window(field, solver, monkeypatch, compilations):
    """Of texts of different lengths at once, after prompts with more ids than the model has positions, or fewer."""
    model = small_model(field, solver=solver, dropout=0.25)  # of its own, so that no other test has compiled it
    chosen, choose = [], sampling.choose_next
    monkeypatch.setattr(sampling, "choose_next", lambda logits, *rest: chosen.append(logits) or choose(logits, *rest))
    prompts, count = [[1], list(range(20, 30)), list(range(12, 12 + LENGTH)), list(range(30, 90))], 30
    keys = jax.random.split(jax.random.key(0), len(prompts))
    choice = Choice(1.0, vocab_size=257)
    steps = continue_prompts(split_reader(model), LENGTH, prompts, count=count, keys=keys, choice=choice)
    texts = [[*prompt, *written] for prompt, written in zip(prompts, np.stack(list(steps)).T.tolist())]
    seen = [window for prompt, text in zip(prompts, texts) for window in windows(prompt, text)]
    assert {len(window) for window in seen} == {*range(1, LENGTH)}
    tokens = np.array([window + [9] * (LENGTH - len(window)) for window in seen])
    expected = np.asarray(forward(model, tokens))
    expected = expected[np.arange(len(seen)), [len(window) - 1 for window in seen]]
    found = np.stack(chosen).swapaxes(0, 1).reshape(expected.shape)  # text by text
    np.testing.assert_allclose(found, expected, atol=5e-6 * np.abs(expected).max())
    assert compilations("read_prompt") == compilations("read_token") == 1


def test_samples_and_positions_have_random_choices_of_their_own():
    model = small_model()
    model.token_embedding[...] = jnp.zeros_like(model.token_embedding[...])  # all tokens are as likely
    options = dict(key=jax.random.key(0), vocab_size=257, choice=Choice(1.0), samples=2)
    whole = np.stack(list(write_tokens(model, [1, 2], count=60, sliding_window=True, **options)))
    assert (whole[:, 0] != whole[:, 1]).mean() > 0.5
    for distance in range(1, LENGTH + 1):  # no position of a text has the random choices of another
        assert (whole[distance:] == whole[:-distance]).mean() < 0.2


@pytest.mark.parametrize("choice", [Choice(0.0), Choice(1.0)])
def test_a_text_is_the_same_as_when_it_is_written_alone(choice):
    model = small_model("llama")
    options = dict(key=jax.random.key(3), choice=choice)
    prompts = ["def f(", "", "a longer prompt", "def f(", "x"]
    alone = [text for prompt in prompts for text in generate(model, BYTES, prompt, tokens=None, samples=2, **options)]
    assert list(write_texts(model, BYTES, prompts, tokens=None, samples=2, batch_size=4, **options)) == alone
    assert alone[0:2] == alone[6:8] and len({*map(len, alone)}) > 2
    options |= {"sliding_window": True, "tokens": 40}
    prompts.append("a prompt that is longer than the window")
    alone = [text for prompt in prompts for text in generate(model, BYTES, prompt, samples=2, **options)]
    assert list(write_texts(model, BYTES, prompts, samples=2, batch_size=4, **options)) == alone


@pytest.mark.parametrize("prompts, said", [(["a", "bc"], "prompt 2: tokens"), (["a\udcff"], "prompt: .* valid text")])
def test_a_prompt_that_can_not_be_continued_is_named_at_once(prompts, said):
    with pytest.raises(UserError, match=f"^{said}"):
        write_texts(small_model(), BYTES, prompts, tokens=23, key=jax.random.key(0))


@pytest.mark.long
def test_the_command_writes_a_line_for_each_sample_of_each_prompt(run, tmp_path, capsys):
    opened, prompts = checkpoint.load(run), ["def é ", "", "a\x0b" + "a" * 70]
    model = with_solver(opened.model, "midpoint", opened.config.model)
    how = dict(tokens=70, samples=2, key=random_key(5, "sample"), choice=Choice(0.7), num_steps=2, sliding_window=True)
    texts = [text for prompt in prompts for text in generate(model, opened.tokenizer, prompt, **how)]
    expected = [{"prompt": prompt, "text": text} for prompt, text in zip(np.repeat(prompts, 2).tolist(), texts)]
    (tmp_path / "prompts").write_text("def é \r\n\na\x0b" + 70 * "a" + "\n", encoding="utf-8", newline="")
    changes = dict(tokens=70, samples=2, batch_size=4, seed=5, temperature=0.7, num_steps=2, sliding_window=True)
    changes |= dict(prompt=None, prompts_file=str(tmp_path / "prompts"), solver="midpoint")
    generate_command.write(options_of(run, **changes))
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.split("\n")[:-1]] == expected
    assert "toy (diffeqformer, 2 steps of midpoint, float32) at step 12: 6 texts in " in printed.err
    options = ["--workdir", run, "--prompts_file", tmp_path / "prompts", "--tokens=2", "--output", tmp_path / "out"]
    written = command("generate", *options, "--sliding_window")
    lines = (tmp_path / "out").read_text("utf-8").splitlines()
    assert written.stdout == "" and [json.loads(line)["prompt"] for line in lines] == prompts
    again = command("generate", *options)
    assert again.returncode == 1 and "--output: must be a new file" in again.stderr


def test_room_is_counted_for_all_keys_and_values_on_a_device(monkeypatch):
    counted = []
    monkeypatch.setattr(reader, "check_free", lambda what, one, times: counted.append(one.size * times))
    gpt = lively_model("gpt", max_length=LENGTH, num_steps=2)
    for model, steps, texts in ((gpt, 2, 3), (small_model(), 2, 3), (small_model(), 4, 7)):
        check_room(model, steps, LENGTH, texts, "samples")
    of_step = 2 * LENGTH * gpt.field.width  # keys and values
    whole = [4 * 2 * of_step, 4 * 2 * of_step, 8 * 4 * of_step]
    assert counted == [whole[0], whole[1] / jax.device_count(), whole[2] / jax.device_count()]


def test_texts_that_do_not_fit_into_memory_are_said_before_they_are_made(monkeypatch):
    model, many = small_model(), 100_000
    monkeypatch.setattr(memory, "free_on_host", lambda: 10**8)
    options = dict(key=jax.random.key(0), samples=many)
    with pytest.raises(UserError, match="^samples: the keys and values of 100,000 texts"):
        write_tokens(model, [1], count=2, vocab_size=257, **options)
    with pytest.raises(UserError, match="^batch_size: the keys and values of 100,000 texts"):
        write_texts(model, BYTES, ["a"], tokens=2, batch_size=many, **options)
    with pytest.raises(UserError, match="^batch_size: the states of 100,000 sequences"):
        Scorer(model, batch_size=many, mesh=ONE_DEVICE)([Stretch([1] * 9, 1)])
