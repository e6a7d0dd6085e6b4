"""How a worker of a supervisor ends, and how that is noticed. Stateless."""

import os
from pathlib import Path

from bootseer.linux.waiting import wait_ended

_STUCK_S = 1.0
"""In which the threads of a killed process end that do not wait for the kernel."""


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether it ended in time; then it is reaped."""
    if not wait_ended(pid, timeout_s):
        return False
    reap(pid)
    return True


def is_stuck(pid: int) -> bool:
    """Whether a process has ended but for threads that wait in the kernel, whatever kills them.

    So does one that stores a page (`Server.notify_store`) which the process itself was to bring:
    its successor will. No descriptor tells, since Linux 6.15 also none of PIDFD_THREAD.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state == b"Z" and len(os.listdir(f"/proc/{pid}/task")) > 1


def code_of(worker: int) -> int | None:
    """How a worker ended; None for one that was killed and is stuck, or frozen with its cgroup. It
    ends later: see `reap_ended`."""
    return reap(worker) if wait_ended(worker, _STUCK_S) else None


def reap_ended(pids: set[int]) -> None:
    """Take those out that have ended meanwhile. Never waits."""
    for pid in tuple(pids):
        if os.waitpid(pid, os.WNOHANG)[0]:
            pids.remove(pid)


def reap(pid: int) -> int:
    """The exit code of a process that has ended, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def died_of(code: int) -> str:
    """The exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
