"""What the kernel says of processes, and notes in a folder of which of them use something.

Alone reads /proc/PID/stat and status, and owns the names of notes: `PID-STARTED`, which names one
process for ever. Stateless; any thread, and every process of the node.
"""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from bootseer.linux.private_files import private_directory

_READ_BYTES = 1 << 16
KILLED_S = 10.0
"""Time for a killed process to end. One that waits for a dead file system may need longer than any
deadline: it is left to init."""
_PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str:
    """Changes with every boot of this kernel; "" where it does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def has_capability(number: int) -> bool:
    """Whether this process has a capability, as capabilities(7) numbers them, in effect."""
    return bool(int(status_line("self", "CapEff") or "0", 16) >> number & 1)


def status_line(pid: int | str, name: str) -> str:
    """What proc_pid_status(5) has under `name`; "" where it is gone or has no such line."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def is_in_user_namespace() -> bool:
    """Whether root's rights end at a user namespace. Raises: OSError."""
    # user_namespaces(7): the initial one maps everything to itself.
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]


def start_time(pid: int) -> str:
    """When a process started, in ticks since the boot: with its id it names the process for ever.
    "" if it has ended."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


class ProcessId(NamedTuple):
    """Process id and start time, which name one process for ever: the id alone is given away again
    after the process, and means another process in another PID namespace."""

    pid: int
    started: str
    """`start_time` of the process; "" names no process."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the name of the process that has this id now."""
        return cls(pid, start_time(pid))

    def lives(self) -> bool:
        """Return whether the process has not ended. Any thread."""
        return bool(self.started) and start_time(self.pid) == self.started

    def is_stuck(self) -> bool:
        """Return whether this process `is_stuck`."""
        return is_stuck(self.pid) and stat_fields(self.pid)[19:20] == [self.started]

    def open(self) -> int:
        """Return a pidfd of the process.

        Raises: ProcessLookupError if it has ended, whatever has its id now; OSError.
        """
        descriptor = os.pidfd_open(self.pid) if self.lives() else -1
        # Before it was opened the process may have ended, and its id have been given away.
        if descriptor >= 0 and self.lives():
            return descriptor
        if descriptor >= 0:
            os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def kill(self, number: int) -> bool:
        """Send a signal. Return whether the process was there to take it.

        Raises: OSError, such as PermissionError.
        """
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
    """Return whether a process has ended but for threads that wait in the kernel, whatever kills
    them.

    So does one that stores a page (`Server.notify_store`) which the process itself was to bring.
    No descriptor tells, since Linux 6.15 also none of PIDFD_THREAD.
    """
    with contextlib.suppress(OSError):
        return stat_fields(pid)[:1] == ["Z"] and len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def own_line() -> set[int]:
    """Returns this process and its ancestors, as far as this PID namespace shows them."""
    found = set()
    pid = os.getpid()
    while pid and pid not in found and (fields := stat_fields(pid)):
        found.add(pid)
        pid = int(fields[1])
    return found


def stat_fields(pid: int | str) -> list[str]:
    """The fields that proc_pid_stat(5) has of a process, from the state on; nothing where it is
    gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the program's name in parentheses, with anything in it.
    return text.rpartition(")")[2].split()


def write_note(folder: Path, name: str) -> None:
    """Make an empty file of this name in the folder, which is made if need be.

    Raises: BootseerError, OSError.
    """
    path = private_directory(folder) / name
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def name_of(pid: int) -> str:
    """What names process `pid` for ever."""
    return f"{pid}-{start_time(pid)}"


def note_process(folder: Path, pid: int) -> None:
    """Note process `pid` in the folder. Raises: BootseerError, OSError."""
    write_note(folder, name_of(pid))


def notes(folder: Path) -> list[str]:
    """The names in the folder; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def living_processes(folder: Path) -> Iterator[ProcessId]:
    """Yield the processes noted in the folder that live."""
    for name in notes(folder):
        pid, _, started = name.partition("-")
        if pid.isdigit() and (process := ProcessId(int(pid), started)).lives():
            yield process


def living_ids(folder: Path) -> set[int]:
    """Return the ids of the processes noted in the folder that live."""
    return {process.pid for process in living_processes(folder)}


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> list[int]:
    """Returns the descriptors that can be read or have lost their peer; [] after `timeout_s`."""
    # Not select(2), which fails for descriptors above 1023.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else max(0.0, timeout_s * 1000)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def close_descriptors(kept: int) -> None:
    """Close all descriptors of this process but the standard files and `kept`.

    Not all numbers below the limit: that may be 2^30, a billion calls where there is no
    close_range(2).
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def may_fork() -> bool:
    """Return whether no other thread can hold a lock that a copy of this process would wait for."""
    return len(os.listdir("/proc/self/task")) == 1


def wait_ended(pid: int, timeout_s: float | None) -> bool:
    """Whether a child ended in time, at once when it does; `subprocess` looks every 50 ms. It is
    left to be waited for. Raises: OSError."""
    process = os.pidfd_open(pid)
    try:
        return bool(wait_readable([process], timeout_s))
    finally:
        os.close(process)


def reap(pid: int, timeout_s: float | None) -> int | None:
    """Wait for a child, and let its id go: returns its exit code, as
    `os.waitstatus_to_exitcode` has it; None where it has not ended in time, or was no child."""
    with contextlib.suppress(OSError):
        if wait_ended(pid, timeout_s):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def kill_child(pid: int) -> int | None:
    """Kill a child that nobody has reaped yet, and reap it: returns what `reap` does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return reap(pid, KILLED_S)


class Copy:
    """A copy of this process that works on something, and tells what came of it.

    For a process without threads. What `work` raises is for `work` to tell.
    """

    def __init__(self, work: Callable[[], bytes], limit_s: float) -> None:
        """`limit_s`: what the copy may take. Raises: OSError."""
        self._reading, writing = os.pipe()
        self._deadline_s = time.monotonic() + limit_s
        self._answer = bytearray()
        self._has_ended = False
        self.pid = os.fork()
        if self.pid == 0:
            is_told = False
            try:
                os.close(self._reading)
                with os.fdopen(writing, "wb") as file:
                    file.write(work())
                is_told = True
            finally:
                os._exit(0 if is_told else 1)
        os.close(writing)

    def fileno(self) -> int:
        """Readable when there is something to `hear`."""
        return self._reading

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self._deadline_s - time.monotonic()

    def hear(self) -> bool:
        """Read what it has told since. Return whether that is all."""
        piece = os.read(self._reading, _READ_BYTES)
        self._answer += piece
        self._has_ended = not piece
        return self._has_ended

    def result(self) -> bytes:
        """Return what it has told, if that is all; else end it: half an answer is none. Once."""
        os.close(self._reading)
        # It closes its end before it ends itself.
        code = reap(self.pid, KILLED_S) if self._has_ended else None
        if code is None:
            # What it hangs in, its threads and connections go with it.
            kill_child(self.pid)
        return bytes(self._answer) if code == 0 else b""


def in_a_copy(work: Callable[[], bytes], limit_s: float) -> bytes:
    """Return what `work` returns in a copy of this process; empty where it did not end in time, or
    was killed. See `Copy`."""
    copy = Copy(work, limit_s)
    try:
        while wait_readable([copy.fileno()], copy.left_s) and not copy.hear():
            pass
    finally:
        answer = copy.result()
    return answer


def be_subreaper() -> None:
    """Become the parent of processes below this one whose own parent ends. Raises: OSError."""
    import ctypes  # here: every start loads this module

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "prctl")


def child_processes() -> list[int]:
    """The children of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in text.split()]
