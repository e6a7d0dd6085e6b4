"""How a target's path stands to mounts and to this process. Stateless; any thread."""

import contextlib
import os
import re
from pathlib import Path


def is_mount_point(target: Path) -> bool:
    """Whether nothing can be renamed from beside `target` into it."""
    if not target.is_dir():
        return False
    if os.lstat(target).st_dev != os.lstat(target.parent).st_dev:
        return True
    # A bind mount of the same file system shows only in the table of mounts, whose fifth field is
    # the mount point with blanks, backslashes and line ends in octal (proc_pid_mountinfo(5)).
    wanted = re.sub(rb"[ \t\n\\]", lambda match: b"\\%03o" % ord(match[0]), os.fsencode(target))
    with contextlib.suppress(OSError), Path("/proc/self/mountinfo").open("rb") as table:
        return any(line.split(b" ", 5)[4] == wanted for line in table)
    return False


def is_entered(path: Path) -> bool:
    """Whether this process works in the directory."""
    try:
        return Path.cwd().is_relative_to(path)
    except OSError:
        return False  # it is gone, or cannot be named
