"""Models and configs that several tests build."""

import importlib.util
import pathlib

from flax import nnx

import authors
from diffeqformer.config import base_config
from diffeqformer.models.layers import Context
from diffeqformer.models.transformer import Transformer

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = ("tiny", "small", "medium", "large")
NO_DROPOUT = Context()


def load_config(name: str, model: str = "diffeqformer"):
    """The config of a file in configs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(model)


def build_model(kind: str, **changes) -> Transformer:
    """A model of the authors' tiny sizes with parameters of our own start."""
    return Transformer(authors.model_config(kind, **changes), nnx.Rngs(0))


def toy_config(kind: str = "diffeqformer", **changes):
    """A whole config that trains in seconds; `changes` are fields with dots as double underscores."""
    config = base_config("toy", kind)
    config.update(steps=6, batch_size=8, sequence_length=16, log_every=1, eval_every=100, checkpoint_every=100)
    config.model.update(authors.model_config(kind, vocab_size=257, generator_start="varying"))
    config.data.task = "python_stdlib"
    config.sample.update(prompt="def ", length=16)
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        (config[section] if section else config)[field] = value
    return config
