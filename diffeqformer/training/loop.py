"""A training run: data, steps, evaluation, curves, checkpoints, and a sample at the end."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import sys
import time

import jax
from clu import metrics, parameter_overview
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from diffeqformer import checkpoint
from diffeqformer.checkpoint import About
from diffeqformer.config import check_config, check_fields, check_resumable, check_tokenizer
from diffeqformer.console.progress import Progress, printable, show_progress
from diffeqformer.data.lock import only_run
from diffeqformer.data.preparation import open_prepared
from diffeqformer.data.store import Split
from diffeqformer.data.tokenizers import open_tokenizer
from diffeqformer.errors import Stopped, UserError
from diffeqformer.inference.sampling import Choice, generate
from diffeqformer.parallel import hosts
from diffeqformer.parallel.sharding import make_mesh, mesh_shape
from diffeqformer.training import finetune
from diffeqformer.training.dynamics import recorder
from diffeqformer.training.step import Program, make_program
from diffeqformer.transformer import MODELS, Transformer, merge_trees, random_key


def train(config: ConfigDict, workdir: epath.PathLike, started: float | None = None) -> Transformer:
    """Train as `config` says, from the newest checkpoint in `workdir` if there is one, and print a sample.

    Args:
        config: see `diffeqformer.config`; checked before anything else is done.
        workdir: folder of checkpoints and curves, here or on gs://; made if it is missing.
        started: `time.monotonic()` from which the time to the first step is told; by default now.

    Returns:
        The trained model.

    Raises:
        UserError: for whatever the user can put right; the message says how.
    """
    started = time.monotonic() if started is None else started
    check_fields(config)
    with hosts.all_succeed("the base"):
        config = finetune.inherit(config, workdir)
    check_config(config, jax.device_count(), jax.default_backend())
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.tokenizer_file)
    check_tokenizer(config, tokenizer)
    workdir = epath.Path(workdir)
    about = About(config.to_dict(), tokenizer.name, tokenizer.save())
    if jax.process_count() > 1:  # from here on processes must find the same, or they would wait for one another
        make_folder(workdir)
        hosts.check_shared(workdir)
    with hosts.all_succeed("the newest checkpoint"):
        saved = read_saved(config, workdir, about)  # what can't go on is said before a corpus is prepared for hours
        if config.base:
            about = dataclasses.replace(about, base=saved.base if saved else finetune.base_of(config, about))
    if config.base:
        digest = hashlib.sha256(json.dumps(about.base, sort_keys=True).encode()).hexdigest()
        hosts.check_same("config.base: the newest checkpoint", digest, "give all hosts the same run, which has ended")
    with hosts.all_succeed("the token store"):
        splits = open_prepared(config.data, tokenizer, config.sequence_length)
    about = dataclasses.replace(about, data_sha256=splits["train"].sha256)
    make_folder(workdir)
    hosts.check_same("config.data.dir: the token store", about.data_sha256, "give all hosts the same one")
    with contextlib.ExitStack() as stack:
        with hosts.all_succeed("the work folder"):
            if hosts.is_first():
                stack.enter_context(only_run(workdir))
            saved = read_saved(config, workdir, about)  # again: another run may have gone on meanwhile
            check_unchanged("data_sha256", about, saved, workdir)
            if config.base and saved:
                about = dataclasses.replace(about, base=saved.base)
        checkpoints = stack.enter_context(checkpoint.open_to_write(workdir, config.checkpoints_kept))
        program = make_program(config, make_mesh(mesh_shape(config.mesh, jax.device_count())))
        state = start_or_resume(config, workdir, program, checkpoints, about)
        describe(config, workdir, program, state["params"], splits["train"])
        if int(state["step"]) < config.steps:
            with hosts.Notice() as notice:
                due = saved.validation_due if saved else bool(config.base)
                about = dataclasses.replace(about, validation_due=due)
                state = train_steps(config, workdir, program, state, splits, checkpoints, about, started, notice)
            if int(state["step"]) < config.steps:
                raise Stopped(
                    f"told to stop, and saved at step {int(state['step']):,} in {workdir}; the same command goes on from it"
                )
            beside = os.path.relpath(pathlib.Path(sys.executable).with_name("tensorboard"))
            program_name = "tensorboard" if shutil.which("tensorboard") else beside
            print(f"Finished. Checkpoints and curves are in {workdir}: {program_name} --logdir {workdir}")
        else:
            print(f"{workdir}: this run has already finished its {config.steps:,} steps; here is its sample again")
    model = nnx.merge(program.graph, state["params"])
    print(f"--- sample ---\n{printable(sample(config, model, tokenizer))}\n--------------", flush=True)
    return model


def sample(config: ConfigDict, model: Transformer, tokenizer) -> str:
    """The text that `config.sample` asks for: its prompt, and what the model writes after it."""
    prompt, key = config.sample.prompt, random_key(config.seed, "sample")
    tokens = config.sample.length - len(tokenizer.encode(prompt))
    [text] = generate(model, tokenizer, prompt, tokens=tokens, key=key, choice=Choice(config.sample.temperature))
    return prompt + text


def make_folder(workdir: epath.Path) -> None:
    """Make the work folder if it is missing.

    Raises:
        UserError: if it can't be made or written.
    """
    with checkpoint.reachable("--workdir", workdir):
        (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (workdir / "parameters.txt").touch()


def read_saved(config: ConfigDict, workdir: epath.PathLike, about: About) -> About | None:
    """What the newest checkpoint says of itself; None if there is none.

    Raises:
        UserError: if a run of this config can't go on from it.
    """
    try:
        with checkpoint.open_to_read(workdir) as (_, _, saved, config_there):
            pass
    except checkpoint.NoCheckpoint:
        return None
    if saved.materialized_from is not None:
        raise UserError(
            f"{workdir}: holds a materialized model, which has no optimizer to go on with; use another --workdir"
        )
    check_resumable(config, config_there, workdir)
    check_unchanged("tokenizer", about, saved, workdir)
    return saved


def check_unchanged(what: str, about: About, saved: About | None, workdir: epath.PathLike) -> None:
    """Raise a UserError if the run so far was trained with another tokenizer, or on other ids."""
    if saved is None:
        return
    ours, theirs = getattr(about, what), getattr(saved, what)
    if ours != theirs:
        raise UserError(
            f"config.data.dir: the token store has another {what} ({ours}) than the run in {workdir} "
            f"({theirs}); use another --workdir, or the old store"
        )


def start_or_resume(config: ConfigDict, workdir: epath.PathLike, program: Program, checkpoints, about: About) -> dict:
    """A new state, or that of the newest checkpoint."""
    step = checkpoints.latest_step()
    seen, remedy = f"{0 if step is None else step:016x}", "start again when the disk shows the same to all hosts"
    hosts.check_same(f"{workdir}: the newest checkpoint that is seen", seen, remedy)
    if step is None:
        if not config.base:
            return program.init()
        base = about.base
        print(f"beginning with {base['workdir']} at step {base['step']:,}", flush=True)
        if config.model.solver != (theirs := checkpoint.load_config(base["workdir"]).model.solver):
            print(
                f"it was trained with {theirs}, whose weights of several times in a step no layer has; this run walks by Euler"
            )
        state = program.init(finetune.initial_params(config, base["step"], program.batch_sharding.mesh))
        if frozen := program.frozen(state["params"]):
            checkpoint.save_frozen(workdir, frozen, base)
        return state
    if step < config.steps:
        print(f"Resuming {workdir} from its checkpoint at step {step:,}", flush=True)
    shapes = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
        jax.eval_shape(program.init),
        program.state_shardings,
    )
    trained, frozen = program.trained(shapes["params"]), program.frozen(shapes["params"])
    state = checkpoint.restore_state(checkpoints, step, {**shapes, "params": trained})
    if frozen:
        state["params"] = merge_trees(state["params"], checkpoint.restore_frozen(workdir, frozen, about.base))
    return state


def describe(config: ConfigDict, workdir: epath.Path, program: Program, params: dict, split: Split) -> None:
    """Say in four lines what is about to be trained; the table of all parameters goes into a file."""
    if hosts.is_first():
        with checkpoint.reachable("--workdir", workdir):
            (workdir / "parameters.txt").write_text(
                parameter_overview.get_parameter_overview(params, include_stats=False)
            )
    count, devices = parameter_overview.count_parameters(params), jax.devices()
    trained = parameter_overview.count_parameters(program.trained(params))
    tokens = config.steps * config.batch_size * config.sequence_length
    per_layer = MODELS[config.model.kind].weights == "per_layer"
    depth = f"{config.model.num_steps} {'layers' if per_layer else 'steps of depth'}"
    some = f" ({trained:,} train)" if trained < count else ""
    print(
        f"{config.name}: {config.model.kind}, {count:,} parameters{some}, {depth}, on {len(devices)} x {devices[0].device_kind}"
    )
    print(f"data: {config.data.task}, {split.size:,} training tokens, sha256 {split.sha256[:12]}")
    size = f"{config.batch_size} x {config.sequence_length} tokens"
    size += f" in {config.microbatches} microbatches" if config.microbatches > 1 else ""
    print(f"run: {config.steps:,} steps of {size}, {tokens:,} in all, in {workdir}")
    mesh = ", ".join(f"{axis} {size}" for axis, size in program.batch_sharding.mesh.shape.items())
    print(f"mesh: {mesh}; attention: {program.attention}", flush=True)


def train_steps(config, workdir, program: Program, state: dict, splits, checkpoints, about, started: float, notice):
    """The loop: from the state's step to the last one, or to a notice to stop.

    Scalars are read one step late, so dispatch never waits.
    """
    first, shape = int(state["step"]), (config.batch_size, config.sequence_length)
    progress = Progress(workdir, first, config.steps, config.batch_size * config.sequence_length, hosts.is_first())
    pending, validation = collections.deque(), splits["validation"]
    dynamics = recorder(program, validation, config.sequence_length) if config.dynamics_every else None

    def evaluate(step: int) -> None:
        progress.validation(step, validate(program, state["params"], validation, config))
        if dynamics and (step == config.steps or step // config.eval_every % config.dynamics_every == 0):
            progress.dynamics(step, dynamics(state["params"]))

    if about.validation_due:  # of what the base can do, or because the run was told to stop and left that to us
        evaluate(first)

    def read_scalars() -> None:
        step, scalars = pending.popleft()
        scalars = {name: float(value) for name, value in scalars.items()}
        if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["gradient_norm"])):
            raise UserError(diverged(step, scalars, checkpoints, workdir))
        if step == first + 1:
            progress.first(step, scalars["loss"], time.monotonic() - started)
        if step % config.log_every == 0 or step == config.steps:
            progress.train(step, scalars)

    for step in range(first + 1, config.steps + 1):
        tokens = jax.make_array_from_callback(
            shape,
            program.batch_sharding,
            lambda index: splits["train"].batch(step - 1, *shape, config.seed, rows=index[0]),
        )
        state, scalars = program.train_step(state, tokens)
        pending.append((step, scalars))
        last, stopping = step == config.steps, notice.now()
        evaluating = last or (step % config.eval_every == 0 and not stopping)
        saving = last or stopping or step % config.checkpoint_every == 0
        while len(pending) > (0 if evaluating or saving else 1):
            read_scalars()
        pause = time.monotonic()
        if evaluating:
            evaluate(step)
        if saving:  # only now: the step's scalars are finite, and no curve stays behind the checkpoint
            progress.flush()
            due = not evaluating and step % config.eval_every == 0
            saved = {**state, "params": program.trained(state["params"])}
            checkpoint.save(checkpoints, step, saved, dataclasses.replace(about, validation_due=due))
        progress.pause(time.monotonic() - pause)
        checkpoint.check(checkpoints)
        if stopping:
            break
    checkpoint.check(checkpoints, wait=True)
    progress.close()
    return state


def validate(
    program: Program, params: dict, split: Split, config: ConfigDict, num_steps: int | None = None
) -> dict[str, float]:
    """Loss (nats per token), perplexity and bits per byte over a whole split, in `num_steps` steps (None: as trained).

    Windows are disjoint, as in training; each window's first token isn't scored, nor is the text's end that
    fills no window. Bits per byte are the loss in bits times the split's tokens per byte of text.
    """
    weights = program.weights(params, num_steps)  # once, for all batches
    total, pending, done = metrics.Average.empty(), collections.deque(), 0
    show = show_progress("validation")
    shape = config.batch_size, config.sequence_length
    for number in range(-(-(split.size // config.sequence_length) // config.batch_size)):
        tokens, valid = (
            jax.make_array_from_callback(
                (config.batch_size, width),
                program.batch_sharding,
                lambda index, what=what: split.evaluation_batch(number, *shape, rows=index[0])[what],
            )
            for what, width in enumerate((config.sequence_length, 1))
        )
        total = total.merge(program.evaluate(params, weights, tokens, valid))
        pending.append(total)
        if len(pending) > 2:  # the device has two batches to work on, and what is shown has been done
            jax.block_until_ready(pending.popleft())
            done += config.batch_size * config.sequence_length
            show(done, split.size)
    loss = float(total.compute())
    bits_per_byte = loss / math.log(2) * split.size / split.text_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


def diverged(step: int, scalars: dict[str, float], checkpoints, workdir: epath.PathLike) -> str:
    """What to tell when the loss or the gradient stops being a number."""
    checkpoint.check(checkpoints, wait=True)
    saved = checkpoints.latest_step()
    good = (
        "no checkpoint had been saved yet"
        if saved is None
        else f"the last good checkpoint is step {saved:,} in {workdir}"
    )
    return (
        f"loss: it is {scalars['loss']} with a gradient norm of {scalars['gradient_norm']} at step {step:,}; {good}; "
        "begin in another --workdir with a lower config.optimizer.learning_rate"
    )
