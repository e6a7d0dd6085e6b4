"""A fork of the preloader becomes the process that was asked for, and its parent its guard.

`fork_worker` returns in the worker alone, which then goes on as an interpreter that has just begun.
Alone owns what such a process takes over, and what it draws anew. Standard library alone.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bootseer.served.preload.checks import Refusal
from bootseer.served.preload.guard import guard

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
    """Fork the guard, and from it the worker. True in the worker, once the other side wants it;
    False in the preloader. Raises: OSError, in the preloader alone.

    `own`: the situation of this process, and what the kernel calls an ordinary interpreter.
    `check` is called in the worker, and raises what speaks against it.
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
            _hand_over(connection, worker, told, go)
        except BaseException as error:
            _refuse(connection, str(error))
        finally:
            os._exit(1)  # with it the worker, which has not begun
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


def _hand_over(connection: socket.socket, worker: int, told: int, go: int) -> NoReturn:
    """Let the worker begin when the other side knows of it, and become its guard."""
    if (answer := os.read(told, 4096)) != _PREPARED:
        raise Refusal(answer.decode(errors="replace") or "the worker has ended")
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(b"F")
    if connection.recv(1) != b"G":
        raise Refusal("nobody waits for it")
    stand_in = peer_of(connection)[0]
    # Before the worker runs: its program may ask who its parent is.
    show_as(["bootseer guard", str(worker)], _GUARD)
    os.write(go, b"G")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _close_all_but({0, 1, 2, connection.fileno()})
    guard(connection, worker, stand_in)


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side of a connection."""
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
    """Take over all that an ordinary worker would inherit, tell so, and wait until it is wanted."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guardian:
        os._exit(1)
    os.setsid()
    os.fchdir(descriptors[-1])
    _take_descriptors(request["descriptors"], descriptors[:-1], pipes)
    _take_situation(request, own[0])
    _take_words(request, own[1])
    _renew_streams()
    check()
    os.write(pipes[0], _PREPARED)
    os.close(pipes[0])
    if os.read(pipes[1], 1) != b"G":
        os._exit(1)
    os.close(pipes[1])


def _take_descriptors(numbers: Sequence[int], descriptors: Sequence[int], pipes: list[int]) -> None:
    """Give the files the numbers that they had, and close all others but the pipes, which move."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in (*descriptors, *pipes)]
    pipes[:] = moved[-len(pipes) :]
    for number, one in zip(numbers, moved, strict=False):
        os.dup2(one, number, inheritable=True)
    _close_all_but({*numbers, *pipes})


def _close_all_but(kept: Collection[int]) -> None:
    # Not all numbers below the limit, which may be 2^30.
    for text in os.listdir("/proc/self/fd"):
        if int(text) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(text))


def _take_situation(request: Mapping[str, Any], own: Mapping[str, Any]) -> None:
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


def _take_words(request: Mapping[str, Any], name: bytes) -> None:
    """Arguments, environment, and what `ps` shows."""
    os.environ.clear()
    os.environb.update(request["environment"])
    words: list[str] = request["words"]
    options = 1 if words[0] == "-u" else 0
    is_module = words[options] == "-m"
    sys.orig_argv[:] = [sys.executable, *words]
    sys.argv[:] = ["-m", *words[options + 2 :]] if is_module else words[options:]
    show_as([sys.executable, *words], name)


def show_as(words: Sequence[str], name: bytes) -> None:
    """Have `ps` show this command, as far as the memory of the first one reaches, and this name."""
    with contextlib.suppress(OSError, ValueError):
        Path("/proc/self/comm").write_bytes(name)
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS])
        text = b"\0".join(word.encode(errors="surrogateescape") for word in words)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(text[: end - start - 1].ljust(end - start, b"\0"))


def _renew_streams() -> None:
    """Make `sys.stdin` and its kin anew in place, for other kinds of files than the preloader's:
    modules that were imported hold these very objects."""
    names = ("<stdin>", "<stdout>", "<stderr>")
    streams: Any = (sys.stdin, sys.stdout, sys.stderr)
    for number, (name, stream) in enumerate(zip(names, streams, strict=True)):
        # As CPython's create_stdio.
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


def drawn_by(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Those of the modules that have drawn something for their process, or noted its beginning."""
    names = ("numpy.random.mtrand", "multiprocessing.process", "transformers.utils.hub", "logging")
    return {name: module for name, module in modules if name in names}


def draw_anew(drawn: Mapping[str, Any], generators: Iterable[random.Random]) -> None:
    """Random numbers and names, and clocks, as a process of its own has them."""
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
