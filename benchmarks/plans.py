"""Plan the train step of every config, each on a slice that its docstring allows, and print the table of plans.

    pip install -e '.[tpu]' -c constraints.txt
    python benchmarks/plans.py

A plan takes one to six minutes. It is written to --folder, and one that is there isn't made again. So the command can
be stopped at any time, and repeated.
"""

import json
import pathlib
import subprocess
import sys

from absl import app, flags

FOLDER = flags.DEFINE_string("folder", "plans", "Folder for the plans.")

ROWS = [  # the config, the topology, and further options
    ("wikitext103_small", "v5e:1x1", "microbatches=0"),
    ("wikitext103_small:gpt", "v5e:1x1", "microbatches=0"),
    ("wikitext103_small:shared", "v5e:1x1", "microbatches=0"),
    ("wikitext103_small", "v5e:1x1", "microbatches=64"),
    ("wikitext103_small:gpt", "v5e:1x1", "microbatches=64"),
    ("wikitext103_small:shared", "v5e:1x1", "microbatches=64"),
    ("small", "v5e:1x1", "microbatches=0"),
    ("wikitext103_small", "v5e:2x4"),
    ("wikitext103_medium", "v5e:2x4"),
    ("small", "v5e:2x4"),
    ("medium", "v5e:2x4"),
    ("finetune_openwebtext_to_wikitext103:pretrain", "v5e:2x4"),
    ("finetune_wikitext103_to_openwebtext:pretrain", "v5e:2x4"),
    ("large", "v5e:8x8"),
    ("large", "v5p:2x2x4"),
    ("llama_1b", "v5p:2x2x1", "data.tokenizer_file=any"),
    ("wikitext103_small:recipe", "v5e:2x4"),
    ("wikitext103_medium:recipe", "v5e:2x4"),
    ("small:recipe", "v5e:2x4"),
    ("medium:recipe", "v5e:2x4"),
    ("large:recipe", "v5e:8x8"),
    ("llama_1b:recipe", "v5p:2x2x1", "data.tokenizer_file=any"),
]
HEAD = "| config | chips | mesh | GiB per chip | ms per step | of peak | hours |"


def row_of(config: str, topology: str, *options: str) -> str:
    """A row of the table. It is planned if its file is missing."""
    file = pathlib.Path(FOLDER.value, f"{'-'.join([config, topology, *options])}.json".replace(":", "-"))
    if not file.exists():
        name, colon, model = config.partition(":")
        command = [sys.executable, "-m", "diffeqformer.plan", f"--config=configs/{name}.py{colon}{model}"]
        command += [f"--config.{option}" for option in options]
        command += [f"--topology={topology}", "--programs=train", f"--json={file}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    plan = json.loads(file.read_text())
    memory, mesh = plan["memory"], plan["mesh"]
    sizes = f"{mesh['data'] * mesh['generator']}x{mesh['fsdp']}x{mesh['tensor']}"
    cells = [", ".join([config, *options]), topology, sizes, f"{(memory['capacity'] - memory['to_spare']) / 2**30:.1f}"]
    if "training" in plan:
        [times] = plan["milliseconds"].values()
        least, most = plan["training"]["cycles_alone"], plan["training"]["with_account"]
        cells.append(f"{times['cycles_alone']:,.0f}–{times['with_account']:,.0f}")
        cells.append(f"{100 * most['utilisation']:.0f}–{100 * least['utilisation']:.0f}%")
        cells.append(f"{least['hours']:,.1f}–{most['hours']:,.1f}")
    else:
        cells += ["does not fit", "", ""]
    return f"| {' | '.join(cells)} |"


def main(_) -> None:
    pathlib.Path(FOLDER.value).mkdir(parents=True, exist_ok=True)
    rows = [row_of(*row) for row in ROWS]
    print("\n".join([HEAD, "| -- " * HEAD.count(" | ") + "| -- |", *rows]))


if __name__ == "__main__":
    app.run(main)
