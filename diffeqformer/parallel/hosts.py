"""One run on many hosts: connecting them, work that only one of them does, and stopping together."""

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from diffeqformer.errors import (
    Stopped,
    UserError,
    UserErrorEverywhere,
    leave,
    out_of_memory,
    said_of_output,
    unforeseen,
)
from diffeqformer.orbax import awaited, ocp


def define_flags() -> None:
    """The options of a command that runs on several hosts."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; not needed on Cloud TPU, GKE's TPUs and Slurm.")
    help_text = "Processes of the run: one per TPU host, or one per GPU."
    flags.DEFINE_integer("num_processes", None, help_text, lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.", lower_bound=0)
    flags.DEFINE_integer("join_timeout", 300, "Seconds to wait for the other hosts.", lower_bound=1)


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: int) -> None:
    """Connect to the other processes of the run, if there are any, before anything accesses devices.

    Without a coordinator, the processes are found from the environment of Cloud TPU, GKE, Slurm or Open MPI. From here
    on only process 0 prints, but every process reports its errors, such as a UserError if one doesn't connect in time.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise UserError("--coordinator, --num_processes and --process_id: must be given together")
    port = (coordinator or "").rpartition(":")[2]
    if coordinator is not None and not (port.isdecimal() and 0 < int(port) < 2**16 and process_id < num_processes):
        raise UserError(
            f"--coordinator, --process_id: must be HOST:PORT and below --num_processes ({num_processes}), but they are "
            f"{coordinator} and {process_id}"
        )
    many = f"{num_processes} processes" if num_processes else "processes of the run"
    late = (
        f"--join_timeout: {socket.gethostname()} waited {timeout} s, and not all of the {many} arrived; each one that "
        "did prints this message, so start the one that prints nothing, and check that it can reach process 0"
    )
    # JAX's own preemption notice counts steps from 0 even in a resumed run; `Notice` replaces it
    jax.config.update("jax_enable_preemption_service", False)
    watchdog = threading.Timer(timeout, leave, (1, late))  # JAX itself would abort with a stack trace
    watchdog.start()
    try:
        jax.distributed.initialize(*given, initialization_timeout=timeout + 60)
    except ValueError as error:
        if coordinator is None and "coordinator_address" in str(error):
            return  # no cluster: this is the only process
        raise UserError(f"the processes of the run can't be joined: {error}") from None
    except RuntimeError as error:  # for example, a port that is in use
        raise UserError(f"--coordinator: {str(error).splitlines()[0]}") from None
    finally:
        watchdog.cancel()
    if jax.process_index():
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="ignore")


@contextlib.contextmanager
def joined(options) -> Iterator[None]:
    """Connect as the options of `define_flags` say, and let processes that stop in the `with` block exit together.

    One that fails exits at once: JAX would wait minutes for the others. It aborts them after at most 100 s.
    """
    connect(options.coordinator, options.num_processes, options.process_id, options.join_timeout)
    try:
        yield
    except (Stopped, UserErrorEverywhere):
        if jax.process_count() > 1:
            with contextlib.suppress(Exception):  # another process may have been killed meanwhile
                jax.distributed.shutdown()
        raise
    except UserError:
        raise  # this ends the process at once
    except Exception as error:
        if jax.process_count() == 1 or out_of_memory(error):
            raise
        lost = "Gloo" in str(error)  # the library by which CPUs of several hosts exchange arrays
        reason = "it lost another one; start all of them again" if lost else unforeseen(error)
        leave(1, f"process {jax.process_index()} of {jax.process_count()} failed: {reason}")


def is_first() -> bool:
    """Whether this is the process that writes files on behalf of all."""
    return jax.process_index() == 0


def check_one(what: str) -> None:
    """Check that this is the only process, as `what` needs: an option or a command, for the message."""
    if jax.process_count() > 1:
        raise UserErrorEverywhere(f"{what} needs a single process, but there are {jax.process_count()}")


def from_first(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Process 0's array, for all processes. The others give one of the same shape and type."""
    return array if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(array))


def check_shared(workdir: epath.Path) -> None:
    """Check that all processes see the same work folder. If not, all raise a UserErrorEverywhere."""
    if jax.process_count() == 1:
        return
    sign = workdir / f".shared-{of_all(uuid.uuid4().hex)[0]}"
    try:
        if is_first():
            sign.touch()
        multihost_utils.sync_global_devices("sign")
        check_same({f"--workdir: {workdir}": sign.exists()}, "use a folder on a disk that all hosts share")
    finally:
        if is_first():
            sign.unlink(missing_ok=True)


def wait(what: str) -> None:
    """Wait, for hours if need be, until all processes have come here with the same words. After a minute, say so."""
    if jax.process_count() == 1:
        return
    said = f"process {jax.process_index()} of {jax.process_count()} is waiting for the others: {what}"
    notice = threading.Timer(60, print, (said,), {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        a_week = 7 * 24 * 3600  # in seconds; a wait on the devices would time out after minutes
        awaited(ocp.multihost.sync_global_processes(what, operation_id="diffeqformer", timeout=a_week))
    finally:
        notice.cancel()


@contextlib.contextmanager
def all_succeed(what: str) -> Iterator[None]:
    """Wait at the end of the `with` block for all processes. The block can take hours, or fail on only one of them.

    If one raised a UserError, every process raises a UserErrorEverywhere. The others name that process, and the work.
    """
    error = None
    try:
        yield
    except UserError as raised:
        error = UserErrorEverywhere(str(raised))
    wait(what)
    failed = ", ".join(str(number) for number, fails in enumerate(of_all(error is not None)) if fails)
    if failed and error is None:
        error = UserErrorEverywhere(f"{what}: process {failed} failed; see its message")
    if error is not None:
        raise error


def of_all(value: Any) -> list:
    """A value of every process, as JSON has it, in their order. All must call this together."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    width = -(-sizes.max() // 256) * 256  # a program is compiled for each
    rows = multihost_utils.process_allgather(np.pad(data, (0, width - len(data))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def check_same(values: dict[str, object], remedy: str) -> None:
    """Check that values are the same on every process. If not, all raise a UserErrorEverywhere that names these."""
    hashes = [hashlib.sha256(repr(value).encode()).hexdigest() for value in values.values()]
    first, *others = of_all(hashes)  # without the names, which can have a host's own paths
    if apart := [str(number) for number, other in enumerate(others, 1) if other != first]:
        names = [name for name, *found in zip(values, first, *others) if len(set(found)) > 1]
        raise UserErrorEverywhere(
            f"{', '.join(names)}: not the same on process {', '.join(apart)} as on process 0; {remedy}"
        )


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What clouds, schedulers and closed terminals send before they end a process. SIGQUIT ends it without a checkpoint."""


class Notice(contextlib.AbstractContextManager):
    """A notice to stop: a signal (`STOPS`), or standard output that is closed or can't be written any longer.

    A second Ctrl-C interrupts at once. Signals that are ignored, by nohup or a shell's background job, stay ignored.

    why: what stopped it, for messages; status: of the process.
    """

    def __enter__(self) -> "Notice":
        self.told, self.previous, self.before, self.status, self.why = False, {}, None, 143, "told to stop"
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: of a library
                    self.previous[number] = signal.signal(number, self._tell)
        self.output = sys.stdout
        if sys.stdout:
            sys.stdout = _Output(sys.stdout, self)
        mesh = Mesh(jax.devices(), ("all",))
        self.flags = NamedSharding(mesh, PartitionSpec("all"))
        self.any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        return self

    def _tell(self, number: int, _) -> None:
        self.told, self.status = True, 128 + number
        if number == signal.SIGINT:
            signal.signal(number, self.previous.pop(number))
            said = b"\nstopping after what is in progress, with a checkpoint; Ctrl-C again stops without one\n"
            with contextlib.suppress(OSError):  # standard error can be closed
                os.write(2, said)

    def lost_output(self, error: OSError) -> None:
        """Give notice that standard output can't be written."""
        if not self.told:
            self.told, self.status, self.why = True, 128 + signal.SIGPIPE, said_of_output(error)

    def now(self, wait: bool) -> bool:
        """Whether to stop after this step. The answer is the same on all hosts, no matter which one got the notice.

        The hosts agree through a reduction on their devices. It is read one call late, so that no host waits for the
        step in progress.

        Args:
            wait: read it at once, as the step has ended. All hosts must give the same.
        """
        if jax.process_count() == 1:
            return self.told
        flags = jax.make_array_from_callback((jax.device_count(),), self.flags, lambda _: np.array([self.told]))
        before, self.before = self.before, self.any(flags)
        answer = self.before if wait else before
        return answer is not None and bool(answer)

    def __exit__(self, *_) -> None:
        sys.stdout = self.output
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class _Output:
    """Standard output that gives notice to stop instead of raising an error."""

    def __init__(self, output: io.TextIOBase, notice: Notice):
        self.output, self.notice = output, notice

    def write(self, text: str) -> int:
        self._try(self.output.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.output.flush)

    def _try(self, action: Callable, *given: str) -> None:
        try:
            action(*given)
        except OSError as error:
            self.notice.lost_output(error)

    def __getattr__(self, name: str):
        return getattr(self.output, name)
