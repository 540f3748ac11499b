"""Speculative writing with a trained model: tokens per second with and without drafts, side by side.

    python benchmarks/drafts.py --workdir=runs/tiny-elastic --num_steps=8 --draft_steps=2,3 --beside=runs/tiny,runs/gpt

`a round` is the number of tokens that one round of drafts adds to a text, at most one more than are drafted (tokens of
the last round count that aren't needed). The ratio compares the time per token with plain writing at the full depth:
below 1 is faster. Of the flags that benchmarks share, --num_steps, --rounds and --calls have a meaning here.
"""

import time
from unittest import mock

import jax
import numpy as np
from absl import flags
from common import NUM_STEPS, alternate, print_table, with_quartiles

from diffeqformer.checkpoints import checkpoint
from diffeqformer.console import command_line
from diffeqformer.console.results import whole_numbers
from diffeqformer.inference import speculation
from diffeqformer.inference.choice import Choice
from diffeqformer.inference.sampling import encode_prompt, write_tokens

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run that was trained at many depths.", required=True)
BESIDE = flags.DEFINE_list("beside", [], "Folders of other runs, whose plain writing is timed as well.")
DRAFT_STEPS = flags.DEFINE_list("draft_steps", ["2"], "Steps of depth that draft, one row for each.")
PROMPT = flags.DEFINE_string("prompt", "def main(", "The text to continue.")
TOKENS = flags.DEFINE_integer("tokens", 96, "Tokens to write.", lower_bound=2)
SAMPLES = flags.DEFINE_integer("samples", 1, "Texts at once.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")


def write(subject) -> tuple[float, float]:
    """Seconds for each token after the first, and the tokens of a round (1 without drafts)."""
    opened, num_steps, draft_steps = subject
    rounds, write_round = [], speculation.write_round

    def recorded(*args):
        texts, tokens, counts = write_round(*args)
        rounds.append(counts)
        return texts, tokens, counts

    with mock.patch.object(speculation, "write_round", recorded):
        tokens = write_tokens(
            opened.model, encode_prompt(opened.tokenizer, PROMPT.value), count=TOKENS.value, key=jax.random.key(0),
            vocab_size=opened.tokenizer.vocab_size, choice=Choice(TEMPERATURE.value), samples=SAMPLES.value,
            num_steps=num_steps, draft_steps=draft_steps,
        )  # fmt: skip
        next(tokens)
        start = time.perf_counter()
        for _ in tokens:
            pass
        seconds = time.perf_counter() - start
    counts = np.ravel(rounds)
    return seconds / (TOKENS.value - 1), counts[counts > 0].mean() if rounds else 1.0


def benchmark() -> None:
    opened = checkpoint.load(WORKDIR.value)
    steps = NUM_STEPS.value
    drafts = whole_numbers("--draft_steps", DRAFT_STEPS.value, 1)
    subjects = {"plain": (opened, steps, None)}
    subjects |= {f"drafts in {few}": (opened, steps, few) for few in drafts}
    subjects |= {f"plain, {few} steps": (opened, few, None) for few in drafts}
    subjects |= {workdir: (checkpoint.load(workdir), None, None) for workdir in BESIDE.value}
    found = alternate(write, subjects)
    rows = []
    for name, values in found.items():
        seconds, of_round = np.median(values, axis=0)
        ratio = with_quartiles(values[:, 0] / found["plain"][:, 0])
        rows.append((name, 1e3 * seconds, SAMPLES.value / seconds, of_round, ratio))
    print(f"{WORKDIR.value}: {steps} steps of depth")
    print_table(("writing", "ms/token", "tokens/s", "a round", "ratio"), rows)


if __name__ == "__main__":
    command_line.run(benchmark)
