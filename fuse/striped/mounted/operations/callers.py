"""What can be known of the process behind a request, from /proc.

Owns the reading of those files, nothing else. A process in a pid namespace out of sight
(pid 0) is taken to be alive and well.
"""

import signal
from pathlib import Path

from bootseer.fuse.kernel.operations import Caller

_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PF_EXITING = 0x4
# Positions in /proc/<pid>/stat (proc(5)), counted from the field behind the name.
_FLAGS_FIELD = 6
_EXIT_CODE_FIELD = 49


def is_dying(caller: Caller) -> bool:
    """Whether the process behind a request that the kernel wants interrupted has been killed.

    The kernel sends INTERRUPT for any signal; only a fatal one (SIGKILL pending, to which the
    kernel turns every other deadly signal) may end a read or write early: programs do not expect
    EINTR from a file.
    """
    if not caller.is_interrupted or not caller.pid:
        return False
    try:
        status = Path(f"/proc/{caller.pid}/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line[7:], 16) & _SIGKILL_BIT:
                return True
    except (OSError, ValueError):
        pass
    return False


def was_killed(caller: Caller) -> bool:
    """Whether a signal has ended the process whose descriptor is being closed.

    The kernel closes what a dying process left open exactly as if the process had closed it; but by
    then the task is marked as exiting, and its exit code holds the signal.
    """
    if not caller.pid:
        return False
    try:
        text = Path(f"/proc/{caller.pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        exiting = int(fields[_FLAGS_FIELD]) & _PF_EXITING
        return bool(exiting and int(fields[_EXIT_CODE_FIELD]) & 0x7F)
    except (OSError, ValueError, IndexError):
        return False
