"""Plans of the configs' runs, by the real TPU compiler: `make test-tpu`."""

import collections
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from diffeqformer.planning.hlo import computations
from helpers import ROOT

pytestmark = pytest.mark.tpu
GIB = 2**30


def said_by(*command: str) -> str:
    command = [sys.executable, *command]
    environment = {**os.environ, "XLA_FLAGS": ""}  # without the tests' own
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


def planned(folder: pathlib.Path, *options: str, programs: str = "train") -> dict:
    said_by("-m", "diffeqformer.plan", *options, f"--programs={programs}", f"--json={folder}/plan.json")
    return json.loads((folder / "plan.json").read_text())


def step_of(plan: dict) -> tuple[float, float]:
    """The GiB of arguments and of temporaries of its only train step."""
    [step] = (found for name, found in plan["memory"]["by_program"].items() if name.startswith("train step"))
    return step["arrays"] / GIB, step["temporaries"] / GIB


def of_depth(*depths: int) -> list[str]:
    """The names of the programs that a run has for each of its depths, the first of which is the config's own."""
    steps = [f"train step, {depth} steps of depth" for depth in sorted(depths, reverse=True)]
    return steps + [f"{what}, {depth} steps of depth" for depth in depths for what in ("weights", "evaluation")]


def test_a_fine_tuning_run_is_planned_whole(run, tmp_path):
    """The weights of its base come before its initial state."""
    options = [
        "--config=configs/finetune_openwebtext_to_wikitext103.py:lora", f"--config.base={run}", "--topology=v5e:2x2",
        "--config.data.tokenizer=bytes", "--config.mesh.fsdp=1", "--config.sequence_length=64",
        "--config.model.lora_rank=4", "--config.model.num_steps=6",
    ]  # fmt: skip
    plan = planned(tmp_path, *options, programs="all")
    assert list(plan["memory"]["by_program"]) == ["weights of the base", "initial state", *of_depth(6)]
    assert plan["fits"] and plan["attention"].startswith("plain") and plan["training"]["cycles_alone"]["hours"] > 0


SHORT = [  # a small run whose arrays are whole tiles
    "--config=configs/tiny.py:diffeqformer", "--topology=v5e:2x2", "--config.batch_size=32",
    "--config.sequence_length=512", "--config.model.num_steps=8", "--config.model.max_length=512",
    "--config.model.width=256", "--config.model.mlp=1024", "--config.model.vocab_multiple=128",
    "--config.model.dtype=bfloat16", "--config.model.training_depths=4,8,12",
]  # fmt: skip


def test_a_run_of_drawn_depths_is_planned_whole(tmp_path):
    """Its figures agree with one another. By the compiler's cycles, a step's time is linear in its steps of depth."""
    plan = planned(tmp_path, *SHORT, programs="all")
    memory, training, milliseconds = plan["memory"], plan["training"], plan["milliseconds"]
    assert list(memory["by_program"]) == ["initial state", *of_depth(8, 4, 12)]
    largest = memory["by_program"][memory["largest_program"]]
    assert largest["needed"] == sum(largest[part] for part in ("arrays", "temporaries", "results"))
    assert plan["fits"] and memory["to_spare"] == memory["capacity"] - largest["needed"] > 0
    assert all(times["cycles_alone"] < times["with_account"] for times in milliseconds.values())
    for bound in ("cycles_alone", "with_account"):
        seconds = sum(times[bound] for times in milliseconds.values()) / 1e3 / 3
        assert training[bound]["hours"] == pytest.approx(5000 * seconds / 3600)
        assert training[bound]["tokens_per_second"] == pytest.approx(32 * 512 / seconds)
        assert 0 < training[bound]["utilisation"] < 1
    steps = list(milliseconds.values())  # from the deepest on
    cycles, attention = [step["cycles_alone"] for step in steps], [step["by_cause"]["attention"] for step in steps]
    for many, some, few in (cycles, attention):
        assert many == pytest.approx(2 * some - few, rel=0.02)
    assert cycles[1] > 1.3 * cycles[2]


PRODUCT = """
import jax, json
from diffeqformer.planning import chips, programs, times
shares = {}
for kind, topology in {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}.items():
    place = jax.sharding.SingleDeviceSharding(programs.tpu_devices(f"{kind}:{topology}", slices=1)[0])
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=place) for shape in ((16_384, 2048), (2048, 8192))]
    compiled = programs.compile_for_tpu("product", jax.jit(jax.numpy.dot).lower(*shapes))
    seconds = sum(times.seconds_by_cause(compiled.module, chips.TPUS[kind], slice_size=1).values())
    shares[kind] = 2 * 16_384 * 2048 * 8192 / chips.TPUS[kind].peak / seconds
print(json.dumps(shares))
"""


def test_a_large_product_takes_little_longer_than_at_peak():
    shares = json.loads(said_by("-c", PRODUCT))
    assert shares == pytest.approx({"v5e": 0.98, "v5p": 0.98, "v6e": 0.89, "tpu7x": 0.94}, abs=0.02)


@pytest.mark.parametrize(
    "options, state, heads, ratio",
    [
        (["--config=configs/large.py", "--topology=v5p:2x2x4"], 1.44, 4.22, 0.927),
        (["--config=configs/large.py", "--topology=v5e:4x8", "--slices=2"], 0.78, 1.05, 1.000),
        (["--config=configs/llama_1b.py", "--topology=v5p:2x2x1", "--config.data.tokenizer_file=any"], 18.57, 0, 1.118),
    ],
)
def test_a_step_fits(options, state, heads, ratio, tmp_path):
    """The account for GPUs, whose attention stores as much, finds what the compiler lays out for these.

    Args:
        state: GiB per chip of the state and a batch.
        heads: GiB per chip of queries, keys and values, which GPUs keep and TPUs compute again.
        ratio: of what the account finds to what the compiler lays out. With `step`, it counts too much.
    """
    plan = planned(tmp_path, *options)
    assert plan["fits"] and plan["attention"] == "splash"
    assert step_of(plan)[0] == pytest.approx(state, abs=0.006)
    of_config = [option for option in options if option.startswith("--config")]
    by_shapes = planned(tmp_path, *of_config, f"--topology=h100:{plan['devices']}")
    needed, counted = (found["memory"]["capacity"] - found["memory"]["to_spare"] for found in (plan, by_shapes))
    assert (counted - heads * GIB) / needed == pytest.approx(ratio, abs=0.02)


def compiled(folder: pathlib.Path) -> tuple[dict[str, list[str]], list[str]]:
    """The computations of a dumped step, and the names of its loops over depth."""
    [file] = folder.glob("*_train_step*.after_codegen.txt")
    bodies = computations(file.read_text())
    return bodies, re.findall(r" while\(.*body=(%[\w.-]+)", "\n".join(bodies["ENTRY"]))


def check_projections(folder: pathlib.Path, parts: int) -> None:
    """Nothing has the shape of a P (its part on a chip) but parameters and moments, before and after their update."""
    bodies, loops = compiled(folder)
    lines = [line for name in ("ENTRY", *loops) for line in bodies[name]]
    made = [re.match(r"\s+(?:ROOT )?%([\w-]+)\S* = (.*?) ([a-z-]+)\(", line) for line in lines]
    projection = rf"f32\[({1280 // parts}|{5120 // parts}),96,(1280|3840|5120)\]"
    of_projections = [
        (name if kind == "custom-call" else kind, result)
        for name, result, kind in (found.groups() for found in made if found)
        if re.search(projection, result)
    ]
    kinds = collections.Counter(kind for kind, _ in of_projections)
    assert kinds["parameter"] == 12 and kinds["update"] == 4
    # The rest are names for parts of tuples, and what the compiler moves to VMEM, S(1), ahead of time, or back.
    moved = set(kinds) - {"parameter", "update", "get-tuple-element", "tuple"}
    assert moved <= ({"async-start", "async-done", "copy-start", "copy-done", "custom-call"} if parts > 1 else set())
    assert all("S(1)" in result for kind, result in of_projections if kind in moved - {"copy-done"})


@pytest.mark.parametrize("remat, most, time", [("step", 2.2, 181), ("products", 4.3, 170)])
def test_a_step_on_64_chips_wastes_nothing(remat, most, time, tmp_path):
    """No loop over depth writes anything to memory that the random numbers are drawn from, of the state's size.

    The time is exact for the libtpu of constraints.txt. Another version may need another bound; a slower step does not.
    """
    options = ("--config=configs/large.py", f"--config.model.remat={remat}", "--topology=v5e:8x8", f"--dump={tmp_path}")
    plan = planned(tmp_path, *options)
    arguments, temporaries = step_of(plan)
    assert arguments == pytest.approx(0.78, abs=0.006) and temporaries < most and plan["attention"] == "splash"
    assert round(plan["milliseconds"]["train step, 36 steps of depth"]["cycles_alone"]) <= time
    check_projections(tmp_path, parts=8 * 4)
    bodies, loops = compiled(tmp_path)
    state = r"= \(?\w+\[4,1024,1280\]\S* "
    assert len(loops) == 2 and any(re.search(f"{state}fusion", line) for loop in loops for line in bodies[loop])
    assert not any(re.search(f"{state}broadcast", line) for loop in loops for line in bodies[loop])


@pytest.mark.parametrize("topology, batch_size", [("v5p:1x1x1", 16), ("v6e:1x1", 8)])
def test_the_gradient_of_a_projection_is_never_stored(topology, batch_size, tmp_path):
    options = (f"--topology={topology}", f"--config.batch_size={batch_size}", "--config.mesh.fsdp=1")
    large = ("--config=configs/large.py", "--config.model.remat=step")
    _, temporaries = step_of(planned(tmp_path, *large, *options, f"--dump={tmp_path}"))
    assert temporaries < 10  # dP alone would take 5.5
    check_projections(tmp_path, parts=1)


@pytest.mark.parametrize(
    "topology, chip",
    [
        ("v4:2x2x1", "TPU v4: blocks of 14 MiB, cores per device 1"),  # on a pod, a device has both cores of a chip
        ("v5e:2x2", "TPU v5 lite: blocks of 14 MiB, cores per device 1"),
        ("v5p:2x2x1", "TPU v5: blocks of 14 MiB, cores per device 2"),
        ("v6e:2x2", "TPU v6 lite: blocks of 28 MiB, cores per device 1"),
        ("tpu7x:2x2x1", "TPU7x: blocks of 28 MiB, cores per device 1"),
    ],
)
def test_kernels_leave_projections_in_place(topology, chip):
    """They compile for GPT-large's layers, and no program around them needs memory of the size of P or copies it.

    A layer's backward pass, clipping and update move at most 7.9 times the bytes of P, and its forward pass 1.25 times.
    """
    moved = collections.defaultdict(list)
    said, *lines = said_by("benchmarks/compile_kernels.py", f"--topology={topology}").splitlines()
    assert said == chip and len(lines) == 3 * 17
    for line in lines:
        name, times, width, inputs, outputs = re.match(r"(\w+) T=(\d+) E=(\d+) (\d+)x(\d+)", line).groups()
        temporary, in_place, copies = map(
            int, re.search(r"temporaries (\d+).*place (\d+).*copies (\d+)", line).groups()
        )
        of_h = 4 * int(times) * 128 * math.ceil(int(width) / 128)  # bytes in tiles; each of two cores has a gradient
        assert temporary <= 3 * of_h + 2**17 and copies == 0
        assert in_place >= (name == "update") * (4 + 4 + 4) * int(width) * int(inputs) * int(outputs)
        if (times, width) == ("36", "96"):
            moved[name].append(float(re.search(r"moves (\S+) P", line)[1]))
    assert len(moved["project"]) == 9 and max(moved["project"]) <= 1.25
    assert max(map(sum, zip(moved["gradients"], moved["update"], strict=True))) <= 7.9
