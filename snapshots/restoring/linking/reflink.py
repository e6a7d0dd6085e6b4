"""Copies of files that share their blocks until one is written: FICLONE (ioctl_ficlone(2)).

XFS, btrfs, bcachefs and some network file systems have it. Stateless; any thread.
"""

import fcntl
import tempfile
from pathlib import Path

FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h


def clone(source: int, target: int) -> None:
    """Make the empty file `target` share all of `source` (both descriptors). Raises: OSError."""
    fcntl.ioctl(target, FICLONE, source)


def can_reflink(directory: Path) -> bool:
    """Whether files of the file system of `directory`, in which we may write, can be cloned."""
    try:
        with (
            tempfile.TemporaryFile(dir=directory) as one,
            tempfile.TemporaryFile(dir=directory) as other,
        ):
            one.write(b"x" * 4096)
            one.flush()
            clone(one.fileno(), other.fileno())
    except OSError:
        return False
    return True
