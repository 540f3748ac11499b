"""Write a run as a folder that Transformers opens, and whatever reads its format.

    python -m diffeqformer.export --workdir=runs/tiny --to=tiny-exported --dtype=bfloat16

It is the reverse of `import`: a GPT-2, a Llama or a GPT-NeoX with a layer for each step of depth
(docs/huggingface.md).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import flags, logging
from etils import epath
from flax import nnx, traverse_util
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import Step
from diffeqformer.config import base_config
from diffeqformer.console import command_line
from diffeqformer.console.progress import BITS_AT, read_curves
from diffeqformer.console.results import header, home_folder
from diffeqformer.errors import UserError, counted
from diffeqformer.fields.llama import BIASES
from diffeqformer.huggingface.architectures import ARCHITECTURES
from diffeqformer.huggingface.model_folder import tokenizer_files, written_whole
from diffeqformer.huggingface.pretrained import SENTENCE, difference, logits_of, open_pretrained, write_pretrained
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.parallel import hosts
from diffeqformer.transformer import Path, Transformer, abstract_model, check_weights, split_model, vector_field

LARGEST_ERROR = 1e-3
"""Of an exported model's logits in fp32, as a part of the largest one."""

SOLVERS_OF = {"gpt": ("lie_trotter",), "llama": ("lie_trotter",), "neox": ("euler", "lie_trotter")}
"""The solvers with which an architecture computes each field."""

READERS = {"norm_attention": ("query", "key", "value"), "norm_mlp": ("mlp_gate", "mlp_up")}
"""What reads each norm of a Llama's block."""

KEPT = {field.ours for row in ARCHITECTURES.values() for field in row.fields if field.ours} | {"biases", "solver"}
"""The fields of a model that its baseline shares."""


def export(
    workdir: epath.PathLike,
    folder: pathlib.Path,
    num_steps: int | None = None,
    dtype: str = "float32",
    step: Step = None,
) -> tuple[str, float]:
    """Write a run's model in a number of steps (None: as trained) as a folder in Hugging Face's format; compare both.

    Returns what was written, in words, and the largest error of a logit of it in `SENTENCE`, as a part of the largest.
    After an error, nothing is written.
    """
    if any(folder.iterdir()) if folder.is_dir() else folder.exists():
        raise UserError(f"--to: {folder} already holds something; give another folder, or delete it")
    check_exact(checkpoint.load_config(workdir, step))
    opened = checkpoint.load(workdir, step=step)
    model, tokenizer = opened.model.replace(dtype=jnp.dtype("float32")), opened.tokenizer
    files = tokenizer_files(tokenizer, model.max_length)
    num_steps = model.num_steps if num_steps is None else num_steps
    baseline, arrays = to_baseline(model, opened.config, num_steps)
    largest = max(float(np.abs(array).max()) for array in arrays.values())
    if largest > float(ml_dtypes.finfo(dtype).max):
        raise UserError(f"--dtype: {dtype} can't hold {largest:.3g}, the largest weight; take bfloat16 or float32")
    ids = tokenizer.encode(SENTENCE)[: model.max_length]
    exact = logits_of(model, ids, num_steps)
    params = jax.device_put(traverse_util.unflatten_dict(arrays))
    made = nnx.merge(split_model(abstract_model(baseline))[0], params)
    check_error(difference(logits_of(made, ids), exact))
    del model, params, made
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


def check_error(error: float) -> None:
    """Raise a UserError if what would be written doesn't compute the same as the run."""
    if not error <= LARGEST_ERROR:
        raise UserError(
            f"--workdir: what would be written differs by {error:.1e} of the largest logit, and it may by at most "
            f"{LARGEST_ERROR:g}; its architecture has one epsilon for all norms, so train a model with "
            "config.model.norm_epsilon"
        )


def check_exact(config: ConfigDict) -> None:
    """Raise a UserError if no architecture computes what a config's model does, in any number of steps."""
    model, block, wrong = config.model, vector_field(config.model), None
    if model.solver not in SOLVERS_OF[model.field]:
        wrong = f"computes the block of model.field {model.field} with model.solver {model.solver}; train one with "
        wrong += "--config.model.solver=lie_trotter"
    elif getattr(block, "norm_of_norm", False):
        wrong = "has a norm of a norm; train one with --config.model.norm_of_norm=False"
    elif model.field != "llama" and block.head_width * block.heads != block.width:
        wrong = f"of that field has {block.heads} heads of {block.head_width}, which are not {block.width} wide; "
        wrong += "train one without config.model.head_width"
    if wrong:
        raise UserError(f"--workdir: no architecture of Transformers {wrong}")


def to_baseline(
    model: Transformer, config: ConfigDict, num_steps: int
) -> tuple[ConfigDict, dict[Path, Float[np.ndarray, "..."]]]:
    """The config and the parameters, in fp32, of the baseline that computes the same as a model in `num_steps` steps.

    The length of a step becomes a part of what each branch writes with, the shift of a Llama's norm a bias of what
    reads it, and the factor of logits a part of the final norm. Rows that pad the vocabulary are left out. A Llama has
    one epsilon, that of the block's norms.
    """
    check_weights(model, num_steps)
    params = discretized_params(*split_model(model), num_steps, jnp.dtype("float32"), config.model.solver)
    arrays, layers, sizes = {}, {}, np.asarray(model.grid(num_steps).step_sizes)
    for path, leaf in traverse_util.flatten_dict(jax.device_get(params)).items():
        if path[0] == "depth":
            *_, layer, name = path
            leaf = np.broadcast_to(leaf, (num_steps, *leaf.shape)) if model.depth.constant else leaf
            if layer in ("attention_out", "mlp_down"):
                leaf = leaf * sizes.reshape(-1, *(1,) * (leaf.ndim - 1))
            layers.setdefault(layer, {})[name] = leaf
        else:
            arrays[path] = leaf * np.float32(model.head_gain) if path[0] == "final_norm" else leaf
    arrays["token_embedding",] = arrays["token_embedding",][: model.vocab_size]
    if not model.field.tied_head:
        arrays["lm_head",] = arrays["lm_head",][:, : model.vocab_size]
    baseline = base_config(config.name, config.model.field)
    baseline.model.update({name: config.model[name] for name in KEPT})
    baseline.model.update(num_steps=num_steps, norm_epsilon=model.field.epsilon, dropout=0.0, dtype="float32")
    if config.model.field == "llama":
        baseline.model.biases = _without_shifts(layers)
    return baseline, arrays | traverse_util.flatten_dict({"depth": {"layers": layers}})


def _without_shifts(layers: dict[str, dict[str, Float[np.ndarray, "T *D"]]]) -> str:
    """Turn the shifts of a Llama's norms into biases. The result is `model.biases`, which is `none` where it can be."""
    for norm, readers in READERS.items():
        shift = layers[norm].pop("shift", np.zeros(1))
        for reader in readers if shift.any() else ():
            added = (shift[:, None] @ layers[reader]["kernel"])[:, 0]
            layers[reader]["bias"] = layers[reader].get("bias", 0) + added
    there = {name for name, weights in layers.items() if "bias" in weights}
    biases = next(name for name in ("none", "attention", "all") if there <= {*BIASES[name]})
    for name in BIASES[biases]:
        kernel = layers[name]["kernel"]
        layers[name].setdefault("bias", np.zeros((len(kernel), kernel.shape[-1]), np.float32))
    return biases


def measured_bits(workdir: epath.PathLike, opened: checkpoint.Checkpoint, num_steps: int) -> dict[str, str]:
    """Bits per byte of texts at this checkpoint in that number of steps, by validation and `evaluate`."""
    config, found = opened.config.model, {}
    depth = "bits_per_byte" if num_steps == config.num_steps else f"{BITS_AT}{num_steps}"
    bits = read_curves(workdir).get(f"validation/{depth}", {}).get(opened.step)
    if bits is not None:
        found["the run's validation text"] = f"{bits:.4f}, read in {config.dtype}"
    for file in sorted(home_folder(workdir).glob("evaluation/*/*/results.json")):
        results = json.loads(file.read_bytes())
        for row in results["rows"] if results["checkpoint_step"] == opened.step else ():
            bits, how = row.get("bits_per_byte"), (row["solver"], row["num_steps"])
            if bits is not None and how == (config.solver, num_steps):
                windows = f"in windows of {results['window']:,} tokens"
                found[results["text"]] = f"{bits:.4f}, read in {results['dtype']} {windows}"
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


if __name__ == "__main__":
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    step = command_line.define_step()
    num_steps = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    folder = flags.DEFINE_string("to", None, "Folder to write.", required=True)
    dtype = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of the weights.")

    def command() -> None:
        hosts.check_one("export: this command")
        said, error = export(workdir.value, pathlib.Path(folder.value), num_steps.value, dtype.value, step.value)
        print(f"{said}\nlargest error of a logit: {error:.1e} of the largest, in {SENTENCE!r}, as opened again")

    command_line.run(command, verbosity=logging.FATAL)
