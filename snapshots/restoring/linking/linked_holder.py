"""The process behind a linked snapshot or a job's own view: a module of its own, begun by `held`.

It keeps the node's extracted tree, if there is one, for as long as an overlay shows it, takes the
overlay off after its last user, and removes what was written: what a server of `prefetch` is to a
mounted tree.
"""

import contextlib
import json
import logging
import os
import select
import signal
import sys
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.prefetch.mounts.cover_users import has_users, is_kept, leave
from bootseer.prefetch.mounts.covers import covers, uncover_all
from bootseer.prefetch.mounts.mount_state import (
    MountState,
    lock_new,
    remove_mount_dir,
    remove_scratch,
    sweep,
    write_state,
)
from bootseer.served.background import Report
from bootseer.settings.settings_json import settings_from_json
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees

_log = logging.getLogger(__name__)

# The kernel tells of changed mounts and ended processes; this is for what it may not tell.
_LOOK_MS = 60_000


def _stay(identity: str, state_dir: Path, user: int) -> None:
    """Until the overlay is off; or there is none, and nobody who would make one. `user`: a
    descriptor of who makes it, which is closed."""
    poll = select.poll()
    was_covered = False
    try:
        with Path("/proc/self/mountinfo").open("rb") as table:
            # proc_pid_mountinfo(5): it is marked as having an error when mounts change.
            poll.register(table, select.POLLPRI | select.POLLERR)
            poll.register(user, select.POLLIN)
            while True:
                # Asked first: whoever has users has been covered before.
                was_covered = was_covered or has_users(state_dir)
                if was_covered and not _is_covered(identity):
                    return
                # With POLLIN, or with POLLHUP as well once its parent has reaped it.
                if all(fd != user for fd, _ in poll.poll(_LOOK_MS)):
                    continue
                poll.unregister(user)
                os.close(user)
                user = _next_user(state_dir)
                if user >= 0:
                    poll.register(user, select.POLLIN)
                elif not is_kept(state_dir) and not _is_covered(identity):
                    return
    finally:
        if user >= 0:
            os.close(user)


def _is_covered(identity: str) -> bool:
    return any(cover.id == identity for cover in covers())


def _next_user(state_dir: Path) -> int:
    """A descriptor of another process that uses the overlay; -1: none does, see `leave`."""
    while (pid := leave(state_dir)) is not None:
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(pid)
    return -1


def main() -> int:
    """The exit code: 0 after the overlay is off."""
    document = json.loads(sys.stdin.buffer.read())
    # The job that replaces whoever started us must not find a child that it never made.
    if os.fork():
        os._exit(0)
    # As an exception it cleans up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s hold: %(message)s")
    report = Report(int(sys.argv[1]), "the holder of a linked snapshot")
    try:
        # Before it hears that we are ready: it may have finished and be gone a moment later.
        launcher = os.pidfd_open(document["launcher"])
        settings = settings_from_json(document["settings"])
        state = MountState(**{**document["state"], "pid": os.getpid()})
        state_dir = Path(document["state_dir"])
        lock = lock_new(state_dir)
        try:
            sweep(settings)
            digest = state.index_digest
            with NodeTrees(settings).held(digest) if digest else contextlib.nullcontext():
                write_state(state_dir, state)
                if report.send_ready():
                    _stay(state.id, state_dir, launcher)
        finally:
            uncover_all(state.id)
            remove_scratch(Path(state.scratch))
            # The folder last: it is what says that the mount is not quite gone.
            remove_mount_dir(state_dir)
            os.close(lock)
    except (BootseerError, OSError) as error:
        _log.error("%s", error)
        report.send_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
