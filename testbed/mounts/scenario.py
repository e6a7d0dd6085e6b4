"""What the scenarios of tests/fuse/kernel/scenarios have in common.

A scenario is a script that works in the directory given as its first argument and says what it
sees; the test compares what it says on a mount with what it says on a plain directory.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.chdir(sys.argv[1])


def say(*values: object) -> None:
    """Print."""
    sys.stdout.write(" ".join(str(value) for value in values) + "\n")


def attempt(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a call, or the name of its errno."""
    try:
        return function(*arguments, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def write(name: str | bytes, data: bytes) -> None:
    """Make or replace a file."""
    Path(os.fsdecode(name)).write_bytes(data)


def read(name: str | bytes) -> bytes:
    """All of a file."""
    return Path(os.fsdecode(name)).read_bytes()


def show(name: str) -> None:
    """Say what lstat says, without what differs between two equal files."""
    status = os.lstat(name)
    size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else ""
    links = status.st_nlink if not stat.S_ISDIR(status.st_mode) else ""
    say(name, oct(status.st_mode), size_bytes, links, status.st_uid, status.st_gid, status.st_rdev)
