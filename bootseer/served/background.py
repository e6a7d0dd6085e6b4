"""Processes that serve in the background: begun, told what to do, and heard once.

Alone owns that exchange, both sides of it. `begin` runs `python -m MODULE REPORT_FD` when it is
clear that there will be such a process, which loads its code beside whatever else a start has to
do; `ServerProcess.serve` hands it its plan, on its standard input and never on a command line: it
may hold credentials. A program of ours may do the first before it knows its settings:
`begin_early`. The process (`life.run_server`) goes on as a child of init, makes a `Report` of the
descriptor, and says "ready" or why not. Light, since the program that starts a server waits for
what is loaded here. Edge module; one thread for each object.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from msgspec import Struct

from bootseer.base.documents import from_line, to_line
from bootseer.base.json_errors import Failure, error_of, failure_of
from bootseer.errors import BootseerError, DeadlineError, UnavailableError, from_oserror
from bootseer.linux.locks import open_log
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import KILLED_S, wait_readable
from bootseer.linux.scripts import python_environment
from bootseer.served.forked import Forked, fork_into, may_fork

if TYPE_CHECKING:
    from bootseer.served.spawned import Spawned

    _Process: TypeAlias = subprocess.Popen[bytes] | Forked | Spawned

SPAWNER = "BOOTSEER_SPAWNER"
"""The variable that names the socket of the process that starts servers in this one's place."""
START_S = 30.0
_REPORT_BYTES_MAX = 1 << 16
_LOG_TAIL_BYTES = 2000
_DEVICE = "/dev/fuse"
_ahead: "tuple[str, ServerProcess] | None" = None
"""The module, and the process, of what `begin_early` has begun."""


class _Message(Struct, frozen=True):
    """What a process says to the process that started it."""

    is_ready: bool = False
    failure: Failure | None = None


class ServerProcess:
    """A process that waits to be told what to do. A `with` block ends it unless it was told."""

    def __init__(self, process: "_Process", report_fd: int, what: str, log: Path) -> None:
        self.identity = ""
        """The identity of the mount that it will serve."""
        self.log = log
        """Where its last words are looked for."""
        self.process = process
        self._report_fd = report_fd
        self._what = what

    def serve(self, plan: str, timeout_s: float = START_S) -> None:
        """Hand it its plan, once, and `wait`."""
        self.hand(plan)
        self.wait(timeout_s)

    def hand(self, plan: str) -> None:
        """Hand it its plan, once, a line that fits into a pipe (64 KiB): it prepares what it can
        until `go`. Then `wait`."""
        assert self.process.stdin is not None
        try:
            # Its report, or the lack of one, tells more than the broken pipe.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(f"{plan}\n".encode())
                self.process.stdin.flush()
        except BaseException:
            self.abandon()
            raise

    def go(self) -> None:
        """What its plan says is there. Idempotent, once it was handed that."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, timeout_s: float = START_S) -> None:
        """Once it was handed its plan: `go`, and it serves when this returns, as a child of init.

        Raises: what it reported instead; UnavailableError when it ended without a word;
        DeadlineError.
        """
        self.go()
        try:
            # Several processes may report one failure: the first is nearest to the cause.
            line = self._read(timeout_s).partition(b"\n")[0]
        finally:
            # What was begun has ended by now, as it should: its child serves.
            self.abandon()
        message = from_line(line, _Message) if line else _Message()
        if message.failure is not None:
            raise error_of(message.failure)
        if not message.is_ready:
            raise UnavailableError(f"{self._what} ended before it was ready: {self._last_words()}")

    def _read(self, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        data = b""
        while b"\n" not in data and len(data) < _REPORT_BYTES_MAX:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not wait_readable([self._report_fd], left_s):
                raise DeadlineError(
                    f"{self._what} was not ready in {timeout_s:g} s; see {self.log}"
                )
            piece = os.read(self._report_fd, _REPORT_BYTES_MAX)
            if not piece:
                # Killed in the middle of a line: it has said nothing.
                return b""
            data += piece
        return data

    def _last_words(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES, 0))
                tail = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            tail = ""
        return f"{self.log}: {tail}" if tail else f"see {self.log}"

    def abandon(self) -> None:
        """End the process that was begun, if it lives, and close its pipes. Idempotent."""
        fd, self._report_fd = self._report_fd, -1
        if fd < 0:
            return
        os.close(fd)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


def begin(
    module: str,
    what: str,
    log: Path | None,
    *,
    forks: bool = False,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> ServerProcess:
    """Start `module`, whose `main` is `life.run_server`, in a session of its own; its output goes
    to the end of the file `log`, or nowhere until it calls `write_to`. It ends when it gets no plan
    because we have ended.

    `what` names the process in messages. `forks`: it may be a copy of this one (see `forked`).
    `variables`: what its environment has beside ours, such as credentials; None: what it lacks.
    Raises: BootseerError; no process is left then.
    """
    try:
        sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if log is None else open_log(log)
    except OSError as error:
        raise from_oserror(error, f"open the log {log}") from error
    log = log or Path(os.devnull)
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        process: _Process
        if forks and may_fork() and not os.environ.get(SPAWNER):
            process = fork_into(module, [str(theirs)], python_environment(), sink, theirs)
        else:
            process = spawn(module, (), sink, theirs, stdin=subprocess.PIPE, variables=variables)
    except BaseException as error:
        os.close(ours)
        if isinstance(error, OSError):
            raise from_oserror(error, f"start {what}") from error
        raise
    finally:
        os.close(theirs)
        os.close(sink)
    return ServerProcess(process, ours, what, log)


def spawn(
    module: str,
    arguments: Sequence[str],
    sink: int,
    fd: int,
    *,
    stdin: int = subprocess.DEVNULL,
    is_orphan: bool = False,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> "subprocess.Popen[bytes] | Spawned":
    """Start a program of ours in a session of its own, where the spawner is if there is one (see
    `spawned`). It inherits the descriptor `fd`, whose number is its last argument; its output goes
    to `sink`. `is_orphan`: it is no child of this process, which may become another program.

    Raises: OSError, UnavailableError.
    """
    if address := os.environ.get(SPAWNER):
        # Here: no start of a job has one.
        from bootseer.served.spawned import ask_spawner

        has_input = stdin == subprocess.PIPE
        spawned = ask_spawner(
            Path(address), module, arguments, sink, fd, variables, has_input=has_input
        )
        if spawned is not None:
            return spawned
    # The shell ends at once, and what it began has no parent any more.
    shell = ["/bin/sh", "-c", '"$@" &', "sh"] if is_orphan else []
    process = subprocess.Popen(
        [*shell, sys.executable, "-m", module, *arguments, str(fd)],
        stdin=stdin,
        stdout=sink,
        stderr=sink,
        pass_fds=[fd],
        start_new_session=True,
        env=python_environment(variables),
        cwd="/",
    )
    if is_orphan:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    return process


def begin_server(
    run_dir: Path,
    module: str,
    what: str,
    *,
    identity: str | None = None,
    forks: bool = False,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> ServerProcess:
    """`begin` a process that will serve a mount, by default one that has no name yet. What
    `begin_early` began is as good as a new one. Raises: BootseerError."""
    global _ahead
    from bootseer.served.folders import log_path, new_identity

    identity = identity or new_identity()
    log = log_path(run_dir, identity)
    private_directory(log.parent)
    if _ahead is not None and _ahead[0] == module:
        process, _ahead = _ahead[1], None
        # It opens it itself, once it is told what to serve.
        process.log = log
    else:
        process = begin(module, what, log, forks=forks, variables=variables)
    process.identity = identity
    return process


def begin_early(module: str, load: Callable[[], object]) -> None:
    """Begin the server of `module` that `begin_server` will give first: a copy of this process,
    which loads its code while this one finds out what it was asked for. `load` brings what both
    need. Nothing where that cannot be.

    Only for a program of ours, at its beginning.
    """
    global _ahead
    if may_mount() and may_fork():
        load()
        with contextlib.suppress(BootseerError):
            _ahead = module, begin(module, "the server", None, forks=True)


def is_begun_ahead() -> bool:
    """Whether `begin_server` has one to give."""
    return _ahead is not None


def end_early() -> None:
    """End the server that `begin_early` began, if none was asked for. Idempotent."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None:
        ahead[1].abandon()


def may_mount() -> bool:
    """Whether this process can mount anything by itself."""
    return os.geteuid() == 0 and os.access(_DEVICE, os.R_OK | os.W_OK)


# ---- the process's side -----------------------------------------------------------------------


def write_to(log: Path) -> None:
    """What it prints goes to the end of the file `log` from now on.

    Raises: BootseerError.
    """
    try:
        sink = open_log(log)
        for number in (1, 2):
            os.dup2(sink, number)
        os.close(sink)
    except OSError as error:
        raise from_oserror(error, f"open the log {log}") from error


class Report:
    """One message to the process that started this one; later ones go nowhere. A fork has a
    copy of its own."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd = fd
        self._what = what
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            # Ignored by the process that started us. A server that does so cannot be told to end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fileno(self) -> int:
        """The end of a pipe, which poll(2) reports once nobody can read the message any more; -1
        when it was sent."""
        return self._fd

    def send_ready(self) -> bool:
        """False when who started us is gone, or has been told something before."""
        return self._send(_Message(is_ready=True))

    def send_error(self, error: BaseException) -> None:
        """So that the other side raises the same. Never raises."""
        self._send(_Message(failure=failure_of(error, self._what)))

    def _send(self, message: _Message) -> bool:
        try:
            os.write(self._fd, to_line(message).encode("ascii") + b"\n")
        except OSError:
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
