"""How a target's path stands to mounts and to this process. Stateless; any thread."""

import contextlib
import os
from pathlib import Path

from bootseer.linux import mount_table


def is_mount_point(target: Path) -> bool:
    """Whether nothing can be renamed from beside `target` into it."""
    if not target.is_dir():
        return False
    if os.lstat(target).st_dev != os.lstat(target.parent).st_dev:
        return True
    # A bind mount of the same file system shows only in the table of mounts.
    with contextlib.suppress(OSError):
        return any(one.path == os.fsencode(target) for one in mount_table.mount_points())
    return False


def is_entered(path: Path) -> bool:
    """Whether this process works in the directory."""
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:
        return False  # it is gone, or cannot be named
