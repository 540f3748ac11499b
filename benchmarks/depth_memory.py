"""Temporaries and time of a train step against the number of steps of depth, for each way to save memory.

    python benchmarks/depth_memory.py                                        # a small model, by this machine's compiler
    python benchmarks/depth_memory.py --time=36                              # seconds on this machine, side by side
    python benchmarks/depth_memory.py --config=configs/large.py --topology=v5e:8x8 --num_steps=12,192,1024
    python benchmarks/depth_memory.py --config=configs/llama_1b.py --topology=v5p:2x2x1 --num_steps=12,192,1024
    python benchmarks/depth_memory.py --draw                                 # the table and the picture of all rows

With --topology, the TPU compiler says what the step needs and models its time without attention and collectives; it
takes one to two minutes a row. A row that --results holds isn't made again. With a hypernetwork, all weights of a walk
are in memory unless they are generated in chunks. Chunks have at most 12 steps.
"""

import json
import pathlib
import runpy
import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags

from diffeqformer.config import base_config, check_config
from diffeqformer.console.results import write_json
from diffeqformer.parallel.mesh import make_mesh, mesh_shape
from diffeqformer.training.step import Program

CONFIG = flags.DEFINE_string("config", None, "A config to vary; by default a small model.")
TOPOLOGY = flags.DEFINE_string("topology", None, "A slice of TPUs, for its compiler; by default this machine.")
NUM_STEPS = flags.DEFINE_list("num_steps", ["12", "24", "48", "96", "192", "1024"], "Numbers of steps of depth.")
ONLY = flags.DEFINE_list("only", [], "Names of some of the ways; by default all.")
TIME = flags.DEFINE_integer("time", None, "Run train steps in this number of steps, on this machine, side by side.")
RESULTS = flags.DEFINE_string("results", "benchmarks/depth_memory.json", "The rows so far; new ones are added.")
DRAW = flags.DEFINE_bool("draw", False, "Print the tables and draw docs/pictures/depth_memory.png, of all rows.")

CHUNK = 12
REVERSIBLE = {"solver": "reversible_euler", "remat": "reversible"}
WAYS = {
    "none": {"remat": "none"},
    "products": {"remat": "products"},
    "step": {"remat": "step"},
    "binomial": {"remat": "binomial", "snapshots": 8},
    "reversible": REVERSIBLE,
    "step in chunks": {"remat": "step", "generate_chunk": CHUNK},
    "one state a chunk": {"remat": "binomial", "snapshots": 1024, "generate_chunk": CHUNK},
    "binomial in chunks": {"remat": "binomial", "snapshots": 8, "generate_chunk": CHUNK},
    "reversible in chunks": {**REVERSIBLE, "generate_chunk": CHUNK},
}
COLOURS_OF = {way: list(WAYS).index(way.partition(" in ")[0]) for way in WAYS}  # chunks are dashed
HEIGHTS = {  # of labels: some lines end together
    "step": 4, "binomial": -10, "reversible": -17, "one state a chunk": 5, "reversible in chunks": -10,
}  # fmt: skip
SMALL = dict(
    width=128, heads=4, mlp=512, vocab_size=512, max_length=128, time_embed_dim=16, sinusoidal_dim=16, dropout=0.0,
    dtype="float32",
)  # fmt: skip


def config_of(way: str, num_steps: int):
    """The config of a row."""
    if CONFIG.value:
        config = runpy.run_path(CONFIG.value)["get_config"]()
    else:
        config = base_config("small", "diffeqformer", "gpt")
        config.update(steps=1000, batch_size=8, sequence_length=128)
        config.model.update(SMALL)
    config.model.update(num_steps=num_steps, **WAYS[way])
    return config


def compiled_here(config):
    """The initial state, a batch and the compiled train step on this machine, and the seconds of compilation."""
    check_config(config, 1)
    program = Program(config, make_mesh((1, 1, 1), jax.devices()[:1]))
    tokens = np.random.RandomState(0).randint(config.model.vocab_size, size=(config.batch_size, config.sequence_length))
    start = time.monotonic()
    step = program.train_step.lower(program.state_shapes, tokens).compile()
    return program.init, tokens, step, time.monotonic() - start


def on_this_machine(config) -> dict:
    """MiB of temporaries, and seconds of compilation."""
    *_, step, seconds = compiled_here(config)
    return {"compile": seconds, "mib": step.memory_analysis().temp_size_in_bytes / 2**20}


def time_side_by_side(num_steps: int, rounds: int = 6) -> None:
    """Print the median seconds of a train step of each way, and its ratio to the way called step, by round."""
    ways = {}
    for way in dict.fromkeys(["step", *(ONLY.value or WAYS)]):
        init, tokens, step, _ = compiled_here(config_of(way, num_steps))
        ways[way] = [init(), tokens, step, []]
    for _ in range(rounds):
        for way in ways.values():
            state, tokens, step, seconds = way
            start = time.monotonic()
            way[0], scalars = step(state, tokens)
            scalars["loss"].block_until_ready()
            seconds.append(time.monotonic() - start)
    for name, (*_, seconds) in ways.items():
        ratios = np.array(seconds[1:]) / np.array(ways["step"][-1][1:])
        print(f"| {name} | {statistics.median(seconds[1:]):.2f} | {np.median(ratios):.2f} |", flush=True)


def on_tpus(config) -> dict:
    """The same by the TPU compiler, for a device. Without a time if it doesn't fit."""
    from diffeqformer.planning.chips import chip_of
    from diffeqformer.planning.estimate import milliseconds_of
    from diffeqformer.planning.programs import compile_train_steps, size_of, tpu_devices

    devices = tpu_devices(TOPOLOGY.value, 1)
    if config.data.tokenizer == "sentencepiece":
        config.data.tokenizer_file = "any"
    check_config(config, len(devices), "tpu")
    program = Program(config, make_mesh(mesh_shape(config.mesh, len(devices)), devices))
    start = time.monotonic()
    [planned] = compile_train_steps(config, program)
    found = {"compile": time.monotonic() - start}
    if not planned.parts:  # the compiler counts temporaries, or all
        return found | {"mib": max(planned.needed - size_of(program.state_shapes), 0) / 2**20, "fits": False}
    seconds = milliseconds_of(planned, chip_of(TOPOLOGY.value), len(devices))["cycles_alone"] / 1e3
    return found | {"mib": planned.parts["temporaries"] / 2**20, "seconds": seconds}


def measure(rows: dict) -> None:
    """Make the rows that are missing."""
    of_config = pathlib.Path(CONFIG.value).stem if CONFIG.value else "small"  # the shape of `SMALL`
    where = f"{of_config} on {TOPOLOGY.value}" if TOPOLOGY.value else f"{CONFIG.value or 'small'} on this CPU"
    pathlib.Path(RESULTS.value).parent.mkdir(parents=True, exist_ok=True)
    for num_steps in map(int, NUM_STEPS.value):
        for way in ONLY.value or WAYS:
            name = f"{where}, {way}, {num_steps} steps"
            if name not in rows:
                config = config_of(way, num_steps)
                found = (on_tpus if TOPOLOGY.value else on_this_machine)(config)
                rows[name] = {"where": where, "way": way, "num_steps": num_steps, **found}
                write_json(pathlib.Path(RESULTS.value), rows)
            print(name, {key: value for key, value in rows[name].items() if key in ("mib", "seconds", "compile")})


def table_of(rows: list[dict], key: str, numbers: list[int]) -> list[str]:
    """A Markdown table of one of the figures: a row for each way."""
    lines = ["| | " + " | ".join(f"{number:,}" for number in numbers) + " |", "| -- |" + " -- |" * len(numbers)]
    for way in WAYS:
        found = {row["num_steps"]: row.get(key) for row in rows if row["way"] == way}
        cells = [f"{value:,.3g}" if (value := found.get(number)) is not None else "" for number in numbers]
        if any(cells):
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def draw(rows: dict) -> None:
    """Print the tables; draw temporaries against the number of steps. Numbers are the slopes of the lines' ends."""
    from diffeqformer.console.figures import COLOURS, new_figure

    places = sorted({row["where"] for row in rows.values()}, key=lambda where: (not where.startswith("small"), where))
    columns = min(3, len(places) + 1)  # with a panel's place for the legend
    lines = -(-(len(places) + 1) // columns)
    figure, axes = new_figure(lines, columns, (4.5 * columns, 3.6 * lines))
    for axis in axes.flat[len(places) :]:
        axis.axis("off")
    for axis, where in zip(axes.flat, places):
        here = [row for row in rows.values() if row["where"] == where]
        numbers = sorted({row["num_steps"] for row in here})
        for key in ("mib", "seconds", "compile"):
            print("\n".join([f"{where}: {key}", "", *table_of(here, key, numbers), ""]))
        for way in WAYS:
            points = sorted((row["num_steps"], row["mib"]) for row in here if row["way"] == way)
            style = {"color": COLOURS[COLOURS_OF[way]], "linestyle": "--" if "chunk" in way else "-"}
            [line] = axis.plot(*zip(*points) if points else ((), ()), marker="o", markersize=3, label=way, **style)
            if len(points) > 1:
                (*_, (before, less), last) = points
                slope = np.log(last[1] / less) / np.log(last[0] / before)
                axis.annotate(
                    f"{slope:.2f}", last, xytext=(5, HEIGHTS.get(way, -3)), textcoords="offset points", fontsize=7,
                    color=line.get_color(),
                )  # fmt: skip
        axis.set(ylabel="temporaries, MiB", xlabel="steps of depth", xscale="log", yscale="log")
        axis.margins(x=0.13)
        axis.set_title(where)
        axis.set_xticks(numbers, labels=[f"{number:,}" for number in numbers])
        axis.tick_params(axis="x", which="minor", bottom=False)
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", fontsize=10)
    figure.savefig("docs/pictures/depth_memory.png", dpi=110)


def main(_) -> None:
    path = pathlib.Path(RESULTS.value)
    rows = json.loads(path.read_text()) if path.exists() else {}
    for way in ONLY.value:
        if way not in WAYS:
            sys.exit(f"--only: must be of {', '.join(WAYS)}, but it has {way!r}")
    if TIME.value:
        time_side_by_side(TIME.value)
    else:
        draw(rows) if DRAW.value else measure(rows)


if __name__ == "__main__":
    app.run(main)
