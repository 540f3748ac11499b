"""Generate text from a trained model: `python -m diffeqformer.generate --workdir=runs/tiny --prompt="def main("`."""

import hashlib
import os
import pathlib
import sys
import time

from absl import flags, logging

from diffeqformer import checkpoint
from diffeqformer.console import command_line
from diffeqformer.console.terminal import printable
from diffeqformer.errors import UserError
from diffeqformer.inference.choice import Choice
from diffeqformer.inference.sampling import Samples, encode_prompt, write_tokens
from diffeqformer.parallel import hosts
from diffeqformer.transformer import random_key


def define_flags() -> None:
    """The options of the command."""
    flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    flags.DEFINE_string("prompt", None, "The text to continue; may be empty.")
    flags.DEFINE_string("prompt_file", None, "A file with the text to continue; -: standard input.")
    flags.DEFINE_integer("tokens", None, "Maximum number of tokens to write; by default as many as fit, up to 256.")
    flags.DEFINE_integer("samples", 1, "Texts to write after the same prompt; the first is shown as it is generated.")
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
    flags.DEFINE_integer("top_k", 0, "Choose among this many of the likeliest tokens; 0: among all.")
    flags.DEFINE_float("top_p", 1.0, "Choose among the likeliest tokens that together have this probability.")
    flags.DEFINE_integer("seed", 0, "Seed of the random choices.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    flags.DEFINE_integer("draft_steps", None, "Fewer steps of depth, which draft tokens for all steps to verify.")


def prompt_text(options) -> str:
    """The prompt from its option, its file or standard input.

    Raises:
        UserError: if there is none or more than one, or the file can't be read.
    """
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("--prompt_file: a prompt was given as well; leave one of them out")
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file in (None, "-"):
        hosts.check_one("--prompt: reading standard input, as without it and --prompt_file,")
    if options.prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError("--prompt: a text to continue is needed, or --prompt_file, or text on standard input")
    try:
        if options.prompt_file in (None, "-"):
            return sys.stdin.buffer.read().decode("utf-8")
        return pathlib.Path(options.prompt_file).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--prompt_file: {options.prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        source = "standard input" if options.prompt_file in (None, "-") else f"--prompt_file: {options.prompt_file}"
        raise UserError(f"{source}: the text must be UTF-8, but byte {error.start} is not") from None


def write(options) -> None:
    """Read the prompt, open the checkpoint, write: the first sample as it comes, the others after it."""
    started = time.monotonic()
    with hosts.all_succeed("the prompt"):
        prompt, count = prompt_text(options), options.samples
    digest = hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()
    hosts.check_same("--prompt: the text", digest, "give all processes the same one")
    opened = checkpoint.load_on_all(options.workdir)
    model, tokenizer = opened.model, opened.tokenizer
    ids = encode_prompt(tokenizer, prompt)
    room = max(1, min(256, model.max_length - len(ids)))
    tokens_of_samples = write_tokens(
        model,
        ids,
        count=room if options.tokens is None else options.tokens,
        key=random_key(options.seed, "sample"),
        vocab_size=tokenizer.vocab_size,
        choice=Choice(options.temperature, options.top_k, options.top_p),
        samples=count,
        num_steps=options.num_steps,
        draft_steps=options.draft_steps,
    )
    show = printable if sys.stdout.isatty() else str
    headings = [f"--- sample {n + 1} of {count} ---\n" if count > 1 else "" for n in range(count)]
    samples, shown, first = Samples(tokenizer, ids, count), prompt, 0.0
    print(headings[0] + show(prompt), end="", flush=True)
    for tokens in tokens_of_samples:
        first = first or time.monotonic()
        samples.add(tokens)
        text = prompt + samples.text(0).rstrip("\ufffd")  # may be an incomplete character
        print(show(text[len(shown) :]), end="", flush=True)
        shown = max(shown, text, key=len)
        if samples.finished():
            break
    seconds = time.monotonic() - first
    print(show((prompt + samples.text(0))[len(shown) :]))
    for n in range(1, count):
        print(headings[n] + show(prompt + samples.text(n)))
    sys.stdout.flush()
    written = sum(map(len, samples.ids))
    rate = f", then {(written - count) / seconds:,.0f} tokens/s" if written > count else ""
    trained, steps = opened.config.model, options.num_steps or opened.config.model.num_steps
    drafts = f", drafts in {options.draft_steps}" if options.draft_steps else ""
    what = f"{opened.config.name} ({trained.kind}, {steps} steps{drafts}, {trained.dtype}) at step {opened.step:,}"
    if hosts.is_first():
        print(f"\n{what}: {written:,} tokens, the first after {first - started:.1f} s{rate}", file=sys.stderr)


def main() -> None:
    define_flags()
    hosts.define_flags()

    def command() -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't show
        try:
            with hosts.joined(flags.FLAGS):
                write(flags.FLAGS)
        except BrokenPipeError:  # the reader has closed its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    command_line.run(command, verbosity=logging.ERROR)


if __name__ == "__main__":
    main()
