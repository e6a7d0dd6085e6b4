"""Starting of a background process, its instructions, and its one answer.

`start` begins a process of a `Role` as soon as it is clear that there will be one; the process
loads its code while its caller works. `Process.tell` sends the plan as one line on the process's
standard input, never on a command line, since it may hold credentials. The process (`serve`)
becomes a child of init, since its caller may become another program, and reports "ready" or an
error (`Report`).

A process begins in one of three ways: by the spawner, if BOOTSEER_SPAWNER names one; as a forked
copy of this process, if the caller allows it and this process has one thread (an interpreter would
load again what this process has: half of a server's time to start); else as a new interpreter. In
each case descriptor 0 is the plan, 1 and 2 the log, 3 the report; it has no other descriptor of
ours, and a session of its own.

Imports little, since the program that starts a process waits for this module. One thread for each
object.
"""

import contextlib
import fcntl
import importlib
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeVar

from msgspec import Struct

from bootseer.base.documents import from_builtins, from_line, to_builtins, to_line
from bootseer.base.json_errors import ErrorDocument, decode_error, encode_error
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    UnavailableError,
    exit_code_of,
    from_oserror,
)
from bootseer.linux.locks import open_log
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import (
    close_descriptors,
    kill_child,
    may_fork,
    reap,
    stat_fields,
    wait_readable,
)
from bootseer.linux.scripts import python_environment
from bootseer.served.service import log_path, new_identity

_log = logging.getLogger(__name__)

SPAWNER = "BOOTSEER_SPAWNER"
"""Variable that names the socket of the process that starts servers for this one."""
START_S = 30.0
_REPORT = 3
_REPORT_BYTES_MAX = 1 << 16
_LOG_TAIL_BYTES = 2000
_FAILED = 70  # EX_SOFTWARE of sysexits.h
# Fields arg_start and arg_end of /proc/self/stat, counted after the name (proc_pid_stat(5)).
_ARGUMENTS = slice(45, 47)
_DEVICE = "/dev/fuse"


class Role(NamedTuple):
    """Kind of background process."""

    module: str
    """Module whose `main` calls `serve`."""
    title: str
    """Name for people, in messages."""


TREE = Role("bootseer.prefetch.serve.server", "the image's server")
CHECKPOINTS = Role("bootseer.fuse.striped.mounted.server", "the mount's server")
JOB_MOUNT = Role("bootseer.fuse.striped.mounted.job_mount", "the server of a checkpoint folder")
HOLDER = Role("bootseer.snapshots.holder", "the holder of a linked snapshot")
PUBLISHER = Role("bootseer.prefetch.publish.publishing", "the publisher")
WARMER = Role("bootseer.prefetch.warm.worker", "warming")
ATTENDANT = Role("bootseer.launch.attendant", "the attendant of the start")
FANOUT = Role("bootseer.fanout.host", "the fan-out")
VOLUMES_FANOUT = Role("bootseer.kubernetes.csi.fanout_host", "the fan-out of volumes")
ROLES = {
    role.module: role
    for role in (
        TREE,
        CHECKPOINTS,
        JOB_MOUNT,
        HOLDER,
        PUBLISHER,
        WARMER,
        ATTENDANT,
        FANOUT,
        VOLUMES_FANOUT,
    )
}
"""Roles by module: a spawner starts no other module."""


class Ready(Struct, frozen=True):
    """Answer of a process that is ready and has no more to say."""


T = TypeVar("T", bound=Struct)


class _ReportMessage(Struct, frozen=True):
    """Answer or error that a process reports to the process that started it."""

    answer: dict[str, Any] | None = None
    failure: ErrorDocument | None = None


class Carrier(Protocol):
    """First process of a background process; it exits once its child serves the plan."""

    pid: int

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, and reap it. Return whether it has ended. Idempotent."""

    def end(self) -> None:
        """Kill the process if it lives, and reap it. Idempotent."""


class _Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._is_reaped = False

    def wait(self, timeout_s: float) -> bool:
        self._is_reaped = self._is_reaped or reap(self.pid, timeout_s) is not None
        return self._is_reaped

    def end(self) -> None:
        if not self._is_reaped:
            kill_child(self.pid)
            self._is_reaped = True


# ---- the caller's side ------------------------------------------------------------------------


class Process:
    """A background process, from its start to its answer. `with` ends one without a plan."""

    def __init__(
        self, role: Role, carrier: Carrier, plan: int, report: int, identity: str, log: Path
    ) -> None:
        self.identity = identity
        """Identity of the service that the process will be, and name of its log."""
        self.log = log
        """Log of the process."""
        self._title = role.title
        self._carrier = carrier
        self._plan = plan
        self._report = report

    @property
    def pid(self) -> int:
        """Process that was begun; leader of the process group of everything it becomes."""
        return self._carrier.pid

    def tell(self, plan: Struct) -> None:
        """Send the plan, once. Then call `wait` or `leave`."""
        try:
            data = memoryview(f"{to_line(plan)}\n".encode())
            # A broken pipe means that the process has ended: its report will say why.
            with contextlib.suppress(BrokenPipeError):
                while data:
                    data = data[os.write(self._plan, data) :]
        except BaseException:
            self.abandon()
            raise

    def go(self) -> None:
        """Tell the process to begin: everything that the plan names exists now. Idempotent."""
        plan, self._plan = self._plan, -1
        if plan >= 0:
            os.close(plan)

    def is_answered(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._report < 0 or bool(wait_readable([self._report], 0))

    def wait(self, timeout_s: float = START_S, answer: type[T] = Ready) -> T:  # type: ignore[assignment]
        """Tell the process to begin, and return its answer. The process goes on as a child of init.

        Raises: the error that it reported; UnavailableError if it ended without a report;
        DeadlineError.
        """
        self.go()
        try:
            # Several processes may report one failure; the first report is nearest to the cause.
            line = self._read(timeout_s).partition(b"\n")[0]
        finally:
            # The process that was begun has ended by now, and its child serves.
            self.abandon()
        message = from_line(line, _ReportMessage) if line else _ReportMessage()
        if message.failure is not None:
            raise decode_error(message.failure)
        if message.answer is None:
            raise UnavailableError(f"{self._title} ended before it was ready: {self._log_tail()}")
        return from_builtins(message.answer, answer)

    def leave(self, timeout_s: float = START_S) -> None:
        """Tell the process to begin; wait only until it is a child of init."""
        self.go()
        self._carrier.wait(timeout_s)
        self.abandon()

    def _read(self, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        data = b""
        while b"\n" not in data and len(data) < _REPORT_BYTES_MAX:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not wait_readable([self._report], left_s):
                raise DeadlineError(
                    f"{self._title} was not ready in {timeout_s:g} s; see {self.log}"
                )
            piece = os.read(self._report, _REPORT_BYTES_MAX)
            if not piece:
                # The process was killed in the middle of a line, which does not count.
                return b""
            data += piece
        return data

    def _log_tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES, 0))
                tail = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            tail = ""
        return f"{self.log}: {tail}" if tail else f"see {self.log}"

    def abandon(self) -> None:
        """End the process if it has no plan yet; ignore its answer. Idempotent."""
        report, self._report = self._report, -1
        if report >= 0:
            os.close(report)
            self._carrier.end()
            self.go()

    def kill(self) -> None:
        """Kill everything that the process has become: its process group. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


def start(
    role: Role,
    run_dir: Path,
    *,
    identity: str = "",
    copy: bool = False,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> Process:
    """Begin a background process, which waits for its plan. Raises: BootseerError.

    Args:
        role: Kind of process.
        run_dir: Folder of its log.
        identity: Name of its log; by default a new one.
        copy: Whether it may be a forked copy of this process. A library must not allow that.
        variables: Additional variables, such as credentials; None: without the variable.
    """
    identity = identity or new_identity()
    log = log_path(run_dir, identity)
    private_directory(log.parent)
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        try:
            sink = open_log(log)
        except OSError as error:
            raise from_oserror(error, f"open the log {log}") from error
        theirs.callback(os.close, sink)
        try:
            plan, to_tell = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, plan)
            ours.callback(os.close, to_tell)
            to_hear, report = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, report)
            ours.callback(os.close, to_hear)
            carrier = _begin(role, (plan, sink, sink, report), variables, copy)
        except OSError as error:
            raise from_oserror(error, f"start {role.title}") from error
        ours.pop_all()
    return Process(role, carrier, to_tell, to_hear, identity, log)


def _begin(
    role: Role, files: Sequence[int], variables: Mapping[str, str | None], copy: bool
) -> Carrier:
    environment = python_environment(variables)
    if address := os.environ.get(SPAWNER):
        # Imported here, since most nodes have no spawner.
        from bootseer.served.spawner import ask_spawner

        spawned = ask_spawner(Path(address), role, environment, files)
        if spawned is not None:
            return spawned
    elif copy and may_fork():
        return _Child(_fork(role, files, environment))
    return _Child(spawn(role, files, environment))


def spawn(role: Role, files: Sequence[int], environment: Mapping[str, str]) -> int:
    """Start an interpreter with descriptors 0 to 3; return its pid. Raises: OSError, ValueError."""
    with contextlib.ExitStack() as stack:
        moved = _duplicated(files)
        for descriptor in moved:
            stack.callback(os.close, descriptor)
        return os.posix_spawn(
            sys.executable,
            # -P: do not import modules from the current directory.
            [sys.executable, "-P", "-m", role.module],
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(moved)],
            setsid=True,
            setsigmask=(),
        )


def _duplicated(files: Sequence[int]) -> list[int]:
    """Return copies of the descriptors with numbers above those that the new process uses."""
    return [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _REPORT + 1) for one in files]


def may_mount() -> bool:
    """Return whether this process can mount by itself, without a helper."""
    return os.geteuid() == 0 and os.access(_DEVICE, os.R_OK | os.W_OK)


# ---- a copy of this process ---------------------------------------------------------------------


def _fork(role: Role, files: Sequence[int], environment: Mapping[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(role, files, environment)
    return pid


def _become(role: Role, files: Sequence[int], environment: Mapping[str, str]) -> NoReturn:
    """Go on as if this process had been started by `python -m MODULE`."""
    code = _FAILED
    try:
        os.setsid()
        os.chdir("/")
        for number, descriptor in enumerate(_duplicated(files)):
            os.dup2(descriptor, number)
        close_descriptors(_REPORT)
        _reset_handlers()
        os.environ.clear()
        os.environ.update(environment)
        WAIT_BUDGET.limit(math.inf)
        try:
            _set_command_line(["python", "-m", role.module])
        except OSError:
            # A new command line, so that tools which end processes by it spare this one.
            os.execve(sys.executable, [sys.executable, "-P", "-m", role.module], environment)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115
            for number, mode in enumerate(("r", "w", "w"))
        )
        sys.argv[:] = [role.module]
        code = importlib.import_module(role.module).main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else _FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: everything above this frame belongs to the process that was copied.
        os._exit(code)


def _reset_handlers() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)


def _set_command_line(command: Sequence[str]) -> None:
    """Change the command line that `ps` shows. Raises: OSError if the kernel does not allow it."""
    fields = stat_fields("self")
    start, end = (int(field) for field in fields[_ARGUMENTS])
    if start == 0:
        raise PermissionError
    words = "\0".join(command).encode()[: end - start - 1]
    memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(memory, words.ljust(end - start, b"\0"), start)
    finally:
        os.close(memory)


# ---- the process's side -----------------------------------------------------------------------


def serve(
    role: Role,
    work: Callable[[bytes, "Report"], object],
    load: Callable[[], object] = lambda: None,
) -> int:
    """Wait for the plan on standard input; carry it out as a child of init; return the exit code.

    A child of init, since the job that replaces the program that started this process must not find
    a child that it never made. `work` gets the plan, one line, and the report; `load` imports what
    is needed, before the plan arrives.
    """
    os.chdir("/")
    os.set_inheritable(_REPORT, False)
    close_descriptors(_REPORT)
    load()
    line = sys.stdin.buffer.readline()
    if not line:
        # The process that started this one has ended, or does not need it.
        return 0
    if os.fork():
        os._exit(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    report = Report(role)
    try:
        work(line, report)
    except (BootseerError, OSError) as error:
        _log.error("%s", error)
        report.failed(error)
        return exit_code_of(error)
    except Exception as error:
        _log.exception("%s failed", role.title)
        report.failed(error)
        return 1
    return 0


class Report:
    """Message to the process that started this one, sent once. A forked copy has its own."""

    def __init__(self, role: Role) -> None:
        self._fd = _REPORT
        self._title = role.title
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            # Inherited from the starting process. A server must end by SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fileno(self) -> int:
        """Return the pipe's end, whose poll(2) reports a closed reader; -1 after sending."""
        return self._fd

    def ready(self, answer: Struct = Ready()) -> bool:  # noqa: B008  (frozen)
        """Report success. Return False if the reader has gone, or if there was a message before."""
        return self._send(_ReportMessage(answer=to_builtins(answer)))

    def failed(self, error: BaseException) -> None:
        """Report an error, which the other side raises. Never raises."""
        self._send(_ReportMessage(failure=encode_error(error, self._title)))

    def _send(self, message: _ReportMessage) -> bool:
        if self._fd < 0:
            return False
        try:
            os.write(self._fd, to_line(message).encode("ascii") + b"\n")
        except OSError:
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Close the report without a message. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
