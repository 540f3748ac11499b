"""A model in one number of steps as the baseline that computes the same, which an architecture of Transformers has."""

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Float
from ml_collections import ConfigDict

from diffeqformer.config import base_config
from diffeqformer.errors import UserError
from diffeqformer.fields.llama import BIASES
from diffeqformer.huggingface.architectures import ARCHITECTURES
from diffeqformer.inference.discretize import discretized_params
from diffeqformer.transformer import Path, Transformer, check_weights, split_model, vector_field

SOLVERS_OF = {"gpt": ("lie_trotter",), "llama": ("lie_trotter",), "neox": ("euler", "lie_trotter")}
"""The solvers with which an architecture computes each field."""

READERS = {"norm_attention": ("query", "key", "value"), "norm_mlp": ("mlp_gate", "mlp_up")}
"""What reads each norm of a Llama's block."""

KEPT = {field.ours for row in ARCHITECTURES.values() for field in row.fields if field.ours} | {"biases", "solver"}
"""The fields of a model that its baseline shares."""


def check_exact(config: ConfigDict) -> None:
    """Check that an architecture computes what a config's model does, in any number of steps.

    Raises:
        UserError: if none does.
    """
    model, block = config.model, vector_field(config.model)
    if model.solver not in SOLVERS_OF[model.field]:
        raise UserError(
            f"--workdir: no architecture of Transformers computes the block of model.field {model.field} with "
            f"model.solver {model.solver}; train one with --config.model.solver=lie_trotter"
        )
    if getattr(block, "norm_of_norm", False):
        raise UserError(
            "--workdir: no architecture of Transformers has a norm of a norm; train one with "
            "--config.model.norm_of_norm=False"
        )
    if model.field != "llama" and block.head_width * block.heads != block.width:
        raise UserError(
            f"--workdir: heads of model.field {model.field} must together be as wide as the model, but {block.heads} "
            f"heads of {block.head_width} are not {block.width} wide; train one without config.model.head_width"
        )


def to_baseline(
    model: Transformer, config: ConfigDict, num_steps: int
) -> tuple[ConfigDict, dict[Path, Float[np.ndarray, "..."]]]:
    """The config and the parameters, in fp32, of the baseline that computes the same as a model in `num_steps` steps.

    The length of a step becomes a part of what each branch writes with, the shift of a Llama's norm a bias of what
    reads it, and the factor of logits a part of the final norm. Rows that pad the vocabulary are left out. A Llama has
    one epsilon, that of the block's norms.

    Raises:
        UserError: if the model can't take that number of steps, or its weights don't fit into memory.
    """
    check_weights(model, num_steps)
    params = discretized_params(*split_model(model), num_steps, jnp.dtype("float32"), config.model.solver)
    arrays = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params).items()}
    layers, sizes = {}, np.asarray(model.grid(num_steps).step_sizes)
    for path in [path for path in arrays if path[0] == "depth"]:
        leaf = arrays.pop(path)
        leaf = np.broadcast_to(leaf, (num_steps, *leaf.shape)) if model.depth.constant else leaf
        writes = path[-2] in ("attention_out", "mlp_down")
        layers.setdefault(path[-2], {})[path[-1]] = _scaled(leaf, sizes) if writes else leaf
    for path in [path for path in arrays if path[0] == "final_norm"]:
        arrays[path] = arrays[path] * np.float32(model.head_gain)
    arrays["token_embedding",] = arrays["token_embedding",][: model.vocab_size]
    if not model.field.tied_head:
        arrays["lm_head",] = arrays["lm_head",][:, : model.vocab_size]
    baseline = base_config(config.name, config.model.field)
    baseline.model.update({name: config.model[name] for name in KEPT})
    baseline.model.update(num_steps=num_steps, norm_epsilon=model.field.epsilon, dropout=0.0, dtype="float32")
    if config.model.field == "llama":
        baseline.model.biases = _without_shifts(layers)
    made = traverse_util.flatten_dict({"depth": {"layers": layers}})
    return baseline, {**arrays, **made}


def _scaled(leaf: Float[np.ndarray, "T *D"], sizes: Float[np.ndarray, "T"]) -> Float[np.ndarray, "T *D"]:
    return leaf * sizes.reshape(-1, *(1,) * (leaf.ndim - 1))


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
