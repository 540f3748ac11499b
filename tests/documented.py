"""The table of tests/test_documented_commands.py: what is small, stands in or is left out when documents are followed.

A command is run if a row of `LEFT_OUT` doesn't match it, and once, however it is written. All rows of `ROWS` that match
it change it, in their order.
"""

import json
import re
import sysconfig
from typing import NamedTuple

from diffeqformer.inference.harness_tasks import TASKS
from newcomer import LOGIQA, PAGES, RAW, SMALL_MODEL, SMALL_RUN

ELSEWHERE = {"docs/extending": "tests/test_extending.py follows these pages in a repository that they change"}

OUTPUT = (
    "step 5,000/5,000 ", "Preparing python_stdlib ", "  train step, 16 steps ", "word perplexity =",
    "configs/            one file ", "__main__\n", "wikitext103/detokenized/",
)  # fmt: skip
"""How blocks begin that hold no commands."""

CLOUD, HOSTS = "needs a cloud account", "needs several machines"
LEFT_OUT = {
    r"\bgcloud |/google_compute_engine$": CLOUD,
    r"^export ZONE=|\blaunch/tpu.sh ": CLOUD,  # tests/test_launch.py has a gcloud that records its calls
    r"^docker |^POOL=|\bkubectl ": CLOUD,  # tests/test_clusters.py checks what is applied, and builds without Docker
    r"^pip install xprof ": "downloads a package",
    r"^sbatch ": HOSTS,  # tests/test_launch.py has a scheduler of this kind
    r"--coordinator=first-host": HOSTS,  # tests/test_hosts.py starts several processes
}
TPU = "--topology=v"  # is in commands that need the TPU compiler: `make test-tpu`


class Row(NamedTuple):
    """One kind of command.

    pattern: regular expression, which is found in it.
    becomes: what replaces that.
    add: options at its end.
    """

    pattern: str
    becomes: str = r"\g<0>"
    add: str = ""


def joined(options: list[str]) -> str:
    return " ".join(options)


SAMPLED = joined(SMALL_RUN)
TEXTS = "--config.data.train_files='train/*.txt' --config.data.validation_files=validation.txt"
LITTLE_TEXT = f"{TEXTS} --config.data.dir=little_stores"
ROWS = [
    # what README's table and fragments leave to the reader
    Row(r"^diffeqformer main \.\.\. ", "diffeqformer main --config=tiny "),
    Row(r"^diffeqformer (evaluate|materialize|analyze|ode|inspect|downstream)$", r"\g<0> --workdir=runs/tiny"),
    Row(r"^diffeqformer generate$", r"\g<0> --workdir=runs/tiny --prompt=def"),
    Row(r"^diffeqformer harness$", r"\g<0> run --model diffeqformer --model_args workdir=runs/tiny --tasks arc_easy"),
    Row(r"^--config", r"python -m diffeqformer.prepare --config=configs/tiny.py --config.data.dir=own_stores \g<0>"),
    # what stands in for something
    Row(r"^make train$", "python -m diffeqformer.main --config=configs/tiny.py"),  # without an installation
    Row(r"remote=gs://(my-)?bucket", "remote=file://$PWD/bucket"),
    Row(r"gs://(my-)?bucket", "bucket"),  # a folder
    Row(r"/shared/", "shared/"),
    Row(r"^\.venv/bin/(pip|python)", r"\1"),
    Row(r"^python3 -m venv", r"\g<0> --without-pip"),
    Row(r"^pip install", add="--dry-run --no-deps --no-build-isolation"),  # tests/test_install.py installs
    Row(r"^tensorboard ", add="--inspect"),  # in place of serving
    Row(r"tracker=tensorboard,wandb,trackio", "tracker=tensorboard"),  # make test-extras has the others
    Row(r"downstream( --workdir=\S+)( --shots=0,5)?$", add="--include=my_tasks --tasks=paper"),
    Row(r"(--include=\S+/task_files) --tasks=paper", r"\1 --tasks=logiqa"),  # the hub has the other ten
    Row(r"\bharness run", add="--include_path my_tasks"),
    Row(r"--tasks arc_easy", r"\g<0>,lambada_openai,logiqa,piqa"),  # those that docs/downstream.md has files for
    # what is not trained; other studies of a clone have all their rows
    Row(r"experiments/paper\.py", add="--list"),
    Row(r"experiments/recipe\.py", add="--forms='llama, muon'"),
    Row(r"experiments/full_scale\.py$", add="--stage=show"),
    Row(r"^make models$", "python experiments/models.py --only=tiny --steps=2"),
    Row(r"^diffeqformer push ", r"HF_TOKEN=writes \g<0>"),
    # what is small
    Row(r"\bmain (--config=\S+)(?!.*smollm2)", rf"main \1 {joined(SMALL_MODEL)}", add=SAMPLED),
    # what a GPT and tiny.py's own model don't have
    Row(
        r"((gpt|shared|tiny(\.py(:(discretized|elastic))?)?) .*?)( --config\.model\.(time_embed|sinusoidal)_dim=4){2}",
        r"\1",
    ),
    Row(r"(microbatches=0 .*) --config\.microbatches=1", r"\1"),
    Row(r"\bmain .*smollm2", add=SAMPLED),
    Row(r"left_out=16\S+ (.*depths)=24,30", r"left_out=1,2 \1=4,6"),  # smollm2 has six layers
    Row(r"(fewest|num_steps)=24(,27,30)?\b", r"\1=4"),
    # runs/tiny alone has the standard library
    Row(r"\bmain .*tiny(\.py)?(:|(?!.*_files).* --workdir)", add=LITTLE_TEXT),
    Row(r"\bmain .*schedule=wsd", add="--config.optimizer.warmup_steps=1"),
    Row(r"( --config\.steps=)10000(.*) --config\.steps=\d+", r"\g<1>10000\2\g<1>8"),
    Row(r"\bmain .*:lora ", add="--config.model.lora_rank=8"),
    Row(r"\bprepare ", add="--config.sequence_length=32"),  # the hub's validation split is short
    Row(r"materialized-4", "materialized-2"),  # steps
    Row(r"\bgenerate ", add="--tokens=8"),
    Row(r"\bevaluate (?!.*--(files|task|split))", add="--files=text.txt"),
    Row(r"\bdownstream ", add="--limit=2"),
    Row(r"\bharness run", add="--limit 2"),
    Row(r"diffeqformer\.analyze (?!.*--parts)", add="--parts=induction,sensitivity"),
    Row(r"\bode (?!.*--files)", add="--files=text.txt"),
    Row(r"\bode ", add="--windows=1 --refinements=2"),
    Row(r"\bplan .*--topology=h100", add=joined(SMALL_MODEL)),
    Row(r"\bplan .*--topology=v", add=joined([*SMALL_MODEL, "--config.sequence_length=128"])),
    Row(r"--topology=v(?!.*--programs)", add="--programs=train"),
    Row(r"(benchmarks/depth_memory\.py .*)--num_steps=\S+", r"\1--num_steps=2 --only=step"),
    Row(r"benchmarks/spectra\.py", add=joined([*SMALL_MODEL, "--dense=2"])),
    Row(r"experiments/simulation\.py", add="--draws=4"),
]

FORKED = (
    r"python -m diffeqformer\.(main|analyze|evaluate(?!.*--(task|split))|generate|inspect|materialize|ode|downstream) "
)
"""Commands whose process is a fork of one with the imports done. Those of README, and what downloads, are as typed."""

PREPARED = {
    "runs/tiny": "python -m diffeqformer.main --config=tiny",
    "smollm2": "python tests/huggingface.py smollm2",
    "runs/large": "python -m diffeqformer.main --config=large",
    "runs/large-gpt": "python -m diffeqformer.main --config=large:gpt",
    "bucket/runs/large": "python -m diffeqformer.main --config=large --workdir=bucket/runs/large",
}
"""Runs that a page takes for granted, which are made when a command names one."""

SNIPPETS = {
    "task: lambada_openai": ("my_tasks/lambada_openai.yaml", {}),
    "include: /path/to/site-packages": (
        "my_tasks/piqa.yaml",
        {"/path/to/site-packages": sysconfig.get_path("purelib")},
    ),
    "include: ../diffeqformer": ("my_tasks/logiqa.yaml", {}),
}
"""How other blocks begin, the files that they go into, and what is replaced there."""


def lines(rows: list[dict]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def task_file(name: str) -> str:
    """A task of lm-eval in place of one whose data are on the hub."""
    return f"""task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: data/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{'abcd'.index(label)}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


ARTICLES = "".join(row or "\n" for row in RAW["train"])
EVERYDAY = [{"goal": page, "sol1": "Wait.", "sol2": "Go.", "label": i % 2} for i, page in enumerate(PAGES[:8])]
FILES = {
    **dict.fromkeys(("text.txt", "validation.txt"), PAGES[0] * 8),
    "prompt.txt": "def main(",
    "prompts.txt": "def main(\n\nclass\n",
    "train/1.txt": "".join(PAGES[:4]),
    "train/2.txt": "".join(PAGES[4:8]),
    "corpus/train-1.jsonl": lines([{"text": page} for page in PAGES[:8]]),
    "corpus/validation.jsonl": lines([{"text": PAGES[8]}]),
    "wiki.test.tokens": ARTICLES,
    "wiki.valid.tokens": ARTICLES * 3,
    "data/questions.jsonl": lines(LOGIQA),
    "data/logiqa_test.jsonl": lines(LOGIQA),
    "logiqa/test.jsonl": lines(LOGIQA),
    "logiqa/train.jsonl": lines(LOGIQA),
    "data/lambada_test.jsonl": lines([{"text": page.strip()} for page in PAGES[:8]]),
    "data/piqa_valid.jsonl": lines(EVERYDAY),
    **{f"my_tasks/{name}.yaml": task_file(name) for name in TASKS},
}
"""Files that commands name, written before."""


def changed(command: str) -> str:
    """A command as it is run."""
    return _changed(command)[0]


def rows_of(command: str) -> list[Row]:
    """The rows that change a command."""
    return _changed(command)[1]


def _changed(command: str) -> tuple[str, list[Row]]:
    matching = []
    for row in ROWS:
        if re.search(row.pattern, command):
            command = f"{re.sub(row.pattern, row.becomes, command)} {row.add}".strip()
            matching.append(row)
    return command, matching
