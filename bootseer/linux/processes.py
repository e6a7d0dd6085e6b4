"""Processes: facts from /proc, signals, forked copies, and notes of processes in a folder.

Only this module reads /proc/PID/stat and status, and defines the names of notes: `PID-STARTED`,
which identify one process forever, or `PID-STARTED.ROLE`. Stateless; any thread, and every process
of the node.
"""

import contextlib
import errno
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from bootseer.linux.private_files import private_directory

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
KILLED_S = 10.0
"""Time for a killed process to end.

A process that waits for a dead file system may need longer than any deadline; it is left to init.
"""
_PR_SET_CHILD_SUBREAPER = 36
_THREADS_POLL_S = 0.002


def boot_id() -> str:
    """Return a text that changes with every boot of this kernel; "" if the kernel does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def has_capability(number: int) -> bool:
    """Return whether this process has the capability `number` (capabilities(7)) in effect."""
    return bool(int(status_line("self", "CapEff") or "0", 16) >> number & 1)


def status_line(pid: int | str, name: str) -> str:
    """Return the value of `name` in proc_pid_status(5); "" if there is none."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def is_in_user_namespace() -> bool:
    """Return whether root's rights end at a user namespace. Raises: OSError."""
    # user_namespaces(7): the initial namespace maps every id to itself.
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]


def start_time(pid: int) -> str:
    """Return the start time of a process in ticks since boot; "" if it has ended."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


class ProcessId(NamedTuple):
    """Pid and start time, which identify one process forever.

    The kernel reuses a pid after its process ends, and each PID namespace has pids of its own.
    """

    pid: int
    started: str
    """`start_time` of the process; "" stands for no process."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identity of the process that has this pid now."""
        return cls(pid, start_time(pid))

    def lives(self) -> bool:
        """Return whether the process has not ended. Any thread."""
        return bool(self.started) and start_time(self.pid) == self.started

    def is_stuck(self) -> bool:
        """Return whether this process has ended except for stuck threads; see `is_stuck`."""
        return is_stuck(self.pid) and stat_fields(self.pid)[19:20] == [self.started]

    def open(self) -> int:
        """Return a pidfd. Raises: ProcessLookupError if the process has ended; OSError."""
        descriptor = os.pidfd_open(self.pid) if self.lives() else -1
        # Check again: before the call the process may have ended, and its pid been reused.
        if descriptor >= 0 and self.lives():
            return descriptor
        if descriptor >= 0:
            os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def kill(self, number: int) -> bool:
        """Send signal `number`. Return whether the process still existed. Raises: OSError."""
        try:
            descriptor = self.open()
        except ProcessLookupError:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def is_stuck(pid: int) -> bool:
    """Return whether a process has ended except for threads that are stuck in the kernel.

    A killed thread is stuck if it stores a page (`Server.notify_store`) that its own process was to
    bring. No pidfd shows this state, also none with PIDFD_THREAD since Linux 6.15.
    """
    with contextlib.suppress(OSError):
        return stat_fields(pid)[:1] == ["Z"] and len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def own_ancestry() -> set[int]:
    """Return the pids of this process and its ancestors in this PID namespace."""
    found = set()
    pid = os.getpid()
    while pid and pid not in found and (fields := stat_fields(pid)):
        found.add(pid)
        pid = int(fields[1])
    return found


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; empty if the process has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the program's name in parentheses; the name may contain anything.
    return text.rpartition(")")[2].split()


def write_note(folder: Path, name: str) -> None:
    """Make an empty file `name` in the folder, made if needed. Raises: BootseerError, OSError."""
    path = private_directory(folder) / name
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def note_name(pid: int) -> str:
    """Return the note name of process `pid`, which identifies it forever."""
    return f"{pid}-{start_time(pid)}"


def note_process(folder: Path, pid: int, role: str = "") -> None:
    """Add a note of process `pid` to the folder. Raises: BootseerError, OSError."""
    write_note(folder, f"{note_name(pid)}.{role}" if role else note_name(pid))


def note_names(folder: Path) -> list[str]:
    """Return the names in the folder; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def living_notes(folder: Path) -> Iterator[tuple[ProcessId, str]]:
    """Yield each living process that has a note in the folder, and the note's role."""
    for name in note_names(folder):
        identity, _, role = name.partition(".")
        pid, _, started = identity.partition("-")
        if pid.isdigit() and (process := ProcessId(int(pid), started)).lives():
            yield process, role


def living_processes(folder: Path) -> Iterator[ProcessId]:
    """Yield the living processes that have a note in the folder."""
    return (process for process, _ in living_notes(folder))


def living_pids(folder: Path) -> set[int]:
    """Return the pids of the living processes that have a note in the folder."""
    return {process.pid for process in living_processes(folder)}


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> list[int]:
    """Return the descriptors that are readable or whose peer has closed; [] after `timeout_s`."""
    # Not select(2), which fails for descriptors above 1023.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else max(0.0, timeout_s * 1000)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def close_descriptors(*kept: int) -> None:
    """Close all descriptors of this process except the standard files and `kept`.

    Not by counting up to the limit, which may be 2^30: a billion calls without close_range(2).
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


def may_fork() -> bool:
    """Return whether this process has one thread, so that a copy cannot wait for another's lock."""
    return len(os.listdir("/proc/self/task")) == 1


def wait_single_threaded(timeout_s: float) -> bool:
    """Wait until all other threads of this process have ended. Return False after `timeout_s`.

    `Thread.join` returns shortly before the kernel's thread has ended.
    """
    until_s = time.monotonic() + timeout_s
    while not may_fork():
        if time.monotonic() >= until_s:
            return False
        time.sleep(_THREADS_POLL_S)
    return True


def wait_for_exit(pid: int, timeout_s: float | None) -> bool:
    """Return whether a child ends within `timeout_s`, without reaping it. Raises: OSError.

    By a pidfd, which tells at once; `subprocess` polls every 50 ms.
    """
    process = os.pidfd_open(pid)
    try:
        return bool(wait_readable([process], timeout_s))
    finally:
        os.close(process)


def reap(pid: int, timeout_s: float | None) -> int | None:
    """Reap a child that ends in time. Return its exit code, negative for a signal, or None."""
    with contextlib.suppress(OSError):
        if wait_for_exit(pid, timeout_s):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def kill_child(pid: int) -> int | None:
    """Kill a child that was not reaped yet, and reap it. Return as `reap` does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return reap(pid, KILLED_S)


class ForkedWork:
    """Work that runs in a forked copy of this process and returns bytes.

    For a process with one thread. `work` must handle its own exceptions.
    """

    def __init__(self, work: Callable[[], bytes], limit_s: float) -> None:
        """Fork the copy, which may run for `limit_s`. Raises: OSError."""
        self._reading, writing = os.pipe()
        self._deadline_s = time.monotonic() + limit_s
        self._answer = bytearray()
        self._has_ended = False
        self.pid = os.fork()
        if self.pid == 0:
            is_written = False
            try:
                os.close(self._reading)
                with os.fdopen(writing, "wb") as file:
                    file.write(work())
                is_written = True
            finally:
                os._exit(0 if is_written else 1)
        os.close(writing)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to `read`."""
        return self._reading

    @property
    def left_s(self) -> float:
        """Time that the copy has left, in seconds."""
        return self._deadline_s - time.monotonic()

    def read(self) -> bool:
        """Read a part of the answer. Return whether it was the end."""
        piece = os.read(self._reading, _READ_BYTES)
        self._answer += piece
        self._has_ended = not piece
        return self._has_ended

    def result(self) -> bytes:
        """Return the whole answer; if it is incomplete, kill the copy and return b"". Call once."""
        os.close(self._reading)
        # The copy closes its end of the pipe shortly before it exits.
        code = reap(self.pid, KILLED_S) if self._has_ended else None
        if code is None:
            kill_child(self.pid)
        return bytes(self._answer) if code == 0 else b""


def run_forked(work: Callable[[], bytes], limit_s: float) -> bytes:
    """Return the result of `work`, run as `ForkedWork`; b"" if it failed or was late."""
    forked = ForkedWork(work, limit_s)
    try:
        while wait_readable([forked.fileno()], forked.left_s) and not forked.read():
            pass
    finally:
        answer = forked.result()
    return answer


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends. Raises: OSError."""
    import ctypes  # here, since every start loads this module

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "prctl")


def child_processes() -> list[int]:
    """Return the pids of this process's children."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in text.split()]


def notify_systemd(state: str) -> None:
    """Send a state such as "READY=1" to systemd (sd_notify(3)). Never raises.

    Nothing is sent unless NOTIFY_SOCKET names a socket.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name:
        return
    import socket  # here, since every start loads this module

    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall(state.encode())
    except OSError as error:
        _log.warning("cannot tell %s that we are %s: %s", name, state, error)
