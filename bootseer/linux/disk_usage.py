"""What lies below a directory that strangers may be filling this moment. Stateless; any thread."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
NO_DISK = (*FULL, errno.EROFS)
"""Errors of a disk that cannot be written to: a reader works without its cache."""


def statuses_below(directory: Path) -> Iterator[os.stat_result]:
    """What lstat says of each name below `directory`, which itself is left out.

    Names that vanish meanwhile, or may not be looked at, are left out; so is what lies deeper than
    a path can say (PATH_MAX). Follows no link.
    """
    stack = [os.fsencode(directory)]
    while stack:
        # A list of what is left instead of recursion, which os.walk of Python 3.11 would use.
        with contextlib.suppress(OSError), os.scandir(stack.pop()) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                except OSError:
                    continue
                yield status
