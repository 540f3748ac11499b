"""What the experiments share: runs in processes of their own that are resumed, and what they printed."""

import pathlib
import re
import subprocess
import sys

from diffeqformer.console.results import write_text


def train(workdir: pathlib.Path, options: list[str]) -> str:
    """Run `diffeqformer.main` unless it has ended already; gives all that it ever printed."""
    log = workdir.with_name(f"{workdir.name}.log")
    if not log.exists() or "\nFinished." not in log.read_text():
        workdir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "diffeqformer.main", *options, f"--workdir={workdir}"]
        print(" ".join(command), flush=True)
        with log.open("a") as file:
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for line in running.stdout:
                file.write(line)
                file.flush()
                print(line, end="", flush=True)
        if running.wait():
            sys.exit(f"{workdir} ended with status {running.returncode}; see above, and run the same command again")
    return log.read_text()


def validations(log: str) -> dict[int, float]:
    """The validation perplexities that a run printed, by step."""
    found = re.findall(r"^step ([\d,]+)/[\d,]+  validation: .*perplexity ([\d,.]+)", log, re.MULTILINE)
    return {int(step.replace(",", "")): float(value.replace(",", "")) for step, value in found}


def articles_of_wikitext(
    path: str | None, folder: pathlib.Path, name: str, train: slice, validation: slice
) -> list[str]:
    """Write some articles of a WikiText file for training and others for validation; gives the options of a run on them.

    Args:
        path: of wiki.valid.tokens.
        name: of the text, also of its token store.
    """
    from diffeqformer.data.wikitext import articles

    if path is None or not pathlib.Path(path).is_file():
        sys.exit(f"--wikitext: must be WikiText-103's file wiki.valid.tokens, but there is no file {path}")
    parts = list(articles(pathlib.Path(path).read_text(encoding="utf-8")))
    options = [f"--config.data.task={name}"]
    for split, chosen in (("train", train), ("validation", validation)):
        write_text(folder / f"{name}-{split}.txt", "".join(parts[chosen]))
        options.append(f"--config.data.{split}_files={folder / f'{name}-{split}.txt'}")
    return options
