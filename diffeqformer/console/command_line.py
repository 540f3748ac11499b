"""What the commands share. An error that the user can fix ends a command with a single sentence."""

import functools
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from traceback import walk_stack

from absl import app, flags, logging
from ml_collections import config_flags

from diffeqformer.console.surroundings import at_home, heed_interrupts, options_at_home, set_up
from diffeqformer.console.terminal import PrintableOutput
from diffeqformer.errors import Stopped, UserError, did_you_mean, leave, printable, say_and_end, unforeseen


def define_config() -> flags.FlagHolder:
    """The option --config, for the commands that take a config file."""
    flags.DEFINE_bool("help_config", False, "Explain the fields of a config, and end.")
    return config_flags.DEFINE_config_file(
        "config",
        None,
        f"A config: {', '.join(sorted(configs()))}; or the path of a file. A model's name can follow: tiny:gpt. Then "
        "--config.FIELD=VALUE changes a field.",
    )


def define_step() -> flags.FlagHolder:
    """The option --step, for the commands that open a run (`diffeqformer.checkpoints.folder.Step`)."""
    help_text = "Training step of the checkpoint; best: the one with the lowest validation loss; by default the newest."
    return flags.DEFINE_string("step", None, help_text)


def configs() -> dict[str, pathlib.Path]:
    """The configs by name: those of the repository, or their copies in an installed package."""
    package = pathlib.Path(__file__).parent.parent
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return {path.stem: path for path in folder.glob("*.py")}


def config_file(text: str) -> str:
    """The value of --config with a path in place of a config's name."""
    text = at_home(text)
    name, colon, model = text.partition(":")
    if pathlib.Path(name).is_file():
        return text
    known = configs()
    if name in known:
        return f"{known[name]}{colon}{model}"
    hint = did_you_mean(pathlib.PurePath(name).stem, known) or f"; name a file, or one of {', '.join(sorted(known))}"
    raise UserError(f"--config: there is no config {name}{hint}")


def parse_flags(arguments: list[str], positional: bool = False) -> list[str]:
    """Parse the command line, whose arguments are options but for the first, and others only if `positional`."""
    rest = flags.FLAGS(arguments)
    if len(rest) > 1 and not positional:
        raise UserError(f"{rest[1]}: this argument has no meaning here; options begin with --")
    return rest


def parse_config(arguments: list[str], check: Callable[[list[str]], None]) -> list[str]:
    """Parse the command line, whose arguments are checked first, and load the config file that it names."""
    check(arguments)
    arguments = _with_config_file(arguments)
    try:
        rest = parse_flags(arguments)
        if flags.FLAGS.config is None:
            raise UserError("--config: a config is needed, for example --config=tiny; a file's get_config returns one")
        flags.FLAGS.config.to_dict()  # a file that can't be loaded raises its error here
        return rest
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's config file can raise anything
        *before, last = str(error).strip().splitlines() or [""]
        if isinstance(error, flags.Error) and not before:
            raise
        # absl's error contains the whole traceback if the file raised an error
        said = last if isinstance(error, flags.Error) else f"{type(error).__name__}: {last.strip()}"
        ours = last.removeprefix("diffeqformer.errors.UserError: ")
        raise UserError(ours if ours != last else f"--config: the file can't be loaded, {said}") from error


def _with_config_file(arguments: list[str]) -> list[str]:
    """The arguments with the path of the config file that --config names."""
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if re.fullmatch("--?config", option) and (equals or arguments[number + 1 :]):
            here = [f"{option}={config_file(value)}"] if equals else [option, config_file(arguments[number + 1])]
            return [*arguments[:number], *here, *arguments[number + len(here) :]]
        if re.match(r"--?(no)?config\.", option):
            raise UserError(f"{option.lstrip('-')}: must come after --config, for example --config=tiny {argument}")
    return arguments


def help_text() -> str:
    """The docstring of the command, and its options, without those of libraries."""
    command = sys.argv[0]  # under this name absl knows the module that runs
    for module, options in flags.FLAGS.flags_by_module_dict().items():
        for option in options:
            if module.startswith("diffeqformer.") or option.name == "config":
                flags.FLAGS.register_key_flag_for_module(command, option)
    _, _, options = flags.FLAGS.module_help(command).partition(":\n")
    return f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\n{options}"


def report_unraisable(unraisable) -> None:
    """Report errors that nothing could catch, except TensorStore's about writes that end after a failed save.

    A Ctrl-C that came within a callback, such as one of the garbage collector, which can't pass it on, comes again.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Thread(target=_interrupt_again, daemon=True).start()
    elif str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _interrupt_again() -> None:
    """Interrupt the main thread once it has left `report_unraisable`, which can't pass an interrupt on, either."""
    main = threading.main_thread().ident
    while any(frame.f_code is report_unraisable.__code__ for frame, _ in walk_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    signal.pthread_kill(main, signal.SIGINT)


def _parse_or_exit(line: list[str], check, explain, positional: bool) -> list[str]:
    """Parse the command line, or end; see `run`."""
    given = {argument.lstrip("-").partition("=")[0] for argument in line[1:] if argument.startswith("-")}
    if given & {"help", "h"} or explain and "help_config" in given:
        say_and_end(explain() if explain and "help_config" in given else help_text())
    try:
        for argument in line:
            argument.encode()
        rest = parse_config(line, check) if check else parse_flags(line, positional)
        for name, value in options_at_home({name: flags.FLAGS[name].value for name in flags.FLAGS}).items():
            flags.FLAGS[name].value = value
        return [at_home(each) for each in rest]
    except UnicodeEncodeError as error:
        sys.exit(f"diffeqformer: {printable(error.object)}: this argument must be valid UTF-8")
    except (UserError, flags.Error) as error:
        said = re.sub(r"(\S{20})\S{1000,}", r"\1...", str(error))  # absl repeats what was given, however long
        said = re.sub(r"^flag (--\w+)=None: .*", r"\1: must be given", said)
        said = re.sub(r"Exceeds the limit \(.*", "must be a number of fewer digits", said)
        kinds = {"invalid literal": "a whole number", "could not convert": "a number", "..Non-bool": "true or false"}
        for pythons, kind in kinds.items():
            said = re.sub(rf"^flag (--[\w.]+)=(.*): {pythons}.*", rf"\1: must be {kind}, but it is '\2'", said)
        sys.exit(f"diffeqformer: {printable(said)}")


def _run_or_leave(line: list[str], command: Callable[..., None], interrupted: str, verbosity: int) -> None:
    """Run the command after its flags were parsed; see `run`."""
    logging.set_verbosity(verbosity)
    sys.unraisablehook = report_unraisable
    try:
        heed_interrupts()
        command(*line[1:])
        sys.stdout.flush()
    except UserError as error:
        leave(1, str(error))
    except Stopped as stopped:
        leave(stopped.status, str(stopped))
    except Exception as error:
        leave(1, unforeseen(error))
    except KeyboardInterrupt:
        leave(130, interrupted)


def run(
    command: Callable[..., None],
    check: Callable[[list[str]], None] | None = None,
    explain: Callable[[], str] | None = None,
    *,
    arguments: bool = False,
    interrupted: str = "interrupted",
    verbosity: int = logging.WARNING,
) -> None:
    """Parse the flags and run the command.

    Ends with one sentence, and a status, after any error (1), Ctrl-C (130) and other signals that a run heeds.

    Args:
        check: of a command that takes --config: checks its arguments (`diffeqformer.config.check_overrides`).
        explain: of such a command: the text for --help_config (`diffeqformer.config.explain`).
        arguments: whether the command takes arguments that aren't options; it is called with them.
        interrupted: the message after Ctrl-C.
        verbosity: log level of the libraries.
    """
    set_up()
    if sys.stdout.isatty():  # files and pipes get texts as they are
        sys.stdout = PrintableOutput(sys.stdout)
    logging.set_verbosity(logging.ERROR)  # until the flags are parsed
    app.run(
        functools.partial(_run_or_leave, command=command, interrupted=interrupted, verbosity=verbosity),
        flags_parser=functools.partial(_parse_or_exit, check=check, explain=explain, positional=arguments),
    )
