"""Training: the steps of a run, evaluation, curves, checkpoints, and a sample at the end."""

import collections
import dataclasses
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Set

import jax
from clu import parameter_overview
from etils import epath
from flax import nnx
from jaxtyping import Array
from ml_collections import ConfigDict

from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.folder import newest, work_folder
from diffeqformer.config import check_config, check_fields, check_tokenizer, field_names, get_field, sample_length
from diffeqformer.config_fields import OF_ONE_HOST, traced_steps
from diffeqformer.console.progress import BITS_AT, Progress
from diffeqformer.console.results import title
from diffeqformer.data.preparation import tokenizer_of
from diffeqformer.data.store import verifying
from diffeqformer.data.tokenizers import Tokenizer
from diffeqformer.errors import Stopped, UserError, counted, out_of_memory, printable, reason_of
from diffeqformer.inference.choice import Choice
from diffeqformer.inference.sampling import generate
from diffeqformer.parallel import hosts
from diffeqformer.parallel.memory import NoRoom
from diffeqformer.rules import decay_start
from diffeqformer.training import finetune, goodput
from diffeqformer.training.dynamics import Recorder, first_windows
from diffeqformer.training.profile import Trace, check_profiler
from diffeqformer.training.run import Run, agree, make_program, open_run, saved_tokenizer, start_or_resume
from diffeqformer.training.step import Program
from diffeqformer.training.validation import validate
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

    Returns:
        The trained model.

    Raises:
        UserError: for anything the user can fix; the message says how.
        Stopped: after a notice to stop (`diffeqformer.parallel.hosts.Notice`), once the run has saved a checkpoint.
    """
    started = time.monotonic() if started is None else started
    check_fields(config)
    with hosts.all_succeed("the base"):
        config = finetune.inherit(config, workdir, given)
    check_config(config, jax.device_count(), jax.default_backend())
    hosts.check_same_fields({name: get_field(config, name) for name in field_names(config) if name not in OF_ONE_HOST})
    if config.profile_steps:
        check_profiler(jax.config.jax_platforms)
    with hosts.all_succeed("the tokenizer"):
        tokenizer = tokenizer_of(config.data, saved_tokenizer(config, workdir))
    check_tokenizer(config, tokenizer)
    folder, program = work_folder(workdir), make_program(config)  # fail before a corpus is prepared for hours
    splits, about = agree(config, folder, tokenizer)
    verified = verifying(pathlib.Path(about.store), tokenizer.vocab_size) if verify else None
    with open_run(config, folder, program, splits, about, started, verified) as run:
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
    beside = pathlib.Path(sys.executable).with_name("tensorboard")
    hidden = beside.exists() and not shutil.which("tensorboard")
    tensorboard = os.path.relpath(beside) if hidden else "tensorboard"
    print(f"Finished. Checkpoints and curves are in {folder}: {tensorboard} --logdir {folder}")


def print_sample(program: Program, params: dict, tokenizer: Tokenizer) -> Transformer:
    """Print the sample, or why there is none: writing needs the weights of all steps at once, and training may not.

    Returns:
        the model, with a generator that isn't divided among devices if there is room for that.
    """
    text = why = None
    model = nnx.merge(program.graph, params)
    try:
        model = nnx.merge(program.graph, jax.block_until_ready(program.undivided(params)))
        check_weights(model)
    except Exception as error:
        if not (isinstance(error, NoRoom) or out_of_memory(error)):
            raise
        why = error
    if not hosts.any_process(why is not None):  # all processes write it together
        try:
            text = sample(program.config, model, tokenizer)
        except Exception as error:
            if not (isinstance(error, NoRoom) or out_of_memory(error)):
                raise
            why = error
    if text is not None:
        print(f"--- sample ---\n{printable(text)}\n--------------", flush=True)
    else:
        print(f"There is no sample: {reason_of(why) if why else 'another process has no room for it'}", flush=True)
    return model


def sample(config: ConfigDict, model: Transformer, tokenizer: Tokenizer) -> str:
    """The text of `config.sample.prompt` and the model's continuation."""
    prompt, key = config.sample.prompt, random_key(config.seed, "sample")
    tokens = sample_length(config) - len(tokenizer.encode(prompt))
    [text] = generate(model, tokenizer, prompt, tokens=tokens, key=key, choice=Choice())
    return prompt + text


def describe(run: Run, params: dict) -> None:
    """Print in four lines what will be trained, and write the table of all parameters to a file."""
    config, split = run.config, run.splits["train"]
    if hosts.is_first():
        with checkpoint.reachable("--workdir", run.folder):
            (run.folder / "parameters.txt").write_text(
                parameter_overview.get_parameter_overview(params, include_stats=False)
            )
    count, devices = parameter_overview.count_parameters(params), jax.devices()
    trained = parameter_overview.count_parameters(run.program.trained(params))
    tokens = config.steps * config.batch_size * config.sequence_length
    fixed_depth = MODELS[config.model.kind].weights.fixed_depth
    numbers = ", ".join(map(str, run.program.depths))
    many = "s" * (list(run.program.depths) != [1])
    depth = f"{numbers} layer{many}" if fixed_depth else f"{numbers} step{many} of depth"
    some = f" ({trained:,} train)" if trained < count else ""
    devices = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{title(config)}: {config.model.kind}, {count:,} parameters{some}, {depth}, on {devices}")
    run.check_store()
    checked = "not checked"
    if run.verified:
        checked = "checked" if run.verified.done() else "being checked"
    print(
        f"data: {config.data.task}, {split.size:,} training tokens, sha256 {split.sha256[:12]} by its record, {checked}"
    )
    size = f"{config.batch_size} x {config.sequence_length} tokens"
    size += f" in {config.microbatches} microbatches" if config.microbatches > 1 else ""
    print(f"run: {counted(config.steps, 'step')} of {size}, {tokens:,} in all, in {run.folder}")
    print(run.program.describe(), flush=True)


def train_steps(run: Run, state: dict, notice: hosts.Notice) -> dict:
    """Train until the last step, or until a notice to stop.

    Scalars are read one step late, so dispatch never waits.

    Args:
        state: donated.

    Raises:
        UserError: if the loss or the gradient is no longer finite, or a checkpoint can't be written.
    """
    config, clock, first = run.config, run.clock, int(state["step"])
    traced, tokens = traced_steps(config.profile_steps), config.batch_size * config.sequence_length
    resumes = newest(run.checkpoints) is not None
    progress = Progress(run.folder, first, config.steps, tokens, hosts.is_first(), run.other_depths(), resumes)
    progress.config({name: get_field(config, name) for name in field_names(config)})
    dynamics = (
        Recorder(run.program, first_windows(run.splits["validation"], config.sequence_length))
        if config.dynamics_every
        else None
    )
    clock.lap("start-up")
    if run.about.validation_due:  # for the base, or left over from a run that was told to stop
        show_validation(run, first, state["params"], progress, dynamics)
    pending, compiled = collections.deque(), set()
    with Trace(traced if hosts.is_first() else range(0), run.folder, clock) as trace:
        for step in range(first + 1, config.steps + 1):
            progress.pause(trace.before(step, state))
            num_steps, batch = run.num_steps(step), run.batch(step)
            if new := num_steps not in compiled:
                clock.lap("steps")
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, scalars = run.program.train_step(state, batch, num_steps)
            if new:
                compiled.add(num_steps)
                progress.compiled(clock.lap("compilation"))
            if step == first + 1:
                jax.block_until_ready((state, scalars))  # raises an error if memory ran out
            pending.append((step, run.seconds_at_peak[num_steps], scalars))
            last = step == config.steps
            to_save = last or step % config.checkpoint_every == 0 or step == decay_start(config)
            due = to_save or step % config.eval_every == 0
            while len(pending) > (0 if due or step == first + 1 else 1):
                show_scalars(run, *pending.popleft(), progress)  # waits for the step
            stopping = notice.now(due)  # after the wait, so that a notice during the step prevents its evaluation
            progress.pause(trace.after(step, state, stopping))
            evaluating = last or (step % config.eval_every == 0 and not stopping)
            saving = stopping or to_save
            while pending and stopping:
                show_scalars(run, *pending.popleft(), progress)
            if evaluating or saving:
                clock.lap("steps")  # all have ended
            found = show_validation(run, step, state["params"], progress, dynamics) if evaluating else None
            if saving:  # only now: the step's scalars are finite, and no curve lags behind the checkpoint
                save(run, step, state, progress, found, stopping)
            checkpoint.check(run.checkpoints)
            run.check_store()
            if stopping:
                break
    checkpoint.check(run.checkpoints, wait=True)
    clock.lap("saves")
    progress.close()
    return state


def show_scalars(run: Run, step: int, seconds_at_peak: float, scalars: dict[str, Array], progress: Progress) -> None:
    """Print and write the scalars of a step, which would take `seconds_at_peak` at the devices' peak.

    Raises:
        UserError: if the loss or the gradient isn't finite.
    """
    scalars = {name: float(value) for name, value in scalars.items()}
    if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["gradient_norm"])):
        found = f"it is {scalars['loss']} with a gradient norm of {scalars['gradient_norm']} at step {step:,}"
        raise UserError(diverged(run, found))
    progress.step(seconds_at_peak)
    if step == progress.first_step + 1:
        progress.first(step, scalars["loss"], time.monotonic() - run.clock.started)
    if step % run.config.log_every == 0 or step == run.config.steps:
        progress.train(step, scalars)


def show_validation(
    run: Run, step: int, params: dict, progress: Progress, dynamics: Recorder | None
) -> dict[str, float]:
    """Print and write the validation after `step` steps, and the dynamics each `config.dynamics_every`-th time.

    Returns:
        The validation (`validate`), with bits per byte at the other depths of training.

    Raises:
        UserError: if the loss isn't finite.
    """
    config, split = run.config, run.splits["validation"]
    results = validate(run.program, params, split, config)
    if not math.isfinite(results["loss"]):
        raise UserError(diverged(run, f"it is {results['loss']} in the validation at step {step:,}"))
    for depth in run.other_depths():
        results[f"{BITS_AT}{depth}"] = validate(run.program, params, split, config, depth)["bits_per_byte"]
    progress.validation(step, results)
    if dynamics and (step == config.steps or step // config.eval_every % config.dynamics_every == 0):
        progress.dynamics(step, dynamics(params))
    progress.pause(run.clock.lap("evaluation"))
    return results


def save(
    run: Run, step: int, state: dict, progress: Progress, validation: dict[str, float] | None, stopping: bool
) -> None:
    """Start saving the state after `step` steps, without frozen parameters, when all curves are on disk.

    Args:
        validation: of this step; None if there was none.
        stopping: whether the run was told to stop. Then the token store's check isn't awaited: the next process has it.
    """
    run.check_store(wait=not stopping)
    progress.pause(run.clock.lap("start-up"))  # the wait, if there was one
    progress.flush()
    trained = {**state, "params": run.program.trained(state["params"])}
    due = validation is None and step % run.config.eval_every == 0
    about = dataclasses.replace(run.about, validation_due=due, time_spent=run.clock.record())
    checkpoint.save(run.checkpoints, step, trained, about, validation)
    progress.pause(run.clock.lap("saves"))


def diverged(run: Run, found: str) -> str:
    """The message when the loss or the gradient is no longer finite."""
    checkpoint.check(run.checkpoints, wait=True)
    saved = newest(run.checkpoints)
    good = f"the last good checkpoint is step {saved or 0:,} in {run.folder}"
    if saved is None:
        good = "no checkpoint had been saved yet"
    return f"loss: {found}; {good}; start again in another --workdir with a lower config.optimizer.learning_rate"
