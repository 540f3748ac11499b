"""Write a model's weights at the times of one grid as a small checkpoint.

    python -m diffeqformer.materialize --workdir=runs/tiny --num_steps=4 --dtype=bfloat16

The hypernetwork and the optimizer's state are left out. The result is as small as a vanilla transformer, and every
command that takes a run also takes it.
"""

import dataclasses

import jax
from absl import flags, logging
from etils import epath

from diffeqformer import checkpoint
from diffeqformer.console import command_line
from diffeqformer.errors import UserError
from diffeqformer.inference.discretize import discretize, discretized_config
from diffeqformer.transformer import MODELS, split_model


def materialize(
    workdir: epath.PathLike,
    num_steps: int | None = None,
    dtype: str | None = None,
    output: epath.PathLike | None = None,
) -> epath.Path:
    """Write the newest checkpoint of a run as a discretized model.

    Args:
        workdir: folder of the run.
        num_steps: steps of depth; None: as trained.
        dtype: float32 or bfloat16, for both the weights and the computation; None: the run's compute type.
        output: folder of the new checkpoint, which must not hold one yet; by default a subfolder of the run's.

    Returns:
        The folder. The model in it is numbered by the training step of its source.

    Raises:
        UserError: if there is no checkpoint, if the folder already has one or can't be written, if the model can't take
            that number of steps, or if its solver needs weights at several times within a step.
    """
    opened = checkpoint.load(workdir)
    trained = opened.config.model
    if trained.solver not in MODELS["discretized"].solvers():
        raise UserError(
            f"--workdir: a model that was trained with {trained.solver} takes weights at several times of each step, "
            "and a materialized one has one set for each; use the run itself, or fine-tune it with --config.base"
        )
    num_steps = trained.num_steps if num_steps is None else num_steps
    dtype = dtype or opened.config.model.dtype
    output = epath.Path(output or epath.Path(workdir) / f"materialized-{num_steps}-{dtype}")
    _, params = split_model(discretize(opened.model, opened.config, num_steps, dtype))
    jax.block_until_ready(params)  # any error is raised here, before the folder is created
    with checkpoint.reachable("--output", output):
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
        occupied = (output / "checkpoints").exists() and any((output / "checkpoints").iterdir())
    if occupied:
        raise UserError(
            f"--output: {output} already holds a checkpoint, or the remains of one; give another folder, or delete it"
        )
    about = dataclasses.replace(
        opened.about,
        config=discretized_config(opened.config, num_steps, dtype).to_dict(),
        materialized_from={"workdir": str(workdir), "step": opened.step, "model": opened.config.model.to_dict()},
        time_spent=None,
    )
    try:
        with checkpoint.open_checkpoints(output, kept=1) as manager:
            checkpoint.save(manager, opened.step, {"params": params}, about)
            checkpoint.check(manager, wait=True)
    except BaseException:
        (output / "checkpoints").rmtree(missing_ok=True)  # it was empty before this
        raise
    return output


def size_of(path: epath.Path) -> int:
    """Size in bytes of a file, or of all files in a folder."""
    return sum(map(size_of, path.iterdir())) if path.is_dir() else path.stat().length


def main() -> None:
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    num_steps = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    dtype = flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Type of weights and computation; by default as in training."
    )
    output = flags.DEFINE_string("output", None, "Folder to write; by default materialized-STEPS-DTYPE in the run's.")

    def command() -> None:
        folder = materialize(workdir.value, num_steps.value, dtype.value, output.value)
        print(f"{folder}: {size_of(folder) / 1e6:,.1f} MB; use it like the run, with --workdir={folder}")

    command_line.run(command, verbosity=logging.FATAL)


if __name__ == "__main__":
    main()
