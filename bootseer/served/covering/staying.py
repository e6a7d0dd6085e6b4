"""The life of a process that serves nothing: it stays for as long as an overlay is there, takes it
off after its last user, and then ends. What it keeps meanwhile is its own affair. One thread.
"""

import contextlib
import os
import select
from pathlib import Path

from bootseer.served.covering.cover_users import has_users, is_kept, leave
from bootseer.served.covering.covers import covers

# The kernel tells of changed mounts and ended processes; this is for what it may not tell.
_LOOK_MS = 60_000


def stay_while_covered(directory: Path, user: int) -> None:
    """Until the overlay of the mount with this folder is off; or there is none, and nobody who
    would make one. `user`: a descriptor of who makes it, which is closed."""
    poll = select.poll()
    was_covered = False
    try:
        with Path("/proc/self/mountinfo").open("rb") as table:
            # proc_pid_mountinfo(5): it is marked as having an error when mounts change.
            poll.register(table, select.POLLPRI | select.POLLERR)
            poll.register(user, select.POLLIN)
            while True:
                # Asked first: whoever has users has been covered before.
                was_covered = was_covered or has_users(directory)
                if was_covered and not _is_covered(directory.name):
                    return
                # With POLLIN, or with POLLHUP as well once its parent has reaped it.
                if all(fd != user for fd, _ in poll.poll(_LOOK_MS)):
                    continue
                poll.unregister(user)
                os.close(user)
                user = _next_user(directory)
                if user >= 0:
                    poll.register(user, select.POLLIN)
                elif not is_kept(directory) and not _is_covered(directory.name):
                    return
    finally:
        if user >= 0:
            os.close(user)


def _is_covered(identity: str) -> bool:
    return any(cover.id == identity for cover in covers())


def _next_user(directory: Path) -> int:
    """A descriptor of another process that uses the overlay; -1: none does, see `leave`."""
    while (pid := leave(directory)) is not None:
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(pid)
    return -1
