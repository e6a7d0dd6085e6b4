"""Full disks: their errors, and sizes of files in trees that change. Stateless; any thread."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
UNWRITABLE = (*FULL, errno.EROFS)
"""Errors of a disk that cannot be written to; a reader then works without its cache."""


def statuses_below(directory: Path) -> Iterator[os.stat_result]:
    """Yield the lstat result of each entry below `directory`, at any depth.

    Follows no link. Skips entries that vanish, are not accessible, or lie deeper than PATH_MAX.
    """
    stack = [os.fsencode(directory)]
    while stack:
        # A list instead of recursion, which os.walk of Python 3.11 uses: trees may be deep.
        with contextlib.suppress(OSError), os.scandir(stack.pop()) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                except OSError:
                    continue
                yield status
