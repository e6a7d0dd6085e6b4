"""Locks of the node cache, and errors of its disk. Stateless; thread-safe."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import DeadlineError, from_oserror
from bootseer.linux.locks import lock_file

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
NO_DISK = (*FULL, errno.EROFS)
"""Errors of a disk that takes nothing: a reader can do without a cache."""

LOCK_S = 60.0
"""Deadline of short locks: an fsync of gigabytes takes that long on a slow disk."""


@contextlib.contextmanager
def alone(path: Path, timeout_s: float, doing: str) -> Iterator[None]:
    """Hold the lock file `path`: no other process of this node is `doing` the same. The file goes
    with the lock; a killed holder lets go.

    Raises: DeadlineError if another process still holds it after `timeout_s`; BootseerError.
    """
    try:
        fd = lock_file(path, timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"another process was still {doing} after {timeout_s:g} s") from error
    except OSError as error:
        raise from_oserror(error, f"lock {path}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def locked(directory: Path, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock for opening, closing or removing the stream in `directory`, which is made if
    needed.

    Held while a header is looked at or for one fsync, never during a transfer.
    Raises: TimeoutError if another process holds it for `timeout_s`; OSError.
    """
    fd = lock_file(directory / "lock", timeout_s)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_if_there(directory: Path) -> Iterator[None]:
    """Hold the lock of the stream in `directory` without making the folder.

    Raises: FileNotFoundError if there is no such folder; OSError.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = lock_file(Path("lock"), LOCK_S, folder=folder)
    finally:
        os.close(folder)
    try:
        yield
    finally:
        os.close(fd)
