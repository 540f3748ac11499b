"""The paper's tables, figures and appendices: what each needs, the commands that make it, and what was published.

    python experiments/paper.py --list
    python experiments/paper.py --figure=7                       # at the size of two CPU cores
    python experiments/paper.py --table=2 --scale=published      # with the published configs, on accelerators

Each is made by commands of this project, which --list shows, with the hardware and the options that they need. They are
run one after the other. What is finished is not made again: runs resume, studies collect the runs that --folder holds,
and reports of the same command stay. At tiny scale, a run of a study takes about three minutes of a core. Perplexities
of `evaluate` stand beside the published ones in <exhibit>.md and .png in --folder. Those of studies at tiny scale are
of bytes, which can't be compared with the published ones, so in the pictures of Figures 5 and 8 the published ones have
a panel of their own. docs/fidelity.md says where this project differs from the paper.
"""

import glob
import itertools
import json
import pathlib
import re
import shlex
import subprocess
import sys

from absl import app, flags
from exhibits import EXHIBITS, Command, Exhibit
from published import show_beside_published

TABLE, FIGURE, APPENDIX = (
    flags.DEFINE_enum(
        kind, None, [name.split()[1] for name in EXHIBITS if name.startswith(kind)], f"The {kind} to make."
    )
    for kind in ("table", "figure", "appendix")
)
LIST = flags.DEFINE_bool("list", False, "Show all tables, figures and appendices, with their commands.")
SCALE = flags.DEFINE_enum("scale", "tiny", ["tiny", "published"], "Two CPU cores, or the published configs.")
FOLDER = flags.DEFINE_string("folder", "runs/paper", "Folder of all runs and results.")
WIKITEXT = flags.DEFINE_string(
    "wikitext", None, "wiki.valid.tokens of WikiText-103, for Figures 4 and 5 at tiny scale."
)
TASKS = flags.DEFINE_string(
    "tasks",
    None,
    "Folder of lm-eval task files for Tables 4 and 5; by default toy tasks, or lm-eval's own at published scale.",
)
TEXT = flags.DEFINE_string("text", None, "The text of Figure 3; by default that of `analyze`.")
TOKENIZER = flags.DEFINE_string("tokenizer", "tokenizer.model", "A Llama's SentencePiece model, at published scale.")


def commands_of(exhibit: Exhibit) -> list[Command]:
    """Its commands at the chosen scale, with folders and files filled in."""
    commands = exhibit.tiny if SCALE.value == "tiny" else exhibit.at_scale
    needed = " ".join(command.line for command in commands)
    if "{wikitext}" in needed and not WIKITEXT.value and not LIST.value:
        sys.exit("--wikitext: must be WikiText-103's file wiki.valid.tokens for this figure at tiny scale")
    files = {
        "folder": FOLDER.value,
        "wikitext": WIKITEXT.value or "wiki.valid.tokens",
        "tasks": TASKS.value or "tests/data/tasks",
    }
    files["tokenizer"] = TOKENIZER.value
    files = {name: shlex.quote(value) for name, value in files.items()}
    files["include"] = "" if TASKS.value is None else f"--include={files['tasks']} --tasks=paper"
    files["text"] = "" if TEXT.value is None else shlex.quote(f"--text={TEXT.value}")
    return [command._replace(line=command.line.format(**files).strip()) for command in commands]


def in_full(word: str) -> str:
    """A word of a command line, in which patterns of work folders are replaced by the folders."""
    option, _, value = word.partition("=")
    if option != "--workdir":
        return word
    return f"{option}={','.join(path for each in value.split(',') for path in sorted(glob.glob(each)) or [each])}"


def needs(exhibit: Exhibit) -> str:
    """The hardware and the files that its commands need at the chosen scale."""
    tiny = SCALE.value == "tiny" or exhibit.tiny == exhibit.at_scale
    lines = " ".join(command.line for command in (exhibit.tiny if tiny else exhibit.at_scale))
    configs = ", ".join(dict.fromkeys(re.findall(r"configs/\w+\.py", lines)))
    hardware = f"the hardware that its configs name ({configs})" if configs else "one accelerator with 80 GB"
    hardware = "two CPU cores" if tiny or configs == "configs/tiny.py" else hardware
    others = {"{wikitext}": "--wikitext", "{tokenizer}": "--tokenizer", "diffeqformer.downstream": "lm-eval"}
    return ", ".join([hardware, *(name for part, name in others.items() if part in lines)])


def title(name: str) -> str:
    """The name of an exhibit at the start of a line."""
    return name[0].upper() + name[1:]


def show(name: str, exhibit: Exhibit) -> None:
    """Print what an exhibit is and how it is made."""
    print(f"{title(name)}: {exhibit.shows}\n  published: {exhibit.published}")
    if commands_of(exhibit):
        print(f"  needs: {needs(exhibit)}")
    for command in commands_of(exhibit):
        print(f"  python {command.line}")


def make(name: str, exhibit: Exhibit) -> None:
    """Run an exhibit's commands, and show its Markdown."""
    show(name, exhibit)
    for command in commands_of(exhibit):
        output = pathlib.Path(FOLDER.value) / command.output
        done = output / "made_by.txt"
        if command.output and done.is_file() and done.read_text() == command.line:
            continue
        if command.output and output.exists():  # of an interrupted command, or of other options
            names = (output.with_name(f"{output.name}-{number}") for number in itertools.count(1))
            output.rename(next(name for name in names if not name.exists()))
        print(f"\n$ python {command.line}", flush=True)
        if status := subprocess.run([sys.executable, *map(in_full, shlex.split(command.line))]).returncode:
            sys.exit(f"{name}: its command ended with status {status}; see above, and run the same command again")
        if command.output:
            done.write_text(command.line)
    if found := perplexities(exhibit):
        show_beside_published(name, found, pathlib.Path(FOLDER.value) / f"{name.replace(' ', '-')}.md")
    if commands_of(exhibit):
        print(f"\n{title(name)}: all results are in {FOLDER.value}; published: {exhibit.published}")


def perplexities(exhibit: Exhibit) -> dict[str, float]:
    """Those that its commands of `evaluate` found, by their outputs."""
    folder, found = pathlib.Path(FOLDER.value), {}
    for command in commands_of(exhibit):
        if command.line.startswith("-m diffeqformer.evaluate "):
            [row] = json.loads((folder / command.output / "results.json").read_text())["rows"]
            found[command.output] = row["paper_perplexity"]
    return found


def main(_) -> None:
    flags_of = {"table": TABLE.value, "figure": FIGURE.value, "appendix": APPENDIX.value}
    chosen = [f"{kind} {which}" for kind, which in flags_of.items() if which]
    if LIST.value:
        for name in chosen or EXHIBITS:
            show(name, EXHIBITS[name])
        return
    if not chosen:
        sys.exit("--table, --figure, --appendix: must name what to make; --list shows all")
    for name in chosen:
        make(name, EXHIBITS[name])


if __name__ == "__main__":
    app.run(main)
