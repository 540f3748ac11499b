"""Let a trained model write: `python -m diffeqformer.generate --workdir=runs/tiny --prompt="def main("`."""

import pathlib
import sys
import time

from absl import flags, logging

from diffeqformer import checkpoint, cli
from diffeqformer.errors import UserError
from diffeqformer.sampling import Choice, Samples, printable, write_tokens
from diffeqformer.step import random_key

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
PROMPT = flags.DEFINE_string("prompt", None, "The text to go on from.")
PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "A file with the text to go on from, as it is; -: standard input."
)
TOKENS = flags.DEFINE_integer("tokens", None, "Tokens to write at most; by default what there is room for, up to 256.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Texts to write, all after the same prompt.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Choose among so many of the likeliest tokens; 0: among all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Choose among the likeliest tokens that together have this probability.")
SEED = flags.DEFINE_integer("seed", 0, "Of the random choices.")
NUM_STEPS = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as many as trained.")


def read_prompt() -> str:
    """The prompt from its option, its file or standard input.

    Raises:
        UserError: if there is none or more than one, or the file can't be read.
    """
    if PROMPT.value is not None and PROMPT_FILE.value is not None:
        raise UserError("--prompt_file: a prompt was given as well; leave one of them out")
    if PROMPT.value is not None:
        return PROMPT.value
    if PROMPT_FILE.value is None and sys.stdin.isatty():
        raise UserError("--prompt: a text to go on from is needed, or --prompt_file, or text on standard input")
    try:
        if PROMPT_FILE.value in (None, "-"):
            return sys.stdin.buffer.read().decode("utf-8")
        return pathlib.Path(PROMPT_FILE.value).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompt_file: {PROMPT_FILE.value}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file: the text must be UTF-8, but byte {error.start} is not") from None


def command() -> None:
    """Read the prompt, open the checkpoint, write: the first sample as it comes, the others after it."""
    started = time.monotonic()
    prompt = read_prompt()
    opened = checkpoint.load(WORKDIR.value)
    model, tokenizer = opened.model, opened.tokenizer
    ids = tokenizer.encode(prompt)
    count = max(1, min(256, model.max_length - len(ids))) if TOKENS.value is None else TOKENS.value
    steps = write_tokens(
        model,
        ids,
        count=count,
        samples=SAMPLES.value,
        choice=Choice(TEMPERATURE.value, TOP_K.value, TOP_P.value),
        key=random_key(SEED.value, "sample"),
        vocab_size=tokenizer.vocab_size,
        num_steps=NUM_STEPS.value,
    )
    samples, shown, written, first = Samples(tokenizer, SAMPLES.value), prompt, 0, 0.0
    show = printable if sys.stdout.isatty() else str
    print(heading(0) + show(prompt), end="", flush=True)
    for tokens in steps:
        written, first = written + 1, first or time.monotonic()
        samples.add(tokens)
        text = prompt + samples.text(0).rstrip("\ufffd")  # perhaps the beginning of a character
        print(show(text[len(shown) :]), end="", flush=True)
        shown = max(shown, text, key=len)
        if samples.finished():
            break
    print(show((prompt + samples.text(0))[len(shown) :]))
    for sample in range(1, SAMPLES.value):
        print(heading(sample) + show(prompt + samples.text(sample)))
    seconds = time.monotonic() - first
    rate = f", then {(written - 1) * SAMPLES.value / seconds:,.0f} tokens/s" if written > 1 else ""
    print(
        f"\n{opened.config.name}, step {opened.step:,}: {written} tokens x {SAMPLES.value}, "
        f"the first after {first - started:.1f} s{rate}",
        file=sys.stderr,
    )


def heading(sample: int) -> str:
    """The line above a sample, if there are several."""
    return f"--- sample {sample + 1} of {SAMPLES.value} ---\n" if SAMPLES.value > 1 else ""


if __name__ == "__main__":
    cli.run(command, verbosity=logging.ERROR)
