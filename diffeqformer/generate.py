"""Generate text from a trained model: `python -m diffeqformer.generate --workdir=runs/tiny --prompt="def main("`."""

import contextlib
import os
import sys
import time

from absl import flags, logging

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.results import title
from diffeqformer.console.terminal import json_line
from diffeqformer.data.files import read_text
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import UserError, counted, printable
from diffeqformer.inference.reader import with_solver
from diffeqformer.inference.sampling import MOST, Choice, Text, encode_prompt, write_texts, write_tokens
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Transformer, random_key


def prompt_text(options) -> str:
    """The prompt from its option, its file or standard input."""
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file in (None, "-"):
        hosts.check_one("--prompt: reading standard input, as without it and --prompt_file,")
    nothing = options.prompt_file is None and (sys.stdin is None or sys.stdin.isatty())
    text = "" if nothing else read_text("--prompt_file", options.prompt_file or "-")
    if not text and options.prompt_file is None:
        raise UserError("--prompt: a text to continue is needed, or --prompt_file, or text on standard input")
    return text


def prompts_of(options) -> list[str]:
    """All prompts: the lines of --prompts_file, of which empty ones are empty prompts, or one from elsewhere."""
    given = [name for name in ("prompt", "prompt_file", "prompts_file") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[1]}: a prompt was given as well; leave one of them out")
    if options.prompts_file is None:
        for name in ("output", "batch_size"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name}: goes with --prompts_file; leave it out")
        return [prompt_text(options)]
    folder = os.path.dirname(options.output or "") or "."
    if options.output is not None and (os.path.lexists(options.output) or not os.access(folder, os.W_OK)):
        raise UserError(f"--output: must be a new file in a folder that can be written, but it is {options.output}")
    return read_text("--prompts_file", options.prompts_file).split("\n")


def write(options) -> None:
    """Read the prompts, open the checkpoint, and write."""
    started = time.monotonic()
    choice = Choice(options.temperature, options.top_k, options.top_p)
    with hosts.all_succeed("the prompt"):
        choice.check()
        if "" in options.stop:
            raise UserError("--stop: must not be empty; leave it out")
        prompts = prompts_of(options)
    hosts.check_same({"--prompt: the text": prompts}, "give all processes the same one")
    opened = checkpoint.load_on_all(options.workdir, options.step)
    model, trained = opened.model, opened.config.model
    if options.solver is not None:
        model = with_solver(model, options.solver, trained)
    how = {"key": random_key(options.seed, "sample"), "choice": choice}
    how |= {name: getattr(options, name) for name in ("samples", "num_steps", "sliding_window")}
    unknown = sum(opened.tokenizer.encode(text).count(opened.tokenizer.unknown) for text in prompts)
    if unknown and hosts.is_first():
        print(f"the tokenizer doesn't know all of the prompt: {counted(unknown, 'unknown id')}", file=sys.stderr)
    with logits_of(f"{options.workdir}, checkpoint {opened.step}"):
        if options.prompts_file is None:
            said = write_samples(model, opened.tokenizer, prompts[0], options, started, how)
        else:
            said = write_lines(model, opened.tokenizer, prompts, options, started, how)
    solver = f" of {options.solver}" if options.solver is not None else ""
    steps = f"{counted(options.num_steps or trained.num_steps, 'step')}{solver}"
    if hosts.is_first():
        what = f"{title(opened.config)} ({trained.kind}, {steps}, {trained.dtype}) at step {opened.step:,}"
        print(f"\n{printable(what)}: {said}", file=sys.stderr)


def write_samples(model: Transformer, tokenizer: Tokenizer, prompt: str, options, started: float, how: dict) -> str:
    """Print the samples of one prompt, the first as it comes, the others after it; returns how fast that was."""
    ids, count, first = encode_prompt(tokenizer, prompt), options.samples, 0.0
    how |= dict(count=options.tokens, vocab_size=tokenizer.vocab_size, unknown=tokenizer.unknown)
    steps = write_tokens(model, ids, **how)
    headings = [f"--- sample {n + 1} of {count} ---\n" if count > 1 else "" for n in range(count)]
    texts, shown = [Text(tokenizer, ids, until=options.stop) for _ in range(count)], prompt
    print(headings[0] + prompt, end="", flush=True)
    for tokens in steps:
        first = first or time.monotonic()
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.add(token)
        settled = prompt + texts[0].settled()
        print(settled[len(shown) :], end="", flush=True)
        shown = max(shown, settled, key=len)
        if all(text.ended for text in texts):
            break
    seconds = time.monotonic() - first
    print((prompt + texts[0].text())[len(shown) :])
    for heading, text in zip(headings[1:], texts[1:]):
        print(heading + prompt + text.text())
    sys.stdout.flush()
    written = sum(len(text.ids) for text in texts)
    rate = f", then {(written - count) / seconds:,.0f} tokens/s" if written > count else ""
    return f"{counted(written, 'token')}, the first after {first - started:.1f} s{rate}"


def write_lines(
    model: Transformer, tokenizer: Tokenizer, prompts: list[str], options, started: float, how: dict
) -> str:
    """Write the texts after all prompts as JSON lines, batch by batch; returns how long that took."""
    how = dict(how, tokens=options.tokens, batch_size=options.batch_size or 8, until=options.stop)
    texts = write_texts(model, tokenizer, prompts, **how)
    path = options.output if hosts.is_first() else os.devnull
    try:
        with open(path, "w", encoding="utf-8") if options.output else contextlib.nullcontext(sys.stdout) as file:
            for number, text in enumerate(texts):
                line = {"prompt": prompts[number // options.samples], "text": text}
                print(json_line(line), file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = options.output or "standard output"
        raise UserError(f"--output: {where}: {error.strerror}; delete what was written, and choose another") from None
    return f"{counted(number + 1, 'text')} in {time.monotonic() - started:.1f} s"


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    command_line.define_step()
    flags.DEFINE_string("prompt", None, "The text to continue; may be empty.")
    flags.DEFINE_string("prompt_file", None, "A file with the text to continue; -: standard input.")
    flags.DEFINE_string("prompts_file", None, "A file with a text to continue in each line; writes JSON lines.")
    flags.DEFINE_string("output", None, "A new file for these JSON lines; by default standard output.")
    flags.DEFINE_integer("batch_size", None, "Texts written at once after --prompts_file; by default 8.", 1, 2**16)
    flags.DEFINE_integer("tokens", None, f"Maximum number of tokens to write; by default as many as fit, up to {MOST}.")
    flags.DEFINE_multi_string("stop", [], "Where this text comes up, a text ends before it; several can be given.")
    flags.DEFINE_bool("sliding_window", False, "When a text fills all positions, go on from its last half.")
    flags.DEFINE_integer("samples", 1, "Texts to write after the same prompt; the first is streamed.", 1, 2**16)
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
    flags.DEFINE_integer("top_k", 0, "Choose among this many of the likeliest tokens; 0: among all.")
    flags.DEFINE_float("top_p", 1.0, "Choose among the likeliest tokens that together have this probability.")
    flags.DEFINE_integer("seed", 0, "Seed of the random choices.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    flags.DEFINE_string("solver", None, "The solver of depth; by default as in training.")
    hosts.define_flags()

    def command() -> None:
        try:
            with hosts.joined(flags.FLAGS):
                write(flags.FLAGS)
        except BrokenPipeError:  # the reader has closed its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    command_line.run(command, verbosity=logging.ERROR)
