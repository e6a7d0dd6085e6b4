"""One set-up of a node at a time changes a target, or what lies in it.

Alone owns the lock files in the run directory: a target's own is held alone, those of the
directories above it are shared. Locks are flock(2), and a set-up's command inherits them: when the
process that started it is killed, it goes on, and so do the locks, until it ends itself. Otherwise
they end with the `with` block, whatever the command has left running.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer.errors import BusyError, from_oserror
from bootseer.linux.locks import try_lock, unlock
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.processes import own_line

_FOLDER = "snapshots"
_POLL_FIRST_S = 0.01
_POLL_MAX_S = 0.5
_TELL_S = 2.0
# Scripts use low numbers for descriptors of their own. Above 63 the kernel makes a larger table,
# for which a process with threads waits for all processors (RCU): some 10 ms.
_FD_MIN = 40


def record_path(run_dir: Path, target: Path) -> Path:
    """Returns the path, without suffix, of this node's records of a target (a host path)."""
    return run_dir / _FOLDER / hashlib.sha256(os.fsencode(target)).hexdigest()[:32]


@contextmanager
def locked(
    run_dir: Path,
    targets: Sequence[Path],
    *,
    deadline_s: float,
    report: Callable[[str], None] = lambda sentence: None,
) -> Iterator[tuple[int, ...]]:
    """Holds the locks of all `targets` (host paths) of this node: gives the descriptors that a
    command which changes them is to inherit. `report` hears what is waited for, if it takes long.

    Raises: BusyError where another process holds one of them for longer than `deadline_s`, or one
    that this process descends from does.
    """
    folder = run_dir / _FOLDER
    try:
        make_private_directory(folder)
    except OSError as error:
        raise from_oserror(error, f"make the folder {folder}, by the setting run_dir") from error
    end = time.monotonic() + deadline_s
    fds: list[int] = []
    with ExitStack() as stack:
        above = {parent for target in targets for parent in target.parents}
        # Always in the same order, so that two with overlapping targets cannot wait in a circle.
        for target in sorted(above.union(targets)):
            is_shared = target not in targets
            path = record_path(run_dir, target).with_suffix(".lock")
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise from_oserror(error, f"open the lock {path}") from error
            stack.callback(os.close, fd)
            _take(fd, path, target, end, report, is_shared=is_shared)
            # For all copies of the descriptor, in whatever process: flock(2).
            stack.callback(unlock, fd)
            fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FD_MIN))
            stack.callback(os.close, fds[-1])
        yield tuple(fds)


def _take(
    fd: int,
    path: Path,
    target: Path,
    end: float,
    report: Callable[[str], None],
    *,
    is_shared: bool,
) -> None:
    pause = _POLL_FIRST_S
    tell_at = time.monotonic() + _TELL_S
    what = str(target) if is_shared else f"{target}, or what lies in it"
    while not try_lock(fd, is_shared=is_shared):
        if time.monotonic() >= end:
            raise BusyError(
                f"{_name(_holders(path))} on this node is still setting up {what}; "
                "wait for it, or end it"
            )
        if time.monotonic() >= tell_at:
            tell_at = end
            holders = _holders(path)
            if own_line().intersection(holders):
                raise BusyError(f"this set-up runs within the set-up of {what}")
            report(f"{_name(holders)} on this node is setting up {what}; waiting")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)


def _holders(path: Path) -> list[int]:
    """The other processes that have the lock file open, as far as this user may know."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and any(
                os.readlink(fd) == str(path) for fd in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return sorted(found)


def _name(holders: Sequence[int]) -> str:
    if not holders:
        return "another process"
    return f"process{'es' if holders[1:] else ''} {', '.join(map(str, holders[:5]))}"
