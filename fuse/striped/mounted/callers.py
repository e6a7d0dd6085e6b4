"""State of the process behind a request, from /proc.

A process in an invisible pid namespace (pid 0) counts as alive.
"""

import queue
import signal
import threading

from bootseer.fuse.kernel.operations import Caller
from bootseer.linux.processes import stat_fields, status_line

_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PF_EXITING = 0x4
# Positions in /proc/<pid>/stat (proc(5)), counted from the field behind the name.
_FLAGS_FIELD = 6
_EXIT_CODE_FIELD = 49
_STAT_S = 1.0
"""Deadline of a read below /proc, which takes microseconds."""


def is_dying(caller: Caller) -> bool:
    """Return whether the process behind an interrupted request has been killed.

    The kernel sends INTERRUPT for any signal. Only a fatal signal (SIGKILL, to which the kernel
    converts other fatal ones) may end a read or write early, because programs do not expect EINTR
    from a file.
    """
    if not caller.is_interrupted or not caller.pid:
        return False
    pending = (status_line(caller.pid, name) or "0" for name in ("SigPnd", "ShdPnd"))
    return any(int(signals, 16) & _SIGKILL_BIT for signals in pending)


def process_of(caller: Caller) -> int:
    """Return the id of the process behind a request, which names a thread; 0 if it is unknown."""
    return int(status_line(caller.pid, "Tgid") or "0") if caller.pid else 0


def was_killed(caller: Caller) -> bool:
    """Return whether a signal has ended the process whose descriptor is being closed.

    The kernel closes the files of a dying process like the process itself would; but by then the
    task is marked as exiting, and its exit code holds the signal.

    A process that executes another program closes descriptors during execve(2), and its `stat`
    cannot be read before the close is answered. So a process whose `stat` cannot be read in time
    was not killed.
    """
    if not caller.pid:
        return False
    answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: answers.put(stat_fields(caller.pid)), name="stat", daemon=True
    ).start()
    try:
        fields = answers.get(timeout=_STAT_S)
    except queue.Empty:
        return False
    if len(fields) <= _EXIT_CODE_FIELD:
        return False
    return bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING and int(fields[_EXIT_CODE_FIELD]) & 0x7F)
