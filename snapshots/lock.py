"""One process of a node at a time changes a target.

Alone owns the lock files in the run directory. Locks are flock(2): the kernel lets go of them when
their holder dies, however it dies.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer.errors import BusyError, from_oserror
from bootseer.private import make_private_directory

_FOLDER = "snapshots"
_POLL_FIRST_S = 0.01
_POLL_MAX_S = 0.5


def record_path(run_dir: Path, target: Path) -> Path:
    """Where this node's records of a target (a host path) lie, without a suffix."""
    return run_dir / _FOLDER / hashlib.sha256(os.fsencode(target)).hexdigest()[:32]


@contextmanager
def locked(run_dir: Path, targets: Sequence[Path], *, deadline_s: float) -> Iterator[None]:
    """Holds the locks of all `targets` (host paths) of this node.

    Raises: BusyError where another process holds one of them for longer than `deadline_s`.
    """
    folder = run_dir / _FOLDER
    try:
        make_private_directory(folder)
    except OSError as error:
        raise from_oserror(error, f"make the folder {folder}, by the setting run_dir") from error
    end = time.monotonic() + deadline_s
    with ExitStack() as stack:
        # Always in the same order, so that two with overlapping targets cannot wait in a circle.
        for target in sorted(set(targets)):
            path = record_path(run_dir, target).with_suffix(".lock")
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise from_oserror(error, f"open the lock {path}") from error
            stack.callback(os.close, fd)
            _take(fd, target, end)
        yield


def _take(fd: int, target: Path, end: float) -> None:
    pause = _POLL_FIRST_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise BusyError(
                    f"another process on this node is still setting up {target}; "
                    "wait for it, or end it"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)
