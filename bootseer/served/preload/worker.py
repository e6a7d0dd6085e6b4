"""Forking of a worker: a fork of the preloader becomes the requested process, its parent the guard.

`fork_worker` returns only in the worker, which then goes on as an interpreter that has just
started. Only this module defines which attributes such a process takes over, and which random state
it renews. Standard library alone.
"""

import _signal  # type: ignore[import-not-found]
import contextlib
import ctypes
import fcntl
import io
import os
import posix
import random
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bootseer.served.preload.checks import PreloadRefused
from bootseer.served.preload.shim import (
    SIGCHLD,
    SIGCONT,
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    read,
    send,
)

_HANDSHAKE_S = 10.0
_PREPARED = b"k"
_GUARD = b"bootseer-guard"
_PR_SET_PDEATHSIG = 1
_ARGUMENTS = slice(45, 47)
_LIMITS = {
    b"Max cpu time": resource.RLIMIT_CPU,
    b"Max file size": resource.RLIMIT_FSIZE,
    b"Max data size": resource.RLIMIT_DATA,
    b"Max stack size": resource.RLIMIT_STACK,
    b"Max core file size": resource.RLIMIT_CORE,
    b"Max resident set": resource.RLIMIT_RSS,
    b"Max processes": resource.RLIMIT_NPROC,
    b"Max open files": resource.RLIMIT_NOFILE,
    b"Max locked memory": resource.RLIMIT_MEMLOCK,
    b"Max address space": resource.RLIMIT_AS,
    b"Max pending signals": resource.RLIMIT_SIGPENDING,
    b"Max msgqueue size": resource.RLIMIT_MSGQUEUE,
    b"Max nice priority": resource.RLIMIT_NICE,
    b"Max realtime priority": resource.RLIMIT_RTPRIO,
    b"Max realtime timeout": resource.RLIMIT_RTTIME,
}
_LIMIT = re.compile(rb"(Max [a-z ]+?) {2,}(\S+) +(\S+)")


def fork_worker(
    connection: socket.socket,
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    own: tuple[Mapping[str, Any], bytes],
    check: Callable[[], None],
) -> bool:
    """Fork the guard, and from it the worker. Return whether this process is the worker.

    Returns in the worker when the stand-in has accepted it. `own` has the attributes of this
    process and the kernel's name for an ordinary interpreter; `check` raises an exception in a
    worker that must not be used. Raises: OSError, only in the preloader.
    """
    if os.fork():
        return False
    guardian = os.getpid()
    worker = -1
    told, tell = os.pipe2(os.O_CLOEXEC)
    wait, go = os.pipe2(os.O_CLOEXEC)
    try:
        worker = os.fork()
    except OSError as error:
        _refuse(connection, str(error))
        os._exit(1)
    if worker:
        try:
            for descriptor in (tell, wait, *descriptors):
                os.close(descriptor)
            _become_guard(connection, worker, told, go)
        except BaseException as error:
            _refuse(connection, str(error))
        finally:
            os._exit(1)  # the worker, which has not begun, ends with its parent
    pipes = [tell, wait]
    try:
        connection.close()
        _become(request, descriptors, own, guardian, pipes, check)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(pipes[0], str(error).encode()[:4000])
        os._exit(1)
    return True


def _refuse(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"R{reason}".encode()[:4000])


def _become_guard(connection: socket.socket, worker: int, told: int, go: int) -> NoReturn:
    """Release the worker when the stand-in has accepted it, and become its guard."""
    if (answer := os.read(told, 4096)) != _PREPARED:
        raise PreloadRefused(answer.decode(errors="replace") or "the worker has ended")
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(b"F")
    if connection.recv(1) != b"G":
        raise PreloadRefused("the stand-in does not wait for the worker")
    stand_in = peer_credentials(connection)[0]
    # Before the worker runs, since its program may ask for its parent's name.
    set_command_line(["bootseer guard", str(worker)], _GUARD)
    os.write(go, b"G")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _close_all_but({0, 1, 2, connection.fileno()})
    guard(connection, worker, stand_in)


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process at the other end of a connection."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, group = (int.from_bytes(data[at : at + 4], sys.byteorder) for at in (0, 4, 8))
    return pid, user, group


# ---- the worker's side ------------------------------------------------------------------------


def _become(
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    own: tuple[Mapping[str, Any], bytes],
    guardian: int,
    pipes: list[int],
    check: Callable[[], None],
) -> None:
    """Take over everything that an ordinary worker would inherit; wait to be accepted."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guardian:
        os._exit(1)
    os.setsid()
    os.fchdir(descriptors[-1])
    _take_descriptors(request["descriptors"], descriptors[:-1], pipes)
    _take_attributes(request, own[0])
    _take_command_line(request, own[1])
    _renew_streams()
    check()
    os.write(pipes[0], _PREPARED)
    os.close(pipes[0])
    if os.read(pipes[1], 1) != b"G":
        os._exit(1)
    os.close(pipes[1])


def _take_descriptors(numbers: Sequence[int], descriptors: Sequence[int], pipes: list[int]) -> None:
    """Give the files the numbers that they had; close all others except the pipes, which move."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in (*descriptors, *pipes)]
    pipes[:] = moved[-len(pipes) :]
    for number, one in zip(numbers, moved, strict=False):
        os.dup2(one, number, inheritable=True)
    _close_all_but({*numbers, *pipes})


def _close_all_but(kept: Collection[int]) -> None:
    # Not by counting up to the limit, which may be 2^30.
    for text in os.listdir("/proc/self/fd"):
        if int(text) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(text))


def _take_attributes(request: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    os.umask(request["umask"])
    if request["limits"] != own["limits"]:
        for kind, soft, hard in _LIMIT.findall(request["limits"]):
            if kind in _LIMITS:
                resource.setrlimit(_LIMITS[kind], (_limit(soft), _limit(hard)))
    if request["nice"] != own["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    if request["affinity"] != own["affinity"]:
        os.sched_setaffinity(0, request["affinity"])
    if request["oom_score_adj"] != own["oom_score_adj"]:
        Path("/proc/self/oom_score_adj").write_bytes(request["oom_score_adj"])
    for number in range(1, signal.NSIG):
        bit = 1 << (number - 1)
        if (request["ignored"] ^ own["ignored"]) & bit:
            default = signal.SIG_DFL
            if number == signal.SIGINT:
                default = signal.default_int_handler  # type: ignore[assignment]
            signal.signal(number, signal.SIG_IGN if request["ignored"] & bit else default)
    blocked = {n for n in range(1, signal.NSIG) if request["blocked"] & (1 << (n - 1))}
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _limit(text: bytes) -> int:
    return resource.RLIM_INFINITY if text == b"unlimited" else int(text)


def _take_command_line(request: Mapping[str, Any], name: bytes) -> None:
    """Set arguments, environment, and the command that `ps` shows."""
    os.environ.clear()
    os.environb.update(request["environment"])
    words: list[str] = request["words"]
    options = 1 if words[0] == "-u" else 0
    is_module = words[options] == "-m"
    sys.orig_argv[:] = [sys.executable, *words]
    sys.argv[:] = ["-m", *words[options + 2 :]] if is_module else words[options:]
    set_command_line([sys.executable, *words], name)


def set_command_line(words: Sequence[str], name: bytes) -> None:
    """Set the command and name that `ps` shows; cut to the length of the first command line."""
    with contextlib.suppress(OSError, ValueError):
        Path("/proc/self/comm").write_bytes(name)
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS])
        text = b"\0".join(word.encode(errors="surrogateescape") for word in words)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(text[: end - start - 1].ljust(end - start, b"\0"))


def _renew_streams() -> None:
    """Initialise the standard streams in place, since preloaded modules hold the objects."""
    names = ("<stdin>", "<stdout>", "<stderr>")
    streams: Any = (sys.stdin, sys.stdout, sys.stderr)
    for number, (name, stream) in enumerate(zip(names, streams, strict=True)):
        # The same buffering as CPython's create_stdio.
        raw: Any = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
        raw.name = name
        buffer = raw
        is_unbuffered = stream.write_through
        if number == 0 or not is_unbuffered:
            kind = io.BufferedReader if number == 0 else io.BufferedWriter
            size = os.fstat(number).st_blksize
            buffer = kind(raw, size if size > 1 else io.DEFAULT_BUFFER_SIZE)
        is_by_line = not is_unbuffered and (number == 2 or os.isatty(number))
        stream.__init__(
            buffer,
            stream.encoding,
            stream.errors,
            newline="\n",
            line_buffering=is_by_line,
            write_through=is_unbuffered,
        )


def stateful_modules(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the modules that hold random state or the start time of their process."""
    names = ("numpy.random.mtrand", "multiprocessing.process", "transformers.utils.hub", "logging")
    return {name: module for name, module in modules if name in names}


def reseed(drawn: Mapping[str, Any], generators: Iterable[random.Random]) -> None:
    """Renew random generators, random ids and start times, so that they are this process's own."""
    random.seed()
    for generator in generators:
        generator.seed()
    for name, module in drawn.items():
        if name == "numpy.random.mtrand":
            module.seed()
        elif name == "multiprocessing.process":
            module.current_process().authkey = os.urandom(32)
        elif name == "transformers.utils.hub":
            module.SESSION_ID = os.urandom(16).hex()
        elif hasattr(module, "_startTime"):
            module._startTime = (time.time_ns if sys.version_info >= (3, 13) else time.time)()
    if (set_native_id := getattr(threading.main_thread(), "_set_native_id", None)) is not None:
        set_native_id()


# ---- the guard -----------------------------------------------------------------------------------

# The parent of a forked worker passes signals, and ends the worker together with its stand-in. It
# is a fork of the preloader, like the worker, since an interpreter of its own would double a
# worker's start. It observes two processes and nothing else.


_CHECK_MS = 200


def guard(connection: Any, worker: int, stand_in: int) -> NoReturn:
    """Report the worker's end, pass signals on to it, and kill it if its stand-in ends."""
    descriptor = connection.fileno()
    connection.setblocking(False)
    reader, writer = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _signal.signal(SIGCHLD, lambda *_: None)
    for number in (1, 2, 3, SIGTERM):
        _signal.signal(number, _signal.SIG_IGN)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(reader, select.POLLIN)
    state = _Guard(connection, worker, stand_in)
    while True:
        # Before the first wait, since the worker may have ended before there was a handler.
        state.follow_worker()
        state.follow_stand_in()
        for ready, _ in poll.poll(_CHECK_MS):
            if ready == reader:
                posix.read(reader, 512)
            else:
                state.receive()


class _Guard:
    """Both processes as the guard knows them: stopped or not, and by whom."""

    def __init__(self, connection: Any, worker: int, stand_in: int) -> None:
        self._connection = connection
        self._worker = worker
        self._stand_in = stand_in
        # The guard has stopped the worker; somebody else has.
        self._is_stopped = self._is_stopped_by_others = False
        # The stand-in was asked to stop; the stand-in has confirmed that.
        self._is_asked = self._has_confirmed = False
        # Number of SIGCONT sent to the stand-in by the guard, which the stand-in will pass on.
        self._own_count = 0

    def follow_worker(self) -> None:
        """Make the stand-in do what the worker has done: stop, go on, or end."""
        flags = posix.WNOHANG | posix.WUNTRACED | posix.WCONTINUED
        pid, status = posix.waitpid(self._worker, flags)
        if pid and posix.WIFSTOPPED(status):
            if not self._is_stopped:
                self._is_stopped_by_others = self._is_asked = True
                self._has_confirmed = False
                send(self._connection, b"S\0\0\0\0")
        elif pid and posix.WIFCONTINUED(status):
            self._is_asked |= self._is_stopped
            self._is_stopped = self._is_stopped_by_others = False
        elif pid:
            send(self._connection, b"E" + status.to_bytes(4, "big"))
            posix._exit(0)

    def follow_stand_in(self) -> None:
        """Stop the worker if somebody has stopped the stand-in."""
        # No event reports that a process other than a child was stopped, so its state is polled.
        state = read(f"/proc/{self._stand_in}/stat").rpartition(b")")[2].split()[:1]
        if state == [b"T"] and not self._is_stopped_by_others:
            if self._is_asked:
                self._is_asked = False
                self._own_count += 1
                _kill(self._stand_in, SIGCONT, of_group=False)
            elif not self._is_stopped:
                self._is_stopped = True
                _kill(self._worker, SIGSTOP, of_group=True)

    def receive(self) -> None:
        """Pass the stand-in's signals on; kill the worker if the stand-in has ended."""
        try:
            data = self._connection.recv(512)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # If the worker is a launcher, its workers have process groups of their own.
            for one in _stopped_descendants(self._worker):
                _kill(one, SIGKILL, of_group=False)
            _kill(self._worker, SIGKILL, of_group=True)
            posix.waitpid(self._worker, 0)
            posix._exit(0)
        for place in range(0, len(data) - 1, 2):
            self._pass_on(data[place], of_group=bool(data[place + 1]))

    def _pass_on(self, number: int, *, of_group: bool) -> None:
        if number == 0:
            self._has_confirmed = True
        elif number == SIGCONT and self._own_count:
            self._own_count -= 1
        elif number == SIGCONT and self._is_stopped_by_others and not self._has_confirmed:
            return  # sent before the worker was stopped
        else:
            if number == SIGCONT:
                self._is_stopped = False
                self._is_asked = self._is_asked and not self._has_confirmed
            _kill(self._worker, number, of_group=of_group)


def _kill(worker: int, number: int, *, of_group: bool) -> None:
    try:
        if of_group and posix.getpgid(worker) == worker:
            posix.killpg(worker, number)
        else:
            posix.kill(worker, number)
    except OSError:
        return


def _stopped_descendants(pid: int) -> list[int]:
    """Stop the process and all its descendants, and return the descendants."""
    _kill(pid, SIGSTOP, of_group=False)
    found: list[int] = []
    try:
        tasks = posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        for child in map(int, read(f"/proc/{pid}/task/{task}/children").split()):
            found += [*_stopped_descendants(child), child]
    return found
