"""Training: the steps of a run, evaluation, curves, checkpoints, and a sample at the end."""

import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Set
from typing import Any

import jax
from clu import parameter_overview
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import work_folder
from diffeqformer.config import check_tokenizer, sample_length
from diffeqformer.console.results import title
from diffeqformer.data.preparation import tokenizer_of
from diffeqformer.data.store import verifying
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.depth.depths import drawn_depth
from diffeqformer.errors import Stopped, counted, out_of_memory, printable, reason_of
from diffeqformer.inference.sampling import Choice, generate
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import NoRoom
from diffeqformer.parallel.mesh import divide_generator
from diffeqformer.parallel.sharding import identity, shardings
from diffeqformer.training import goodput
from diffeqformer.training.hooks import Hooks
from diffeqformer.training.run import (
    Run,
    agree,
    complete,
    make_program,
    open_run,
    saved_tokenizer,
    start_or_resume,
    with_teacher,
)
from diffeqformer.training.step import Program
from diffeqformer.training.trackers import check_installed
from diffeqformer.transformer import MODELS, Transformer, check_weights, random_key


def train(
    config: ConfigDict,
    workdir: epath.PathLike,
    started: float | None = None,
    verify: bool = True,
    given: Set[str] | None = None,
) -> Transformer:
    """Train according to `config`, from the newest checkpoint in `workdir` if there is one, and print a sample.

    Args:
        config: see `diffeqformer.config`; checked before anything else is done.
        workdir: folder of checkpoints and curves, on this machine or on gs://; created if it is missing.
        started: `time.monotonic()` when the process began, for the time to the first step; by default now.
        verify: whether to check the token store's hashes, in the background. No checkpoint is saved before,
            unless the run is told to stop.
        given: see `diffeqformer.training.finetune.inherit`.

    Raises:
        UserError: for anything the user can fix; the message says how.
        Stopped: after a notice to stop (`diffeqformer.parallel.hosts.Notice`), once the run has saved a checkpoint.
    """
    started = time.monotonic() if started is None else started
    config = complete(config, workdir, given)
    with hosts.all_succeed("the tracker"):
        if hosts.is_first():
            check_installed(config.tracker)
    with hosts.all_succeed("the tokenizer"):
        tokenizer = tokenizer_of(config.data, saved_tokenizer(config, workdir))
    check_tokenizer(config, tokenizer)
    folder, program = work_folder(workdir), make_program(config, workdir)  # fail before a corpus is prepared for hours
    config = program.config  # with its microbatches, which the record has
    splits, about = agree(config, folder, tokenizer)
    verified = verifying(pathlib.Path(about.store), tokenizer.vocab_size) if verify else None
    with open_run(Run(config, folder, program, splits, about, goodput.Stopwatch(started), verified)) as run:
        run, state = start_or_resume(run)
        describe(run, state["params"])
        finished = int(state["step"]) >= config.steps
        if not finished:
            with hosts.Notice() as notice:
                state = train_steps(run, state, notice)
                if int(state["step"]) < config.steps:
                    said = f"{notice.why}, and saved at step {int(state['step']):,} in {folder}"
                    raise Stopped(f"{said}; the same command resumes from it", notice.status)
        report_end(run, finished)
    params = state["params"]
    del state  # its moments take more memory than the parameters
    return print_sample(run.program, params, tokenizer)


def report_end(run: Run, finished_before: bool) -> None:
    """Print how a complete run ended, and its goodput."""
    folder = run.folder
    if finished_before:
        print(
            f"{folder}: this run has already finished its {counted(run.config.steps, 'step')}; here is its sample again"
        )
        return
    print(goodput.describe(run.clock.record()))
    if "tensorboard" not in run.config.tracker:
        print(f"Finished. Checkpoints are in {folder}, and curves in {run.config.tracker.replace(',', ' and ')}")
        return
    beside = pathlib.Path(sys.executable).with_name("tensorboard")
    hidden = beside.exists() and not shutil.which("tensorboard")
    tensorboard = os.path.relpath(beside) if hidden else "tensorboard"
    print(f"Finished. Checkpoints and curves are in {folder}: {tensorboard} --logdir {folder}")


def print_sample(program: Program, params: dict, tokenizer: Tokenizer) -> Transformer:
    """Print the sample, or why there is none: writing needs the weights of all steps at once, and training may not.

    Returns the model, with a generator that isn't divided among devices if there is room for that.
    """
    model, why = with_room(lambda: undivided(program, params))
    model, text = model or nnx.merge(program.graph, params), None
    if not any(hosts.of_all(why is not None)):  # all processes write it together
        text, why = with_room(lambda: sample(program.config, model, tokenizer))
    if text is not None:
        print(f"--- sample ---\n{printable(text)}\n--------------", flush=True)
    else:
        print(f"There is no sample: {reason_of(why) if why else 'another process has no room for it'}", flush=True)
    return model


def with_room(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function makes, or the error if memory doesn't suffice."""
    try:
        return make(), None
    except Exception as error:
        if not (isinstance(error, NoRoom) or out_of_memory(error)):
            raise
        return None, error


def undivided(program: Program, params: dict) -> Transformer:
    """The model with a whole generator on every copy, and room for the weights of all steps."""
    if program.mesh.shape["generator"] > 1:
        of_whole = shardings(divide_generator(program.mesh, 1), program.loss.param_specs)
        params = jax.jit(identity, out_shardings=of_whole)(params)
    model = nnx.merge(program.graph, jax.block_until_ready(params))
    check_weights(model)
    return model


def sample(config: ConfigDict, model: Transformer, tokenizer: Tokenizer) -> str:
    """The text of `config.sample.prompt` and the model's continuation."""
    prompt, key = config.sample.prompt, random_key(config.seed, "sample")
    tokens = sample_length(config) - len(tokenizer.encode(prompt))
    [text] = generate(model, tokenizer, prompt, tokens=tokens, key=key, choice=Choice())
    return prompt + text


def describe(run: Run, params: dict) -> None:
    """Print in four lines what will be trained, and write the table of all parameters to a file."""
    config, program, split = run.config, run.program, run.splits["train"]
    if hosts.is_first():
        with checkpoint.reachable("--workdir", run.folder):
            (run.folder / "parameters.txt").write_text(
                parameter_overview.get_parameter_overview(params, include_stats=False)
            )
    trained, _ = program.loss.trained_and_frozen(params)
    count, trained = map(parameter_overview.count_parameters, (params, trained))
    some = f" ({trained:,} train)" if trained < count else ""
    many = "s" * (list(program.depths) != [1])
    unit = f"layer{many}" if MODELS[config.model.kind].weights.fixed_depth else f"step{many} of depth"
    depth = f"{', '.join(map(str, program.depths))} {unit}"
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    print(f"{title(config)}: {config.model.kind}, {count:,} parameters{some}, {depth}, on {devices}")
    run.check_store()
    checked = ("checked" if run.verified.ready() else "being checked") if run.verified else "not checked"
    hashed = f"sha256 {split.sha256[:12]} by its record, {checked}"
    print(f"data: {config.data.task}, {split.size:,} training tokens, {hashed}")
    size = f"{config.batch_size} x {config.sequence_length} tokens"
    size += f" in {config.microbatches} microbatches" if config.microbatches > 1 else ""
    tokens = config.steps * config.batch_size * config.sequence_length
    print(f"run: {counted(config.steps, 'step')} of {size}, {tokens:,} in all, in {run.folder}")
    print(program.describe(), flush=True)


def train_steps(run: Run, state: dict, notice: hosts.Notice) -> dict:
    """Train until the last step, or until a notice to stop. `state` is donated.

    A UserError says if the loss or the gradient is no longer finite, or a checkpoint can't be written.
    """
    first, config, run = int(state["step"]), run.config, with_teacher(run)
    hooks = Hooks(run, first, notice)
    run.clock.lap("start-up")
    if run.about.validation_due:  # for the base, or left over from a run that was told to stop
        hooks.show_validation(first, state["params"])
    with hooks.tracer:
        for number in range(first + 1, config.steps + 1):
            hooks.progress.pause(hooks.tracer.before(number, state))
            num_steps, batch = drawn_depth(run.program.depths, config.seed, number - 1), run.batch(number)
            hooks.before_step(num_steps)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, scalars = run.program.train_step(state, batch, num_steps, *run.teacher_state)
            step = hooks.dispatched(number, state, scalars, num_steps)
            for hook in hooks.after:
                hook(hooks, step)
            if step.stops:
                break
    checkpoint.check(run.checkpoints, wait=True)
    run.clock.lap("saves")
    hooks.progress.close()
    return state
