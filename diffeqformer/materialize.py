"""Write a model's weights at the times of one grid as a small checkpoint.

    python -m diffeqformer.materialize --workdir=runs/tiny --num_steps=4 --dtype=bfloat16

The hypernetwork and the optimizer's state are left out. The result is as small as a vanilla transformer, and every
command that takes a run also takes it.
"""

import dataclasses

from absl import flags, logging
from etils import epath
from flax import traverse_util

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import check_parameters
from diffeqformer.checkpoints.folder import REPLACED, Step, new_checkpoints, once_more, size_on_disk
from diffeqformer.console import command_line
from diffeqformer.console.results import check_link
from diffeqformer.errors import UserError
from diffeqformer.inference.discretize import discretized_arrays, discretized_config
from diffeqformer.parallel import hosts
from diffeqformer.transformer import MODELS


def materialize(
    workdir: epath.PathLike,
    num_steps: int | None = None,
    dtype: str | None = None,
    output: epath.PathLike | None = None,
    step: Step = None,
) -> epath.Path:
    """Write a checkpoint of a run as a discretized model, numbered by its training step, and return the folder.

    Args:
        num_steps: steps of depth; None: as trained.
        dtype: float32 or bfloat16, of weights and computation; None: the run's compute type.
        output: folder of the new checkpoint, which must not hold one yet; by default a subfolder of the run's.
        step: see `diffeqformer.checkpoints.folder.Step`.
    """
    folder, step, about, config = checkpoint.open_to_read(workdir, step=step)
    if config.model.solver not in MODELS["discretized"].solvers(unit_steps=not config.model.span):
        raise UserError(
            f"--workdir: a model that was trained with {config.model.solver} takes weights at several times of each "
            "step, and a materialized one has one set; use the run itself, or fine-tune it with --config.base"
        )
    num_steps = config.model.num_steps if num_steps is None else num_steps
    dtype = dtype or config.model.dtype
    stored = checkpoint.open_arrays(folder, step, about.checksums, REPLACED)
    if config.model.lora_rank:
        frozen, recorded, remedy = checkpoint.open_frozen(workdir, about.base)
        stored |= checkpoint.open_arrays(frozen, 0, recorded, remedy)
    if not output:
        output = epath.Path(workdir) / f"materialized-{num_steps}-{dtype}"
        check_link(output, "--workdir")
    trained = (about.materialized_from or {}).get("model", config.model.to_dict())
    about = dataclasses.replace(
        about,
        config=discretized_config(config, num_steps, dtype).to_dict(),
        materialized_from={"workdir": str(workdir), "step": step, "model": trained},
        time_spent=None,
    )
    with new_checkpoints(epath.Path(output), "--output"):
        params = discretized_arrays(config, stored, num_steps, dtype)
        for path, array in traverse_util.flatten_dict(params).items():  # a device need not hold all of them
            check_parameters(traverse_util.unflatten_dict({path: array}), f"{workdir}, checkpoint {step}")
        checkpoint.save_alone(output, step, params, about)
    return epath.Path(output)


if __name__ == "__main__":
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    step = command_line.define_step()
    num_steps = flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.")
    help_text = "Type of weights and computation; by default as in training."
    dtype = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], help_text)
    output = flags.DEFINE_string("output", None, "Folder to write; by default materialized-STEPS-DTYPE in the run's.")

    def command() -> None:
        hosts.check_one("materialize: this command")
        folder = once_more(lambda: materialize(workdir.value, num_steps.value, dtype.value, output.value, step.value))
        print(f"{folder}: {size_on_disk(folder) / 1e6:,.1f} MB; use it like the run, with --workdir={folder}")

    command_line.run(command, verbosity=logging.FATAL)
