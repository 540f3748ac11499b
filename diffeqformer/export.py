"""Write a run as a folder that Transformers opens, and whatever reads its format.

    python -m diffeqformer.export --workdir=runs/tiny --to=tiny-exported --dtype=bfloat16

It is the reverse of `import`: a GPT-2, a Llama or a GPT-NeoX with a layer for each step of depth
(docs/huggingface.md).
"""

import json
import pathlib

import ml_dtypes
import numpy as np
from absl import flags, logging
from etils import epath
from flax import nnx

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import Step
from diffeqformer.console import command_line
from diffeqformer.console.progress import BITS_AT, read_curves
from diffeqformer.console.results import header, home_folder
from diffeqformer.errors import UserError, counted
from diffeqformer.huggingface.folder import check_new, written_whole
from diffeqformer.huggingface.pretrained import (
    SENTENCE,
    baseline_model,
    difference,
    logits_of,
    open_pretrained,
    write_pretrained,
)
from diffeqformer.huggingface.tokenizer_files import tokenizer_files
from diffeqformer.inference.baseline import check_exact, to_baseline
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Path, abstract_model, split_model

DTYPES = ("float32", "bfloat16", "float16")
LARGEST_ERROR = 1e-3
"""Of an exported model's logits in fp32, as a part of the largest one."""


def export(
    workdir: epath.PathLike,
    folder: pathlib.Path,
    num_steps: int | None = None,
    dtype: str = "float32",
    step: Step = None,
) -> tuple[str, float]:
    """Write a run's model in a number of steps as a folder in Hugging Face's format, and compare both.

    Args:
        workdir: of the run.
        folder: to write; it must be empty if it is there.
        num_steps: steps of depth; None: as trained.
        dtype: one of `DTYPES`, of the weights.
        step: see `diffeqformer.checkpoints.folder.Step`.

    Returns:
        What was written, in words, and the largest error of a logit of it in `SENTENCE`, as a part of the largest.

    Raises:
        UserError: if no architecture computes the same, or the folder can't be written. Then nothing is.
    """
    check_new(folder)
    check_exact(checkpoint.load_config(workdir, step))
    opened = checkpoint.load(workdir, step=step)
    config, tokenizer = opened.config.copy_and_resolve_references(), opened.tokenizer
    files = tokenizer_files(tokenizer, config.model.max_length)
    num_steps = config.model.num_steps if num_steps is None else num_steps
    config.model.dtype = "float32"
    model = nnx.merge(split_model(abstract_model(config))[0], split_model(opened.model)[1])
    baseline, arrays = to_baseline(model, config, num_steps)
    check_range(arrays, dtype)
    ids = tokenizer.encode(SENTENCE)[: model.max_length]
    exact = logits_of(model, ids, num_steps)
    check_error(difference(logits_of(baseline_model(baseline, arrays), ids), exact))
    del model
    end = tokenizer.end_of_text
    with written_whole(folder) as partial:
        write_pretrained(partial, baseline, arrays, dtype, {"bos_token_id": end, "eos_token_id": end})
        for name, content in files.items():
            (partial / name).write_bytes(content)
        found = open_pretrained(partial)
        if (found.tokenizer.encode(SENTENCE)[: len(ids)], found.tokenizer.end_of_text) != (ids, end):
            raise UserError("--workdir: its tokenizer gives other ids as a tokenizer.json; train with another one")
        error = difference(logits_of(found.model(), ids), exact)
        if dtype == "float32":
            check_error(error)
        says = found.describe()
        (partial / "README.md").write_text(model_card(workdir, opened, num_steps, says, error), encoding="utf-8")
        size = sum(path.stat().st_size for path in partial.iterdir())
    return f"{folder}: {says}\n{size / 1e6:,.1f} MB", error


def check_range(arrays: dict[Path, np.ndarray], dtype: str) -> None:
    """Raise a UserError if a type can't hold numbers as large as these."""
    largest = max(float(np.abs(array).max()) for array in arrays.values())
    if largest > float(ml_dtypes.finfo(dtype).max):
        raise UserError(f"--dtype: {dtype} can't hold {largest:.3g}, the largest weight; take bfloat16 or float32")


def check_error(error: float) -> None:
    """Raise a UserError if what would be written doesn't compute the same as the run."""
    if not error <= LARGEST_ERROR:
        raise UserError(
            f"--workdir: what would be written differs by {error:.1e} of the largest logit, and it may by at most "
            f"{LARGEST_ERROR:g}; its architecture has one epsilon for all norms, so train a model with "
            "config.model.norm_epsilon"
        )


def measured_bits(workdir: epath.PathLike, opened: checkpoint.Checkpoint, num_steps: int) -> dict[str, str]:
    """Bits per byte of texts at this checkpoint in that number of steps, by validation and `evaluate`."""
    config, found = opened.config.model, {}
    depth = "bits_per_byte" if num_steps == config.num_steps else f"{BITS_AT}{num_steps}"
    bits = read_curves(workdir).get(f"validation/{depth}", {}).get(opened.step)
    if bits is not None:
        found["the run's validation text"] = f"{bits:.4f}, read in {config.dtype}"
    how = {"solver": config.solver, "num_steps": num_steps}
    for file in sorted(home_folder(workdir).glob("evaluation/*/*/results.json")):
        results = json.loads(file.read_bytes())
        for row in results["rows"]:
            measured = how.items() <= row.items() and results["checkpoint_step"] == opened.step
            if measured and row.get("bits_per_byte") is not None:
                found[results["text"]] = (
                    f"{row['bits_per_byte']:.4f}, read in {results['dtype']} in windows of {results['window']:,} tokens"
                )
    return found


def model_card(workdir: epath.PathLike, opened: checkpoint.Checkpoint, num_steps: int, says: str, error: float) -> str:
    """The README.md of an exported model: what it is, how it was trained, and what was measured."""
    config, about = opened.config, header(workdir, opened)
    origin, per_step = opened.about.materialized_from or opened.about.base, config.batch_size * config.sequence_length
    rows = {
        "model": f"{config.model.kind}, field {config.model.field}",
        "depth": f"{counted(num_steps, 'step')} by {config.model.solver}; trained in {about['trained_num_steps']} by "
        f"{about['trained_solver']}",
        "training": f"{counted(opened.step, 'step')} of {per_step:,} tokens" if opened.step else "none",
    }
    if origin:
        rows["made from"] = f"{pathlib.PurePath(origin['workdir']).name} at step {origin['step']:,}"
    measured = measured_bits(workdir, opened, num_steps)
    rows |= {f"bits per byte of {text}": bits for text, bits in measured.items()}
    rows["largest error of a logit"] = f"{error:.1e} of the largest, against the run in float32"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {about['title']}\n\n"
        f"Written by `diffeqformer export`: {says.splitlines()[0]}.\n\n| | |\n| -- | -- |\n{table}\n\n"
        "Every text follows an end-of-text token, and ends with one.\n"
    )


def main() -> None:
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    step = command_line.define_step()
    num_steps = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    folder = flags.DEFINE_string("to", None, "Folder to write.", required=True)
    dtype = flags.DEFINE_enum("dtype", "float32", DTYPES, "Type of the weights.")

    def command() -> None:
        hosts.check_one("export: this command")
        where = workdir.value, pathlib.Path(folder.value)
        said, error = export(*where, num_steps.value, dtype.value, step.value)
        print(f"{said}\nlargest error of a logit: {error:.1e} of the largest, in {SENTENCE!r}, as opened again")

    command_line.run(command, verbosity=logging.FATAL)


if __name__ == "__main__":
    main()
